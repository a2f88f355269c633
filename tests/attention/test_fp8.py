"""FP8 operands: every target against float64 over the dequantised operands, errors of formats, bad input."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import weft
from benchmarks import fp8_accuracy
from weft import kv_pos, q_pos
from weft.compiler.planning.dtypes import dtype_named

from ..support import check_errors, mostly, poisoned
from .cases import CAUSAL, cases

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS = cases(
    "dense", "causal", "window", "cap", "negative", "alibi", "documents", "far", "sink", "sigmoid", "relu", "dropout",
    rows=200, document=23,
)  # fmt: skip
TARGETS = ("cpu", "interpret")
QUERIES = {"cpu": torch.bfloat16, "interpret": torch.float16}


def quantized(shape, per, dtype=E4M3, seed=0, size=1.0, layout="rows"):
    """FP8 numbers of random ones inside NaN, and their descale; "number": a float."""
    x = poisoned(shape, torch.float32, seed=seed) * size
    data, descale = weft.fp8.quantize(x, per="tensor" if per == "number" else per, dtype=dtype, layout=layout)
    return (data, descale.item()) if per == "number" else (data, descale)


def check(variant, tensors, target, *, normalizes=True, schedule=None, **options):
    """out and lse of a call against float64; the definition in the call's own dtype is what plain torch would get."""
    wide = [t.double() if t.dtype not in (E4M3, E5M2) else t for t in tensors]
    given = {**options, "return_lse": normalizes}
    found = variant(*tensors, target=target, schedule=schedule, **given)
    exact = variant.reference(*wide, **{**given, "out_dtype": torch.float64})
    plain = variant.reference(*tensors, **given)
    found, exact, plain = ([x] if isinstance(x, torch.Tensor) else x for x in (found, exact, plain))
    assert found[0].dtype == plain[0].dtype == options.get("out_dtype", found[0].dtype)
    for name, x, e, p in zip(("out", "lse"), found, exact, plain):
        check_errors(x, e, p, f"{variant.name} {target} {name}")
    return found[0]


def operands(target, per=("head", "head", "head"), dtypes=(None, E4M3, E4M3), rows=(70, 130), dim=32, value_dim=24):
    """query [2, 4, L, D], key and value [2, 2, T, ...], those with an FP8 dtype as such, and the options of a call."""
    shapes = (2, 4, rows[0], dim), (2, 2, rows[1], dim), (2, 2, rows[1], value_dim)
    tensors, options = [], {}
    for n, (shape, dtype) in enumerate(zip(shapes, dtypes)):
        if dtype is None:
            tensors.append(poisoned(shape, QUERIES[target], seed=n))
            continue
        data, descale = quantized(shape, per[n], dtype, seed=n, size=(1.0, 3.0, 0.02)[n])
        tensors.append(data)
        options[f"{'qkv'[n]}_descale"] = descale
    if None not in dtypes and target == "interpret":
        options["out_dtype"] = torch.float16  # Triton's interpreter has no bf16
    return tensors, options


ALL = weft.Attention(name="all_keys")
MASKED = weft.Attention(mask=(kv_pos // 16 == q_pos // 16) | (kv_pos <= q_pos), name="blocks_or_causal")


def with_fp8_values(widths, rows, dtype, key_is_fp8, value_dtype, per, device="cpu"):
    """Operands whose value is FP8, with descales or without (per=None), and the options of a call."""
    query, key = (poisoned((2, h, rows, widths[0]), dtype, device, seed=h) for h in (4, 2))
    value, options = poisoned((2, 2, rows, widths[1]), torch.float32, device, seed=1), {}
    key = key.to(E4M3) if key_is_fp8 else key
    if per is None:
        value = value.to(value_dtype)
    else:
        value, options["v_descale"] = weft.fp8.quantize(value, per=per, dtype=value_dtype)
    return (query, key, value), options


def check_lse(name):
    return name not in ("sigmoid", "relu")


# -- the definition ----------------------------------------------------------------------------------------------------
def test_the_reference_is_of_real_numbers() -> None:
    query, key, value = torch.randn(3, 2, 2, 40, 16, dtype=torch.float64)
    key8, value8 = weft.fp8.quantize(key), weft.fp8.quantize(value, per=64)
    options = {"k_descale": key8.descale, "v_descale": value8.descale}
    real = [weft.fp8.dequantize(x, torch.float64) for x in (key8, value8)]
    found = CAUSAL.reference(query, key8.data, value8.data, **options)
    torch.testing.assert_close(found, CAUSAL.reference(query, *real), atol=1e-14, rtol=0)
    assert CAUSAL.reference(query.bfloat16(), key8.data, value8.data, **options).dtype == torch.bfloat16
    wide = CAUSAL.reference(query.bfloat16(), key8.data, value8.data, out_dtype=torch.float64, **options)
    torch.testing.assert_close(wide, CAUSAL.reference(query.bfloat16().double(), *real), atol=1e-14, rtol=0)


# -- targets -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_over_an_fp8_cache(name: str, target: str) -> None:
    variant, own = VARIANTS[name]
    tensors, options = operands(target, per=("head", "head", "token"))
    if name in ("relu", "sigmoid") and target == "interpret":  # weights of any size want bf16
        with pytest.raises(weft.UnavailableError, match="interpreter computes fp32 and fp16 correctly, not bf16"):
            variant(*tensors, target=target, **options)
        tensors[0] = tensors[0].float()
    check(variant, tensors, target, normalizes=check_lse(name), **own, **options)


PER = ["number", "tensor", "head", 64, 128, "token"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("per", PER)
def test_all_operands_in_fp8_with_descales_of_any_kind(per, target: str) -> None:
    tensors, options = operands(target, per=(per, per, per), dtypes=(E4M3, E4M3, E4M3), rows=(70, 200))
    out = check(CAUSAL, tensors, target, **options)
    assert out.dtype == (torch.bfloat16 if target == "cpu" else torch.float16)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtypes", [(None, E5M2, E5M2), (E5M2, E4M3, E5M2), (None, E4M3, None), (None, None, E4M3),
                                    (E4M3, None, None), (E4M3, E5M2, None)])  # fmt: skip
def test_any_of_the_operands_may_be_fp8(dtypes, target: str) -> None:
    tensors, options = operands(target, dtypes=dtypes)
    check(CAUSAL, tensors, target, **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("per", [None, "head", 64, "token"])
@pytest.mark.parametrize("key_is_fp8", [True, False])
def test_values_in_fp8_beside_keys_in_either(key_is_fp8, per, target: str) -> None:
    """The CPU's share of test_fp8_on_gpu.py."""
    tensors, options = with_fp8_values((32, 16), 33, QUERIES[target], key_is_fp8, E5M2, per)
    check(MASKED, tensors, target, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_few_queries_behind_many_keys(target: str) -> None:
    for per in ("head", "token"):
        tensors, options = operands(target, per=(per, per, per), rows=(2, 400))
        for variant, own in (VARIANTS["causal"], VARIANTS["sink"], VARIANTS["cap"]):
            check(variant, tensors, target, schedule="split_kv" if target == "interpret" else None, **own, **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("per", ["head", 64, "token"])
def test_padded_and_packed_sequences(per, target: str) -> None:
    tensors, options = operands(target, per=(per, per, per), dtypes=(E4M3, E4M3, E4M3), rows=(70, 150))
    lens = {"q_lens": torch.tensor([70, 33]), "kv_lens": torch.tensor([90, 150], dtype=torch.int32)}
    for name in ("causal", "documents", "sink"):
        variant, own = VARIANTS[name]
        check(variant, tensors, target, **lens, **own, **options)
    packed, options = [], {}
    for n, shape in enumerate([(1, 4, 100, 32), (1, 2, 180, 32), (1, 2, 180, 24)]):
        data, options[f"{'qkv'[n]}_descale"] = quantized(shape, per, seed=n)
        packed.append(data)
    if target == "interpret":
        options["out_dtype"] = torch.float16
    starts = {"cu_seqlens_q": torch.tensor([0, 40, 100]), "cu_seqlens_kv": torch.tensor([0, 110, 180])}
    check(CAUSAL, packed, target, **starts, **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("per", ["number", "head", "token"])
@pytest.mark.parametrize("page", mostly([16], [16, 64]))
def test_pages(page: int, per, rows: int, target: str) -> None:
    query = poisoned((3, 4, rows, 32), QUERIES[target], seed=5)
    key, value = (poisoned((12, 2, page, width), torch.float32, seed=n) for n, width in ((1, 32), (2, 24)))
    options = {"block_table": torch.randperm(12).view(3, 4).int(), "kv_lens": torch.tensor([4 * page, 0, page + 3])}
    pools = []
    for n, pool in (("k", key), ("v", value)):
        whole = weft.fp8.quantize(pool.transpose(0, 1).flatten(1, 2)[None], per="head" if per == "head" else "tensor")
        data, descale = weft.fp8.quantize(pool, per="token") if per == "token" else (
            whole.data[0].unflatten(1, (12, page)).transpose(0, 1), whole.descale
        )  # fmt: skip
        pools.append(data)
        options[f"{n}_descale"] = descale.item() if per == "number" else descale
    for name in ("causal", "cap", "sink", "sigmoid"):
        variant, own = VARIANTS[name]
        wide = target == "interpret" and name == "sigmoid"  # its weights want bf16, or fp32
        check(variant, [query.float() if wide else query, *pools], target, normalizes=check_lse(name), **options, **own)
    packed = query.transpose(0, 1).flatten(1, 2)[None]
    starts = torch.arange(4) * rows
    check(CAUSAL, [packed, *pools], target, cu_seqlens_q=starts, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_a_value_whose_length_is_contiguous_is_the_same_value(target: str) -> None:
    tensors, options = operands(target, rows=(70, 131))
    columns = weft.fp8.quantize(poisoned((2, 2, 131, 24), torch.float32, seed=2) * 0.02, layout="columns")
    assert columns.data.stride()[2:] == (1, 144) and columns.data.shape == tensors[2].shape
    assert torch.equal(columns.data.float(), tensors[2].float())
    query, key, value = tensors
    given = {**options, "target": target}
    assert torch.equal(CAUSAL(query, key, columns.data, **given), CAUSAL(query, key, value, **given))
    defined = [CAUSAL.reference(query, key, v, **options) for v in (columns.data, columns.data.contiguous(), value)]
    assert torch.equal(defined[0], defined[2]) and torch.equal(defined[1], defined[2])


@pytest.mark.parametrize("target", TARGETS)
def test_descales_far_from_one_are_exact(target: str) -> None:
    """Weights times descales of values, and rows of the query, would leave the range of fp16."""
    tensors, options = operands(target, per=("head", "token", "token"))
    tensors[0] = tensors[0] * 2.0**-10
    uneven = options["v_descale"] * torch.logspace(-30, 30, 130, base=2.0)[None, None, :, None]
    for v_descale in (options["v_descale"] * 2.0**-40, options["v_descale"] * 2.0**40, uneven, uneven.flip(2)):
        given = {"k_descale": options["k_descale"] * 2.0**-8, "v_descale": v_descale, "out_dtype": torch.float32}
        out, exact = CAUSAL(*tensors, target=target, **given), CAUSAL.reference(*tensors, **given)
        assert ((out - exact).norm(dim=-1) <= 2.0**-9 * exact.norm(dim=-1)).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "schedule"), [(40, None), (2, "split_kv")])
def test_small_weights_of_small_descales_keep_their_bits(rows: int, schedule, target: str) -> None:
    """In fp16 weights times descales over the largest would be subnormal: rounded by more than fp16 rounds the output.

    The first key has nearly all the weight, the largest descale, and a value of 0: the output is what the others add.
    """
    tensors, options = operands(target, per=("head", "head", "token"), rows=(rows, 130))
    query, key, value = tensors
    query[:], key[:, :, 0] = 0.5, 3.5  # a score of 10 more than the others
    key[:, :, 1:] = (torch.randn_like(key[:, :, 1:].float()) / 4).to(E4M3)
    value[:, :, 0] = 0.0
    options |= {"k_descale": torch.ones(2, 2, 1, 1), "v_descale": torch.full((2, 2, 130, 1), 2.0**-3)}
    options["v_descale"][:, :, 0] = 2.0**4
    given = {**options, "out_dtype": torch.float32}
    out = CAUSAL(query, key, value, target=target, schedule=schedule if target == "interpret" else None, **given)
    exact = CAUSAL.reference(query, key, value, **given)
    assert exact.norm(dim=-1)[..., -1].min() > 0
    assert ((out - exact).norm(dim=-1) <= 2.0**-7 * exact.norm(dim=-1)).all()


# -- the output --------------------------------------------------------------------------------------------------------
def test_the_dtype_of_the_output() -> None:
    (query, key, value), options = operands("cpu")
    assert CAUSAL(query, key, value, **options).dtype == torch.bfloat16
    assert CAUSAL(query.half(), key, value, **options).dtype == torch.float16
    assert CAUSAL(key, key, value).dtype == torch.bfloat16
    assert CAUSAL(key, key, value.half()).dtype == torch.float16
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        assert CAUSAL(query, key, value, out_dtype=dtype, **options).dtype == dtype
        assert CAUSAL.reference(query, key, value, out_dtype=dtype, **options).dtype == dtype
    plain = torch.randn(1, 1, 4, 16)
    assert CAUSAL(plain, plain, plain, out_dtype=torch.float32).dtype == torch.float32
    said = "out_dtype: expected torch.float32 as the query is, got torch.bfloat16"
    with pytest.raises(weft.WeftError, match=said) as raised:
        CAUSAL(plain, plain, plain, out_dtype=torch.bfloat16)
    assert (raised.value.option, raised.value.got) == ("out_dtype", "torch.bfloat16")
    with pytest.raises(weft.WeftError, match="out_dtype: expected torch.bfloat16, .*, got torch.float8_e4m3fn"):
        CAUSAL(query, key, value, out_dtype=E4M3)


def test_calls_under_torch_compile_and_by_the_op() -> None:
    (query, key, value), options = operands("cpu")
    expected = CAUSAL(query, key, value, **options)
    compiled = torch.compile(lambda *given: CAUSAL(*given, **options), backend="eager", fullgraph=True)
    assert torch.equal(compiled(query, key, value), expected)
    quantize = torch.compile(lambda x: weft.fp8.quantize(x, per="head"), backend="eager", fullgraph=True)
    assert torch.equal(quantize(query)[0].float(), weft.fp8.quantize(query, per="head").data.float())
    torch.library.opcheck(torch.ops.weft.quantize, (query.float(), 64, "e4m3", False))


# -- bad input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("descale", "message"),
    [
        (0.0, "k_descale: expected a positive number, got 0.0"),
        (-1.0, "k_descale: expected a positive number, got -1.0"),
        (math.nan, "k_descale: expected a positive number, got nan"),
        (math.inf, "k_descale: expected a positive number, got inf"),
        (1e300, r"k_descale: expected a number that float32 holds, got 1e\+300"),
        (1e-300, "k_descale: expected a number that float32 holds, got 1e-300"),
        pytest.param(10**400, "k_descale: expected a number .*, got an int of 1329 bits", id="a large int"),
        ([1.0], "k_descale: expected a float or a float32 tensor, got list"),
        (numpy.float32(1.0), "k_descale: expected a float or a float32 tensor, got numpy.float32"),
        (torch.ones(2).int(), "k_descale: expected float32 on cpu, got torch.int32 on cpu; cast it, k_descale.float()"),
        (torch.ones(0), r"k_descale: .*got shape \[0\]"),
        (torch.ones(3), r"k_descale: .*got shape \[3\]"),
        (torch.ones(1, 1, 1, 1, 1), r"k_descale: .*got shape \[1, 1, 1, 1, 1\]"),
        (torch.tensor([1.0, math.inf]), "k_descale: expected positive numbers, got inf"),
        ("1", "k_descale: expected a float or a float32 tensor, got str"),
        (weft.fp8.quantize(torch.ones(1, 1, 1, 1)), "k_descale: .*, got weft.fp8.Quantized; pass k_descale=x.descale"),
        (torch.ones(2).to_sparse(), "k_descale: expected a dense tensor, got layout .*; pass k_descale.to_dense()"),
        (True, "k_descale: expected a float or a float32 tensor, got bool"),
        (torch.ones(2, 2, 1, 1).double(), "k_descale: expected float32 on cpu, got torch.float64 on cpu; cast it"),
        (torch.ones(2, 4, 1, 1), r"k_descale: expected what broadcasts to \[2, 2, 1, 1\].*got shape \[2, 4, 1, 1\]"),
        (torch.ones(2, 2, 4, 1), r"k_descale: .*\[2, 2, 2 or 3 or 130, 1\], got shape \[2, 2, 4, 1\]"),
        (torch.ones(2, 2, 1, 32), r"k_descale: .*got shape \[2, 2, 1, 32\]"),
        (torch.tensor([1.0, 0.0]), "k_descale: expected positive numbers, got 0.0"),
        (torch.tensor([1.0, math.nan]), "k_descale: expected positive numbers, got nan"),
        (torch.tensor([1.0, -2.0]), "k_descale: expected positive numbers, got -2.0"),
        (torch.ones(2, device="meta"), "k_descale: expected float32 on cpu, got torch.float32 on meta"),
        (torch.ones(2, requires_grad=True), "k_descale: a descale has no gradient; pass k_descale.detach()"),
    ],
)
def test_descales_that_are_none(descale, message: str) -> None:
    (query, key, value), _ = operands("cpu")
    for call in (CAUSAL, CAUSAL.reference):
        with pytest.raises(weft.WeftError, match=message) as raised:
            call(query, key, value, k_descale=descale)
        assert raised.value.option == "k_descale" and (raised.value.got or raised.value.next_step)


def test_numbers_of_descales_are_looked_at_in_graphs_and_under_vmap_too() -> None:
    """When the op runs: a trace sees no numbers."""
    (query, key, value), options = operands("cpu")
    good, bad = options["k_descale"], -options["k_descale"]

    def call(descale):
        return CAUSAL(query, key, value, k_descale=descale)

    compiled, mapped = torch.compile(call, backend="eager", fullgraph=True), torch.func.vmap(call)
    assert torch.equal(compiled(good), call(good)) and torch.equal(mapped(good[None])[0], call(good))
    for made in (lambda: compiled(bad), lambda: mapped(bad[None]), lambda: mapped(torch.stack([good, bad]))):
        with pytest.raises(weft.WeftError, match="k_descale: expected positive numbers, got -"):
            made()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 0.0, -1.0])
def test_descales_behind_lengths_may_be_anything(garbage: float, target: str) -> None:
    """As rows there: nobody reads them. A number that is read is refused."""
    lens, table = torch.tensor([70, 31], dtype=torch.int32), torch.tensor([[3, 1, 99], [2, -5, 0]], dtype=torch.int32)
    (query, key, value), options = operands(target, per=("token", "token", 64), dtypes=(E4M3, E4M3, E4M3))
    options.pop("out_dtype", None)
    kept = {n: t.clone() for n, t in options.items()}
    for b, n in enumerate(lens.tolist()):
        options["k_descale"][b, :, n:] = options["v_descale"][b, :, -(-n // 64) :] = garbage
    options["q_descale"][1, :, 5:] = garbage
    given = {"kv_lens": lens, "q_lens": torch.tensor([70, 5]), "q_offset": 0, "out_dtype": QUERIES[target]}

    def call(descales, **more):
        return CAUSAL(query, key, value, **descales, **{**given, **more}, target=target)

    assert torch.equal(call(options), call(kept))
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(options), call(kept))
    with pytest.raises(weft.WeftError, match="k_descale: expected positive numbers, got"):
        call(options, kv_lens=torch.tensor([71, 31]))
    packed, starts = [t[:1] for t in (query, key[:, :, :70], value[:, :, :70])], torch.tensor([0, 0, 40, 66])
    own = {n: kept[n][:1, :, : {"v_descale": 2}.get(n, 70)].clone() for n in kept}
    behind = {n: t.clone() for n, t in own.items()}
    behind["q_descale"][:, :, 66:] = behind["k_descale"][:, :, 66:] = garbage
    found = [CAUSAL(*packed, **d, cu_seqlens_q=starts, out_dtype=QUERIES[target], target=target) for d in (own, behind)]
    assert torch.equal(*found)

    pools, descales = zip(*(quantized((4, 2, 32, 32), "token", seed=n) for n in (1, 2)))
    spoilt = [d.clone() for d in descales]
    for d in spoilt:
        d[0], d[1, :, 8:], d[2, :, 20:] = garbage, garbage, garbage
    paged = {"block_table": table, "kv_lens": torch.tensor([40, 20], dtype=torch.int32), "target": target}
    rows = poisoned((2, 4, 3, 32), QUERIES[target])
    found = [CAUSAL(rows, *pools, k_descale=k, v_descale=v, **paged) for k, v in (descales, spoilt)]
    assert torch.equal(*found)
    spoilt[1][2, :, 19] = garbage
    with pytest.raises(weft.WeftError, match="v_descale: expected positive numbers, got"):
        CAUSAL(rows, *pools, k_descale=spoilt[0], v_descale=spoilt[1], **paged)


def test_operands_that_do_not_fit() -> None:
    (query, key, value), _ = operands("cpu")
    with pytest.raises(weft.WeftError, match="q_descale: expected None, as query is torch.bfloat16"):
        CAUSAL(query, key, value, q_descale=1.0)
    with pytest.raises(weft.WeftError, match="value: expected dtype torch.bfloat16 as in query, got torch.float16"):
        CAUSAL(query, key, value.half())
    pools = [x.repeat(2, 1, 1, 1)[:, :, :64] for x in (key, value)]
    table = {"block_table": torch.zeros(2, 1, dtype=torch.int32), "kv_lens": torch.tensor([3, 3])}
    for shape in ((4, 2, 1, 1), (1, 2, 64, 1)):
        with pytest.raises(weft.WeftError, match=r"k_descale: .*or one number a row of the pool, \[4, 2, 64, 1\]"):
            CAUSAL(query, *pools, k_descale=torch.ones(shape), **table)
    small = [x[:, :, :1] for x in pools]
    with pytest.raises(
        weft.WeftError, match=r"broadcasts to \[1, 2, 1, 1\], as pages have one row, got shape \[4, 2, 1"
    ):
        CAUSAL(
            query,
            *small,
            k_descale=torch.ones(4, 2, 1, 1),
            block_table=table["block_table"],
            kv_lens=torch.ones(2, dtype=torch.int32),
        )


def test_what_quantize_gives_is_no_operand_by_itself() -> None:
    """The data is; the message says where both parts go."""
    x = weft.fp8.quantize(torch.randn(1, 1, 4, 8))
    said = "{0}: expected a tensor, got Quantized; pass x.data, and {1}_descale=x.descale"
    for n, name in enumerate(("query", "key", "value")):
        given = [x if n == other else x.data for other in range(3)]
        for call in (CAUSAL, CAUSAL.reference):
            with pytest.raises(weft.WeftError, match=said.format(name, name[0])):
                call(*given)


def test_the_interpreter_says_which_output_it_computes() -> None:
    x = weft.fp8.quantize(torch.randn(1, 1, 4, 8)).data
    said = "not bf16, the dtype of the output; pass out_dtype=torch.float16 or torch.float32"
    with pytest.raises(weft.UnavailableError, match=said):
        CAUSAL(x, x, x, target="interpret")


def test_there_is_no_backward_and_a_message_says_what_to_do() -> None:
    (query, key, value), options = operands("cpu")
    for call in (CAUSAL, CAUSAL.reference):
        with pytest.raises(weft.WeftError, match="FP8 operands has no backward; .* train with bf16"):
            call(query.requires_grad_(), key, value, **options)
    with torch.no_grad():
        CAUSAL(query, key, value, **options)
    real = torch.randn(1, 2, 64, 16, requires_grad=True)
    through = real + (weft.fp8.dequantize(weft.fp8.quantize(real.detach())) - real).detach()
    CAUSAL(through, through, through).sum().backward()
    assert torch.isfinite(real.grad).all() and real.grad.norm() > 0


def test_fake_tensors_have_the_shape_of_the_output() -> None:
    """Nobody looks at values that are not there."""
    with FakeTensorMode():
        query, key = torch.randn(2, 4, 17, 64), torch.randn(2, 2, 90, 64)
        key8, query8 = weft.fp8.quantize(key), weft.fp8.quantize(query)
        descales = {"k_descale": key8.descale, "v_descale": key8.descale}
        assert CAUSAL(query, key8.data, key8.data, **descales).shape == (2, 4, 17, 64)
        out = CAUSAL(query8.data, key8.data, key8.data, q_descale=query8.descale, **descales)
        assert out.dtype == torch.bfloat16


def test_autocast_leaves_fp8_alone() -> None:
    (query, key, value), options = operands("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(CAUSAL(query.float(), key, value, **options), CAUSAL(query, key, value, **options))


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_keys_of_a_cache_without_its_descales_are_refused(kind: str) -> None:
    given = {"kv_heads": 2, "head_dim": 16, "dtype": E4M3}
    cache = weft.kv.PagedCache(8, **given) if kind == "paged" else weft.kv.DenseCache(2, 32, **given)
    sequence, rows = cache.allocate(), torch.randn(2, 1, 2, 5, 16)
    step = cache.append([sequence], *rows)
    lengths = {n: value for n, value in step.options.items() if n not in ("k_descale", "v_descale")}
    query = torch.randn(1, 4, 5, 16)
    message = r"{}_descale: missing, and the cache that the {} comes from has some; pass \*\*step.options_of\(layer\)"
    key, value = (message.format(name[0], name) for name in ("key", "value"))
    for call in (CAUSAL, CAUSAL.reference):
        pools = (cache.keys(), cache.values())
        for keys, values in ((step.keys(), step.values()), pools if kind == "paged" else [t[:1] for t in pools]):
            with pytest.raises(weft.WeftError, match=f"(?s){key}.*{value}"):
                call(query, keys, values, **lengths)
            with pytest.raises(weft.WeftError, match=value):
                call(query, keys, values, **lengths, k_descale=step.options["k_descale"])
        call(query, step.keys(), step.values(), **step.options)
    keys, values = step.keys(), step.values()
    with pytest.raises(weft.WeftError, match=f"(?s){key}.*{value}"):
        CAUSAL.plan(query, keys, values, **lengths)
    compiled = torch.compile(lambda *given: CAUSAL(*given, **lengths), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){key}.*{value}"):
        compiled(query, keys, values)


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_keys_that_compiled_code_takes_of_a_cache_are_refused_without_its_descales(kind: str) -> None:
    given = {"kv_heads": 2, "head_dim": 16, "dtype": E4M3}
    cache = weft.kv.PagedCache(8, **given) if kind == "paged" else weft.kv.DenseCache(2, 32, **given)
    step = cache.append([cache.allocate()], *torch.randn(2, 1, 2, 5, 16))
    query = torch.randn(1, 4, 5, 16)

    def call(query, step, names):
        return CAUSAL(query, step.keys(), step.values(), **{n: step.options[n] for n in names})

    torch._dynamo.reset()  # it leaves alone a function whose trace raised before
    compiled = torch.compile(call, backend="aot_eager")
    expected = CAUSAL(query, step.keys(), step.values(), **step.options)
    assert torch.equal(compiled(query, step, list(step.options)), expected)
    names = [n for n in step.options if not n.endswith("descale")]
    with pytest.raises(weft.WeftError, match="(?s)k_descale: missing, and the cache.*v_descale: missing"):
        compiled(query, step, names)
    taken = torch.compile(lambda step: step.keys(), backend="aot_eager", fullgraph=True)(step)
    with pytest.raises(weft.WeftError, match="k_descale: missing, and the cache"):
        CAUSAL(query, taken, step.values(), **{n: step.options[n] for n in names})


@pytest.mark.parametrize("form", ["absorbed", "expanded", None])
def test_a_latent_cache_without_its_descales_is_refused(form: str | None) -> None:
    latent = weft.Latent(rank=16, rope=8)
    variant = weft.Attention(mask=kv_pos <= q_pos, latent=latent, name="bare_latent")
    cache = weft.kv.DenseCache(2, 32, latent=latent, dtype=E4M3, rope_dtype=torch.float32)
    step = cache.append([cache.allocate()], torch.randn(1, 1, 5, 24))
    up = {"uk": torch.randn(4, 16, 8), "uv": torch.randn(4, 16, 8)}
    given = {n: value for n, value in step.options.items() if n != "k_descale"} | up
    query = torch.randn(1, 4, 5, 16)
    with pytest.raises(weft.WeftError, match="k_descale: missing, and the cache"):
        variant(query, step.keys(), form=form, **given)
    with pytest.raises(weft.WeftError, match="k_descale: missing, and the cache"):
        variant.reference(query, step.keys(), **given)
    with pytest.raises(
        weft.WeftError, match="query: expected 16 or 32 bits a number beside uk and uv, got torch.float8"
    ):
        variant(query.to(E4M3), step.keys(), form=form, **step.options, **up)
    variant(query, step.keys(), form=form, **step.options, **up)


def test_calls_under_vmap_have_descales_of_their_own() -> None:
    (query, key, value), options = operands("cpu")
    descales = {n: options[n] for n in ("k_descale", "v_descale")}

    def one(query, key, value, k_descale, v_descale):
        given = {"k_descale": k_descale[None], "v_descale": v_descale[None]}
        return CAUSAL(query[None], key[None], value[None], **given)[0]

    found = torch.func.vmap(one)(query, key, value, *descales.values())
    assert torch.equal(found, CAUSAL(query, key, value, **descales))


def test_a_plan_counts_products_and_bytes_of_fp8() -> None:
    """By hand: B2 H16 L1024 T2048 D192, Dv 128, of 128 x 128 tiles, all visible."""
    query, key, value = (torch.empty(2, 16, *size, dtype=E4M3) for size in ((1024, 192), (2048, 192), (2048, 128)))
    ones = torch.ones(2, 16, 1, 1)
    options = {"q_descale": ones, "k_descale": ones, "v_descale": ones, "device": "h100"}
    text = ALL.explain(query, key, value, **options)
    assert "D 192  Dv 128  e4m3\n" in text and "rates         matrix 1588TFLOP/s" in text
    turned, forward = ALL.plan(query, key, value, **options).kernels
    rows, heads = 1024, 32
    assert forward.hbm_read.value == heads * (rows * 192 + 2048 * (192 + 128))
    assert forward.hbm_written.value == heads * rows * (2 * 128 + 4)
    assert turned.hbm_read.value == turned.hbm_written.value == heads * 2048 * 128
    pairs = heads * rows * 2048
    seconds = 2 * pairs * (192 + 128) / (2 * 989.4e12 * 794 / 989.4)
    assert forward.flops.value == 2 * pairs * (192 + 128)
    assert forward.times.matrix == pytest.approx(0.82 * seconds)
    assert forward.times.other == pytest.approx(1.64 * 5 * pairs / (8 * 132 * 16 * 1.83e9), rel=1e-3)
    assert forward.times.bound == "matrix" and forward.times.seconds > forward.times.computing
    sixteen = ALL.plan(*(t.bfloat16() for t in (query, key, value)), device="h100").kernels[0]
    assert sixteen.times.matrix == pytest.approx(0.821 * 2 * seconds)
    narrow = [torch.empty(2, 16, 2048, 64, dtype=E4M3)] * 3
    assert ALL.plan(*narrow, **options).kernels[-1].times.bound == "other"  # instructions of scores and weights


def test_a_plan_counts_the_bytes_of_each_operand() -> None:
    """Descales aside. Queries, keys and values of 8 bits, and some of them."""
    sizes = {"query": 2 * 4 * 64 * 64, "key": 2 * 2 * 512 * 64, "value": 2 * 2 * 512 * 32}
    for dtypes, words in (
        ((torch.bfloat16, E4M3, E4M3), "bf16, keys and values e4m3"),
        ((torch.bfloat16, E4M3, torch.bfloat16), "bf16, keys e4m3"),
        ((torch.bfloat16, torch.bfloat16, E5M2), "bf16, values e5m2"),
        ((E5M2, E5M2, E5M2), "fp16, queries, keys and values e5m2"),
        ((E4M3, torch.bfloat16, torch.bfloat16), "fp16, queries e4m3"),
    ):
        shapes = (2, 4, 64, 64), (2, 2, 512, 64), (2, 2, 512, 32)
        given = [torch.empty(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
        plan = ALL.plan(*given, device="h100", target="triton", schedule="flash")
        read = sum(n * t.element_size() for n, t in zip(sizes.values(), given))
        assert plan.kernels[0].hbm_read.value == read, words
        assert f"D 64  Dv 32  {words}\n" in ALL.explain(*given, device="h100", target="triton", schedule="flash")


PER = ("tensor", "head", 64, 128, "token")


@pytest.mark.parametrize("dtypes", [("e4m3", "e4m3"), ("bf16", "e4m3"), ("fp32", "e5m2"), ("e5m2", "fp16")])
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_a_plan_of_sizes_is_that_of_the_tensors_they_stand_for(dtypes: tuple[str, str], device: str) -> None:
    query_dtype, kv_dtype = (dtype_named(name).torch for name in dtypes)
    for per, length in [(per, 300) for per in PER] + [("head", 2), ("token", 2)]:
        sizes = weft.shape(batch=2, heads=8, kv_heads=2, q_len=length, kv_len=400, head_dim=64, value_dim=32,
                           dtype=dtypes[0], kv_dtype=dtypes[1], descale=per)  # fmt: skip
        shapes = {"query": (2, 8, length, 64), "key": (2, 2, 400, 64), "value": (2, 2, 400, 32)}
        given = [torch.empty(n, dtype=query_dtype if name == "query" else kv_dtype) for name, n in shapes.items()]
        options = {}
        for name, tensor in zip(shapes, given):
            if tensor.dtype in (E4M3, E5M2):
                options[f"{name[0]}_descale"] = weft.fp8.quantize(torch.ones(shapes[name]), per=per).descale
        wanted = CAUSAL.explain(*given, device=device, **options)
        assert CAUSAL.explain(sizes, device=device) == wanted
        nowhere = {n: t.to("meta") for n, t in options.items()}
        assert CAUSAL.explain(*(t.to("meta") for t in given), device=device, **nowhere) == wanted


@pytest.mark.parametrize("per", ["head", "token"])
def test_sizes_with_lengths_stand_for_padded_packed_and_paged_tensors(per: str) -> None:
    given = {"heads": 8, "kv_heads": 2, "head_dim": 64, "kv_dtype": "e4m3", "descale": per}
    key, value = torch.empty(2, 2, 2, 512, 64).unbind()
    starts, lens = torch.tensor([0, 100, 512], dtype=torch.int32), torch.tensor([500, 9], dtype=torch.int32)
    pages = torch.arange(64, dtype=torch.int32).view(2, 32)

    def wanted(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **lengths: torch.Tensor) -> str:
        key8, value8 = (weft.fp8.quantize(t, per=per) for t in (keys, values))
        found = {"k_descale": key8.descale, "v_descale": value8.descale}
        if "block_table" in lengths and per == "head":
            found = {n: t[:1] for n, t in found.items()}
        return str(CAUSAL.plan(query.bfloat16(), key8.data, value8.data, device="h100", **found, **lengths))

    padded = weft.shape(**given, batch=2, q_len=300, kv_len=512)
    assert str(CAUSAL.plan(padded, device="h100", kv_lens=lens)) == wanted(
        torch.empty(2, 8, 300, 64), key, value, kv_lens=lens
    )
    both = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    packed = CAUSAL.plan(weft.shape(**given, q_len=512), device="h100", **both)
    assert str(packed) == wanted(torch.empty(1, 8, 512, 64), key[:1], value[:1], **both)
    paged = {"block_table": pages, "kv_lens": lens}
    pools = [t.reshape(64, 2, 16, 64) for t in (key, value)]
    step = CAUSAL.plan(weft.shape(**given, batch=2, q_len=1, kv_len=512), device="h100", **paged)
    assert str(step) == wanted(torch.empty(2, 8, 1, 64), *pools, **paged)
    for wrong, message in (
        ({"descale": 64}, "shape: descale: expected 'tensor', 'head' or 'token' with pages, got 64"),
        ({"kv_len": 500}, "shape: kv_len: expected a multiple of the 32 pages of block_table, got 500"),
        ({"head_dim": 300}, "shape: head_dim: expected 1 to 256, got 300"),
    ):
        with pytest.raises(weft.WeftError, match=message):
            CAUSAL.plan(weft.shape(**{**given, "batch": 2, "q_len": 1, "kv_len": 512, **wrong}), **paged)


def test_sizes_of_fp8_that_are_not_planned() -> None:
    sizes = weft.shape(heads=8, q_len=64, head_dim=64, kv_dtype="e4m3")
    with pytest.raises(weft.WeftError, match="causal: a call with FP8 operands has no backward"):
        CAUSAL.source(sizes, direction="backward")
    with pytest.raises(weft.WeftError, match="tune: expected a shape without FP8 operands, whose forms are not timed"):
        weft.tune(CAUSAL, sizes)
    latent = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=512, rope=64), name="by_sizes")
    with pytest.raises(weft.WeftError, match="by_sizes: shape: a plan of a latent cache in FP8 wants its tensors"):
        latent.plan(weft.shape(heads=8, q_len=64, head_dim=192, value_dim=128, kv_dtype="e4m3"))
    with pytest.raises(weft.WeftError, match="k_descale: expected none beside sizes that are not FP8; name kv_dtype="):
        CAUSAL.plan(weft.shape(heads=8, q_len=64, head_dim=64), k_descale=2.0)
    with weft.settings(check=True):
        assert CAUSAL.plan(sizes, k_descale=2.0).kernels


def test_a_plan_says_who_computes_fp8_and_who_cannot() -> None:
    (query, key, value), options = operands("cpu", dim=64, value_dim=64)
    text = CAUSAL.explain(query, key, value, device="h100", **options)
    assert (
        "flash_forward=triton" in text
        and "hopper: has FP8 products where query, key and value are all e4m3; leave" in text
    )
    with pytest.raises(weft.UnavailableError, match="has e4m3 from compute capability 8.9 on, this is sm_80; quantise"):
        CAUSAL.explain(query, key, value, device="a100", **options)


# -- accuracy ----------------------------------------------------------------------------------------------------------
KERNELS = {"cpu": 1e-5, "interpret": 2.0**-10}  # errors of kernels: float32, and weights of fp16


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dim", mostly([128], [64, 128, 256]))
def test_errors_of_kernels_are_small_beside_those_of_the_format(dim: int, target: str) -> None:
    length = 1024 if target == "cpu" else 256
    with weft.settings(target=target):
        found = {}
        for kind in fp8_accuracy.KINDS:
            tensors = [t.to(QUERIES[target]) for t in fp8_accuracy.operands(length, dim, kind, torch.device("cpu"))]
            found[kind] = {scale: fp8_accuracy.errors(tensors, scale) for scale in fp8_accuracy.SCALES}
    for errors in found.values():
        assert all(e.kernel < KERNELS[target] for e in errors.values()), errors
    assert all(0.02 < e.format < 0.06 for e in found["normal"].values())  # 3 digits, of keys and of values
    outliers = {scale: e.format for scale, e in found["outliers"].items()}
    assert outliers["token"] < 0.8 * outliers["tensor"] and outliers["rotated"] < 0.8 * outliers["tensor"]


@pytest.mark.parametrize("dim", mostly([64], [64, 128]))
def test_a_needle_among_16k_keys_is_found(dim: int) -> None:
    assert fp8_accuracy.needle(16384, dim, torch.device("cpu"), fp8=False) < 0.01
    assert fp8_accuracy.needle(16384, dim, torch.device("cpu"), fp8=True) < 0.04


@pytest.mark.thorough
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_needle_among_128k_keys_is_found(dim: int) -> None:
    assert fp8_accuracy.needle(131072, dim, torch.device("cpu"), fp8=False) < 0.01
    assert fp8_accuracy.needle(131072, dim, torch.device("cpu"), fp8=True) < 0.04


@pytest.mark.parametrize("scale", fp8_accuracy.PRODUCT_SCALES)
@pytest.mark.parametrize("length", mostly([16384], [1024, 16384, 131072]))
def test_sums_in_two_levels_stay_exact_where_those_in_one_do_not(length: int, scale) -> None:
    """Emulated. Sums in one level lose with the number of keys, those in two with that of a tile."""
    tensors = fp8_accuracy.operands(length, 64, "normal", torch.device("cpu"))
    found = fp8_accuracy.summed(tensors, scale)
    assert found.two_alone < 2e-4 and found.two < 0.03  # of weights rounded to 3 digits, whatever the length
    assert found.one_alone > {1024: 5, 16384: 80, 131072: 500}[length] * found.two_alone
    if length == 131072:
        assert found.one > 2.5 * found.two


@pytest.mark.parametrize("length", mostly([16384], [16384, 131072]))
def test_a_needle_is_found_by_products_of_fp8(length: int) -> None:
    two, one = fp8_accuracy.needle_of_products(length, 64, torch.device("cpu"))
    assert two < 0.04 and one < 0.04  # that of its value: one weight decides, and sums hardly matter


def test_an_accumulator_of_fp8_keeps_fourteen_bits() -> None:
    numbers = torch.tensor([1.0, 1 + 2**-13, 1 + 2**-14, -1 - 2**-14, 0.0, 3e-30])
    assert fp8_accuracy.kept(numbers).tolist()[:5] == [1.0, 1 + 2**-13, 1.0, -1.0, 0.0]
    left, right = torch.ones(1, 1, 64), torch.ones(1, 64, 1)
    right[:, 32:] = 2.0**-20  # lost beside the first 32, and kept by itself
    assert fp8_accuracy.accumulated(left, right).item() == 32
    assert fp8_accuracy.accumulated(left[..., 32:], right[:, 32:]).item() == 32 * 2.0**-20
