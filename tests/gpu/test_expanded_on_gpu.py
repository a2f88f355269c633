"""The expanded form of latent attention on a GPU: keys in two tensors, and all gradients, against float64."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score

from ..support import check_errors, mostly
from .test_lengths_on_gpu import PACKED, PADDED, cumulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs capability 9.0"
    ),
]

RANK = 128
slopes = weft.tensor("slopes", 1)
SCORES = {
    "dense": {},
    "causal": {"mask": masks.causal},
    "window": {"mask": masks.sliding_window(100)},
    "cap": {"score": 20.0 * weft.tanh(score / 20.0), "mask": masks.causal},
    "alibi": {"score": score + slopes[head] * (kv_pos - q_pos), "mask": masks.causal},
    "heated": {"score": score * slopes[head], "mask": masks.causal},  # of any sign
    "sunk": {"mask": masks.causal, "sink": slopes[head]},
}
NAMES = ("query", "cache", "uk", "uv")


def declared(name, rope=64):
    return weft.Attention(**SCORES[name], latent=weft.Latent(RANK, rope), name=f"mla_{name}_{rope}")


def operands_of(name, heads, q_len, kv_len, nope=128, rope=64, value_dim=128, batch=2, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(heads + q_len + kv_len)

    def random(*size):
        return torch.randn(size, device="cuda", generator=generator)

    query = random(batch, q_len, heads, nope + rope).to(dtype).transpose(1, 2)
    cache = random(batch, 1, kv_len, RANK + rope).to(dtype)
    uk, uv = (random(heads, RANK, n).div(RANK**0.5).to(dtype) for n in (nope, value_dim))
    own = {"slopes": random(heads) / 4} if name in ("alibi", "heated", "sunk") else {}
    return dict(zip(NAMES, (query, cache, uk, uv))), own


def gradients(call, tensors, own, dtype, dout, dlse, wanted=NAMES, **options):
    """out, lse and the gradients of what is wanted."""
    leaves = {n: t.detach().to(dtype).requires_grad_(n in wanted) for n, t in tensors.items()}
    own = {n: (t.to(dtype) if dtype == torch.float64 else t).detach().requires_grad_() for n, t in own.items()}
    query, cache, uk, uv = leaves.values()
    out, lse = call(query, cache, uk=uk, uv=uv, return_lse=True, **own, **options)
    into = [leaves[n] for n in wanted] + list(own.values())
    found = torch.autograd.grad((out, lse), into, (dout.to(out.dtype), dlse.to(lse.dtype)))
    return {"out": out, "lse": lse} | {f"d{n}": g for n, g in zip([*wanted, *own], found)}


def check(name, heads, q_len, kv_len, wanted=NAMES, target="hopper", deterministic=None, **sizes):
    tensors, own = operands_of(name, heads, q_len, kv_len, **sizes)
    mla, dtype = declared(name, sizes.get("rope", 64)), tensors["query"].dtype
    dout = torch.randn(*tensors["query"].shape[:3], tensors["uv"].shape[2], device="cuda")
    given = (tensors, own, dtype, dout, torch.randn(dout.shape[:3], device="cuda"), wanted)
    found = gradients(mla, *given, target=target, deterministic=deterministic, form="expanded")
    usual = gradients(mla.reference, *given)
    exact = gradients(mla.reference, *given[:2], torch.float64, *given[3:])
    for label in found:
        check_errors(found[label], exact[label], usual[label], f"{name} {label}")
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", SCORES)
def test_masks_and_scores(name):
    check(name, 4, 300, 300)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.slow(9)), 31, 32, 63, 64, 65, 127, 128, 129, 191, 256, 521]
)
@pytest.mark.parametrize("name", ["causal", "dense", "window"])
def test_lengths_at_the_edges_of_tiles(name, length):
    sizes = {"causal": (2, length, length), "dense": (3, 130, length), "window": (1, length, length + 77)}
    check(name, *sizes[name])


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_heads(heads):
    check("causal", heads, 200, 260, batch=1)


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("nope", "rope", "value_dim"), [(128, 32, 64), (128, 8, 128), (64, 32, 64), (64, 16, 128), (64, 24, 80)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_widths(nope, rope, value_dim, deterministic):
    check("causal", 4, 300, 333, nope=nope, rope=rope, value_dim=value_dim, deterministic=deterministic)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, nope, rope, value_dim", [("cap", 64, 32, 64), ("causal", 128, 64, 128)])
def test_half_precision(name, nope, rope, value_dim):
    check(name, 4, 300, 300, nope=nope, rope=rope, value_dim=value_dim, dtype=torch.float16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wanted", [("cache",), ("uk",), ("query",), ("query", "uv"), ("uk", "uv"), ("query", "cache")])
def test_gradients_that_nobody_wants_are_left_out(wanted):
    check("causal", 4, 200, 200, wanted)


def test_sums_over_heads_repeat_where_they_must():
    first, second = (check("causal", 16, 700, 700, deterministic=True) for _ in range(2))
    assert torch.equal(first["lse"], second["lse"])
    tensors, own = operands_of("causal", 16, 700, 700)
    dout, dlse = torch.randn(2, 16, 700, 128, device="cuda"), torch.randn(2, 16, 700, device="cuda")
    given = (tensors, own, torch.bfloat16, dout, dlse)
    once, again = (gradients(declared("causal"), *given, deterministic=True, target="hopper") for _ in range(2))
    assert all(torch.equal(once[n], again[n]) for n in once)


def test_targets_agree_where_columns_of_a_cache_lie_at_odd_addresses():
    """What the tensor memory accelerator cannot read is another target's, and refused where hopper is named."""
    tensors, _ = operands_of("causal", 4, 200, 200)
    odd = torch.empty(2, 1, 200, RANK + 64 + 1, device="cuda", dtype=torch.bfloat16)[..., 1:]
    odd.copy_(tensors["cache"])
    mla, query, more = declared("causal"), tensors["query"], {"uk": tensors["uk"], "uv": tensors["uv"]}
    usual = mla(query, tensors["cache"], **more, form="expanded", target="hopper")
    left = mla(query, odd, **more, form="expanded")
    assert (usual - left).float().norm() <= 1e-2 * usual.float().norm()
    with pytest.raises(weft.UnavailableError, match="rotary key: its address and strides"):
        mla(query, odd, **more, form="expanded", target="hopper")


# -- sequences of their own lengths ------------------------------------------------------------------------------------
def with_lengths(name, kind, lens, heads=4, **sizes):
    """Operands with garbage behind lengths, the gradient of the output too, and the options of the call."""
    q_lens, kv_lens = lens
    padded = kind == "padded"
    rows = (max(q_lens) + 3, max(kv_lens) + 5) if padded else (sum(q_lens) + 20, sum(kv_lens) + 9)
    tensors, own = operands_of(name, heads, *rows, batch=len(q_lens) if padded else 1, **sizes)
    dout = torch.randn(*tensors["query"].shape[:3], tensors["uv"].shape[2], device="cuda").to(tensors["query"].dtype)
    garbage = {tensors["query"]: (q_lens, torch.nan), tensors["cache"]: (kv_lens, torch.inf), dout: (q_lens, torch.nan)}
    for tensor, (of_rows, fill) in garbage.items():
        for b, length in enumerate(of_rows if padded else [sum(of_rows)]):
            tensor[b, :, length:] = fill
    if padded:
        return tensors, own, dout, dict(zip(("q_lens", "kv_lens"), (torch.tensor(n, device="cuda") for n in lens)))
    return tensors, own, dout, dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), map(cumulated, lens)))


def check_lengths(name, kind, lens, deterministic=None, offset=None, **sizes):
    tensors, own, dout, lengths = with_lengths(name, kind, lens, **sizes)
    mla = declared(name, sizes.get("rope", 64))
    dlse = torch.randn(dout.shape[:3], device="cuda")
    lengths |= {"q_offset": offset}
    options = {"target": "hopper", "deterministic": deterministic, "form": "expanded"}
    found = gradients(mla, tensors, own, dout.dtype, dout, dlse, **options, **lengths)
    known = torch.nan_to_num(dout)  # the definition has no gradient for rows of nobody
    dlse = torch.where(found["lse"].isinf(), 0.0, dlse)
    given = tensors, {n: t.float() for n, t in own.items()}
    usual = gradients(mla.reference, *given, dout.dtype, known, dlse, **lengths)
    exact = gradients(mla.reference, *given, torch.float64, known, dlse, **lengths)
    for label in found:
        check_errors(found[label], exact[label], usual[label], f"{name} {kind} {label}")
    return found


KINDS = {"padded": PADDED, "packed": PACKED}


@pytest.mark.slow(10)
@pytest.mark.sampled(46)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
def test_masks_and_scores_of_sequences(name, kind, deterministic):
    heads = 16 if name == "sunk" else 4  # of few sums of many roundings plain torch may be lucky with all
    check_lengths(name, kind, KINDS[kind], deterministic, heads=heads)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nope", "rope", "value_dim"), [(128, 32, 64), (128, 8, 128), (64, 32, 64), (64, 16, 128)])
def test_widths_of_sequences(nope, rope, value_dim, kind, deterministic):
    check_lengths("causal", kind, KINDS[kind], deterministic, nope=nope, rope=rope, value_dim=value_dim)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("nope", [128, 64])
def test_lengths_of_sequences_at_the_edges_of_tiles(nope, turn):
    generator = torch.Generator().manual_seed(8 * nope + turn)
    edges = torch.tensor([0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
    kind, name = "padded" if turn % 2 else "packed", "dense" if turn > 5 else "causal"
    for _ in range(2):
        lens = [edges[torch.randint(0, len(edges), (9,), generator=generator)].tolist() for _ in range(2)]
        check_lengths(name, kind, lens, turn % 4 > 1, heads=2, nope=nope, rope=nope // 2)


@pytest.mark.slow(12)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("offset", ["tensor", "number"])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_sequences(kind, offset):
    of_rows = torch.arange(len(KINDS[kind][0]), dtype=torch.int32, device="cuda") * 9 - 4
    check_lengths("window", kind, KINDS[kind], offset=5 if offset == "number" else of_rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("nope", "rope", "kind"),
    mostly(
        [(128, 64, "padded"), (128, 64, "packed"), (64, 32, "packed")],
        [(nope, rope, kind) for nope, rope in ((128, 64), (64, 32)) for kind in KINDS],
    ),
)
def test_gradients_of_sequences_repeat_bit_for_bit(nope, rope, kind):
    tensors, own, dout, lengths = with_lengths("causal", kind, KINDS[kind], heads=16, nope=nope, rope=rope)
    mla, found = declared("causal", rope), []
    for _ in range(20):
        given = tensors, own, dout.dtype, dout, torch.zeros(dout.shape[:3], device="cuda")
        found.append(gradients(mla, *given, target="hopper", deterministic=True, form="expanded", **lengths))
    assert all(torch.equal(again[n], found[0][n]) for again in found[1:] for n in again)


def test_a_graph_of_gradients_is_replayed_with_other_lengths(captured):
    """Nothing waits for the device, and sums over heads begin at 0 in each replay."""
    tensors, _, dout, lengths = with_lengths("causal", "packed", PACKED)
    leaves = [torch.nan_to_num(t, 0.0, 0.0, 0.0).requires_grad_() for t in tensors.values()]
    mla, dout = declared("causal"), torch.nan_to_num(dout)

    def step():
        query, cache, uk, uv = leaves
        out = mla(query, cache, uk=uk, uv=uv, target="hopper", form="expanded", **lengths)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    graph, found = captured(step)
    for shift in (0, 3, 60):
        for starts in lengths.values():
            starts[2:] = torch.minimum(starts[2:] + shift, starts[-1])
        graph.replay()
        for replayed, usual in zip(found, step()):
            assert (replayed - usual).float().norm() <= 1e-2 * usual.float().norm()


@pytest.mark.slow(26)
@pytest.mark.parametrize("backend", mostly(["aot_eager"], ["aot_eager", "inductor"]))
def test_a_layer_trains_under_torch_compile(backend):
    layer = weft.nn.LatentAttention(256, 4, kv_lora=RANK, nope=128, rope_dim=64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    plain = torch.autograd.grad(layer(x).float().square().mean(), list(layer.parameters()))
    found = torch.autograd.grad(compiled(x).float().square().mean(), list(layer.parameters()))
    for got, usual in zip(found, plain):
        assert (got - usual).float().norm() <= 3e-2 * usual.float().norm()
