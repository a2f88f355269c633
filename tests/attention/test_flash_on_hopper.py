"""The Hopper kernels of schedule flash on a CPU: their generated text, run by gluon.py, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, PackedPaged
from weft.runtime.driver import compile_kernels
from weft.runtime.run.key import boxed_of

from ..support import check_errors, mostly
from .gluon import OnACpu

pytest.importorskip("triton")

slopes, factor = weft.tensor("slopes", 1), weft.tensor("factor", 1)
SCORES = {
    "dense": {},
    "causal": {"mask": masks.causal},
    "window": {"mask": masks.sliding_window(100)},
    "cap": {"score": 20.0 * weft.tanh(score / 20.0), "mask": masks.causal},
    "softplus": {"score": weft.softplus(4.0 * score) + weft.logsigmoid(30.0 * score), "mask": masks.causal},
    "alibi": {"score": score + slopes[head] * (kv_pos - q_pos), "mask": masks.causal},
    "signed": {"score": score * factor[head], "mask": masks.causal},
}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAIN = ("query", "key", "value", "rope")


def launch(declared, call, results, wanted=(), deterministic=False, seed=0, offset="bottom_right", schedule=None,
           serves="all"):  # fmt: skip
    """One direction of a call, on what holds NaN wherever nobody has written; what it sums for operands.

    offset: of sequences with lengths.
    """
    direction = "backward" if wanted else "forward"
    if isinstance(call.sequences, Dense):
        offset = "per_row" if isinstance(call.sequences.q_offset, torch.Tensor) else "number"
    rope_dim = 0 if call.rope is None else call.rope.shape[3]
    signature = Signature(
        direction, "sm_90", Dtypes.all(DTYPES[call.query.dtype]),
        Widths(call.query.shape[3], call.value.shape[3], rope_dim), sequences=call.sequences.kind,
        offset=offset, wanted=frozenset(wanted),
        deterministic=deterministic, boxed=boxed_of(facts_of(declared), call.operands), serves=serves,
    )  # fmt: skip
    made = compile_kernels(declared, signature, by_name("h200"), "hopper", schedule)
    assert made.resolved.target.name == "hopper"
    launcher = OnACpu.of(made, declared, seed)
    partition = launcher.partition(call, results)
    workspace = {}
    for name, place in launcher.workspace(call, results, partition).items():
        workspace[name] = place.beside(call.query)
        if place.fill is None:
            workspace[name].fill_(float("nan") if workspace[name].dtype.is_floating_point else -(2**31))
    return launcher(call, results, workspace, partition)


def joined(key, rope):
    """Keys of all columns, which no kernel sees."""
    return key if rope is None else torch.cat([key, rope.expand(-1, key.shape[1], -1, -1)], dim=-1)


def operands_of(heads, kv_heads, q_len, kv_len, nope, rope_dim, value_dim, batch=2, dtype=torch.bfloat16):
    """query, key, value, and rope where there is one, as a cache has it: columns behind others."""
    torch.manual_seed(q_len + kv_len)
    query = torch.randn(batch, q_len, heads, nope + rope_dim).to(dtype).transpose(1, 2)
    key = torch.randn(batch, kv_len, kv_heads, nope).to(dtype).transpose(1, 2)
    value = torch.randn(batch, kv_heads, kv_len, value_dim).to(dtype)
    rope = torch.randn(batch, 1, kv_len, 16 + rope_dim).to(dtype)[..., 16:] if rope_dim else None
    return dict(zip(MAIN, (query, key, value, rope)))


def exact_of(plain, tensors, dout, dlse, dtype, offset=None, **operands):
    """out, lse and all gradients in plain torch."""
    leaves = {n: t.to(dtype).requires_grad_() for n, t in tensors.items() if t is not None}
    operands = {n: t.to(dtype) for n, t in operands.items()}
    key = joined(leaves["key"], leaves.get("rope"))
    out, lse = plain.reference(leaves["query"], key, leaves["value"], return_lse=True, q_offset=offset, **operands)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (dout.to(dtype), dlse.to(lse.dtype)))
    return {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, found)}}


def check(name, tensors, deterministic=False, leave_out=(), seed=0, schedule=None, offset=None):
    """A forward and a backward of all gradients but some."""
    given, operands = SCORES[name], {}
    rope, query, dtype = tensors["rope"], tensors["query"], tensors["query"].dtype
    if name == "alibi":
        operands["slopes"] = torch.linspace(-0.3, 0.6, query.shape[1])
    if name == "signed":
        operands["factor"] = torch.linspace(-1.0, 1.0, query.shape[1])
    latent = None if rope is None else weft.Latent(16, rope.shape[3])
    plain = weft.Attention(**given, name=f"plain_{name}")
    declared = weft.Attention(**given, latent=latent, name=f"apart_{name}")
    own = tensors["key"].shape[2] - query.shape[2] if offset is None else offset
    call = Call(*tensors.values(), operands, Dense(own), Choices(), query.shape[3])
    nan = float("nan")
    out = torch.full((*query.shape[:3], tensors["value"].shape[3]), nan, dtype=dtype)
    results = {"out": out, "lse": torch.full(query.shape[:3], nan)}
    launch(declared, call, results, seed=seed)
    dout, dlse = torch.randn(out.shape).to(dtype), torch.randn(query.shape[:3])
    wanted = [n for n, t in tensors.items() if t is not None and n not in leave_out]
    gradients = {f"d{n}": torch.full_like(tensors[n], nan) for n in wanted}
    launch(
        declared,
        call,
        {**results, "dout": dout, "dlse": dlse, **gradients},
        wanted,
        deterministic,
        seed,
        schedule=schedule,
    )
    exact, usual = (exact_of(plain, tensors, dout, dlse, kind, offset, **operands) for kind in (torch.float64, dtype))
    for label, found in {**results, **gradients}.items():
        check_errors(found, exact[label], usual[label], label)
    return gradients


# nope, rope, Dv: two passes, and one
APART = [(128, 64, 128), (64, 32, 64), (128, 32, 64), (64, 16, 128)]


@pytest.mark.parametrize(("nope", "rope", "value_dim"), mostly(APART[:2], APART))
def test_rotary_columns_of_keys_are_a_tensor_of_their_own(nope, rope, value_dim):
    check("causal", operands_of(3, 3, 130, 200, nope, rope, value_dim))


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_batch_row_has_an_offset_of_its_own(deterministic):
    """Programs take tiles of keys of several batch rows."""
    tensors = operands_of(2, 1, 130, 300, 64, 0, 64, batch=3)
    check("causal", tensors, deterministic, offset=torch.tensor([170, -20, 64], dtype=torch.int32))


@pytest.mark.parametrize("name", mostly(["window", "cap"], ["dense", "window", "cap", "alibi"]))
def test_masks_and_scores_of_keys_in_two_tensors(name):
    check(name, operands_of(2, 2, 257, 257, 128, 64, 128, batch=1))


@pytest.mark.parametrize(("dim", "negated"), [(64, "in SRAM"), (128, "in registers")])
def test_factors_of_either_sign_and_0(dim, negated):
    """A negative one changes the sign of Q once, where products read it."""
    check("signed", operands_of(3, 3, 130, 200, dim, 0, dim, batch=1))
    text = weft.Attention(**SCORES["signed"]).source(
        weft.shape(heads=3, q_len=2048, head_dim=dim), device="h200", target="hopper"
    )
    assert ("query.load(QUERY_OPERAND)" in text) == (negated == "in registers")


@pytest.mark.parametrize(
    ("q_len", "kv_len"), mostly([(65, 129)], [(1, 1), (128, 128), (65, 129), (127, 255), (300, 64)])
)
def test_lengths_at_the_edges_of_tiles(q_len, kv_len):
    check("causal" if q_len <= kv_len else "dense", operands_of(2, 2, q_len, kv_len, 128, 64, 128, batch=1))


FIRST = [  # queries, keys, key heads of 2, offset; not stored in groups, or before position 0
    (300, 300, 2, 0), (130, 400, 2, 270), (300, 130, 2, 0), (130, 400, 2, 7), (300, 300, 1, 0), (300, 200, 2, -100),
]  # fmt: skip


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kv_heads", "offset"), mostly([FIRST[0], FIRST[3], FIRST[4], FIRST[5]], FIRST)
)
@pytest.mark.parametrize("name", mostly(["causal"], ["causal", "dense", "cap"]))
def test_shares_of_first_keys_are_stored(name, q_len, kv_len, kv_heads, offset):
    """Sums of dQ hold NaN before, which a share that is added to them would leave there. Some keys have no query."""
    check(name, operands_of(2, kv_heads, q_len, kv_len, 64, 0, 64), offset=offset)


@pytest.mark.parametrize(("dim", "value_dim"), mostly([(32, 128)], [(32, 128), (128, 128), (128, 64), (16, 16)]))
def test_shares_of_first_keys_beside_results_that_leave_elsewhere(dim, value_dim):
    """Those of 32 and 128 columns have no room where shares of dQ leave."""
    for seed in range(3):
        check("causal", operands_of(2, 2, 130, 200, dim, 0, value_dim, batch=1), seed=seed)


def test_sums_over_heads_repeat_where_they_must():
    sizes = (4, 4, 130, 130, 128, 64, 128)
    first, second = (check("causal", operands_of(*sizes), deterministic=True, seed=seed) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in first)


LEFT_OUT = ["rope", "key value", "key", "query", "query key value", "query rope", "key value rope"]


@pytest.mark.parametrize("left_out", mostly(LEFT_OUT[:2], LEFT_OUT))
def test_gradients_that_nobody_wants_are_left_out(left_out):
    check("causal", operands_of(2, 2, 100, 140, 128, 64, 128, batch=1), leave_out=left_out.split())


@pytest.mark.parametrize("kind", ["lengths", "packed"])
def test_sequences_of_their_own_lengths(kind):
    """Forwards; gradients are in test_lengths_on_hopper.py."""
    tensors = operands_of(2, 2, 330, 330, 128, 64, 128, batch=3 if kind == "lengths" else 1)
    lens = [330, 5, 129] if kind == "lengths" else [190, 5, 129]
    starts = torch.tensor([0, 190, 195, 324], dtype=torch.int32)
    count = torch.tensor(lens, dtype=torch.int32)
    sequences = Lengths(count, count, None) if kind == "lengths" else Packed(starts, starts, None)
    declared = weft.Attention(mask=masks.causal, latent=weft.Latent(16, 64), name="apart_ragged")
    plain = weft.Attention(mask=masks.causal, name="plain_ragged")
    query = tensors["query"]
    call = Call(*tensors.values(), {}, sequences, Choices(), 192)
    out = torch.full((*query.shape[:3], 128), float("nan"), dtype=query.dtype)
    results = {"out": out, "lse": torch.full(query.shape[:3], float("nan"))}
    launch(declared, call, results)
    options = (
        {"kv_lens": count, "q_lens": count} if kind == "lengths" else {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    )
    key = joined(tensors["key"], tensors["rope"])
    exact, usual = (
        plain.reference(query.to(t), key.to(t), tensors["value"].to(t), return_lse=True, **options)
        for t in (torch.float64, query.dtype)
    )
    for label, *three in zip(("out", "lse"), results.values(), exact, usual):
        check_errors(*three, label)


@pytest.mark.parametrize(
    ("name", "page", "dim"), mostly([("causal", 16, 64)], [("causal", 16, 64), ("alibi", 128, 80)])
)
def test_packed_queries_over_pages(name, page, dim):
    """A long chunk beside sequences of one query, of none, and without keys; rows behind all; NaN where no key lies."""
    lens, kv_lens = [150, 1, 0, 3, 2], torch.tensor([290, 70, 40, 0, 2], dtype=torch.int32)
    starts = torch.tensor([0, 150, 151, 151, 154, 156], dtype=torch.int32)
    made = operands_of(4, 2, sum(lens) + 3, 20 * page, dim, 0, dim, batch=1)
    pages = -(-290 // page)
    blocks = 5 * pages + 2
    table = torch.randperm(blocks)[: 5 * pages].view(5, pages)
    pools = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        pool = torch.randn(blocks, page, 2, dim).bfloat16().transpose(1, 2)
        for b, length in enumerate(kv_lens.tolist()):
            for i in range(pages):
                pool[table[b, i], :, max(0, length - i * page) :] = float("nan")
        pools.append(pool)
    for b, length in enumerate(kv_lens.tolist()):
        table[b, -(-length // page) :] = -(2**31)
    query, operands = made["query"], {}
    if name == "alibi":
        operands["slopes"] = torch.linspace(-0.3, 0.6, 4)
    declared = weft.Attention(**SCORES[name], name=f"mixed_{name}")
    sequences = PackedPaged(starts, kv_lens, table.int(), page, None)
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    results = {"out": out, "lse": torch.full(query.shape[:3], float("nan"))}
    call = Call(query, *pools, None, operands, sequences, Choices(), dim)
    launch(declared, call, results)
    shared = {name: torch.full_like(tensor, 7.0) for name, tensor in results.items()}
    launch(declared, call, shared, serves="long")  # the first sequence, and rows of none: nothing else is touched
    for label, tensor in shared.items():
        assert torch.equal(tensor[:, :, :150], results[label][:, :, :150]), label
        assert bool((tensor[:, :, 150:156] == 7.0).all()), label
        assert torch.equal(tensor[:, :, 156:], results[label][:, :, 156:]), label
    short = torch.tensor([0, 50, 60, 61, 100, 159], dtype=torch.int32)
    none = {name: torch.full_like(tensor, 7.0) for name, tensor in results.items()}
    launch(declared, replace(call, sequences=PackedPaged(short, kv_lens, table.int(), page, None)), none, serves="long")
    assert all(bool((tensor == 7.0).all()) for tensor in none.values())
    given = {"cu_seqlens_q": starts, "kv_lens": kv_lens, "block_table": table.int(), "return_lse": True}
    exact, usual = (
        declared.reference(query.to(t), *(p.to(t) for p in pools), **given, **{n: o.to(t) for n, o in operands.items()})
        for t in (torch.float64, query.dtype)
    )
    for label, *three in zip(("out", "lse"), results.values(), exact, usual):
        check_errors(*three, label)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), mostly([(24, 32)], [(16, 16), (24, 32), (32, 128), (64, 24)]))
def test_narrow_heads(head_dim, value_dim, deterministic):
    """Tiles of 128 queries, and of 64 where slopes want registers: dQ leaves in parts of 32 and of 16 columns."""
    name = "causal" if deterministic else "cap"
    check(name, operands_of(4, 2, 130, 200, head_dim, 0, value_dim, batch=1), deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "value_dim"), mostly([(192, 128)], [(192, 128), (80, 80), (144, 64), (128, 128)]))
def test_queries_see_keys_in_pieces(head_dim, value_dim):
    """Two passes of keys with heads of their own, in groups."""
    check("causal", operands_of(4, 2, 130, 200, head_dim, 0, value_dim, batch=1), deterministic=True)


@pytest.mark.parametrize(
    ("width", "form"),
    [(96, "64x128s2+next"), (64, "64x128s3+next"), (40, "64x128s3"), (64, "128x128s2+next"), (64, "64x128s2+ahead")],
)
def test_other_forms_of_one_pass(width, form):
    tensors = operands_of(4, 2, 130, 200, width, 0, width, batch=1)
    check("causal", tensors, schedule=f"flash/flash_backward=hopper:{form}")
