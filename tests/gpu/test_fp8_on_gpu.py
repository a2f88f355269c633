"""FP8 operands on a GPU: right for values of all widths, formats and descales, where lengths end a tile early."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.calls import conversion
from weft.runtime.descales import OF

from ..attention import test_fp8_on_hopper as products
from ..attention.cases import cases
from ..attention.test_fp8 import E4M3, E5M2, MASKED, check, with_fp8_values
from ..attention.test_fp8_conversion import CAUSAL, paged_call
from ..support import check_errors, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.sampled(60)
@pytest.mark.parametrize("per", [None, "head", 64, "token"])
@pytest.mark.parametrize("value_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("key_is_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [33, 200])
@pytest.mark.parametrize("value_width", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 128])
def test_widths_formats_and_descales(width, value_width, rows, dtype, key_is_fp8, value_dtype, per) -> None:
    tensors, options = with_fp8_values((width, value_width), rows, dtype, key_is_fp8, value_dtype, per, "cuda")
    check(MASKED, tensors, "triton", **options)


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@on_hopper
@pytest.mark.parametrize("name", ["causal", "cap", "alibi", "documents", "sink", "sigmoid", "dropout"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_many_queries_take_copies(layout, name, monkeypatch) -> None:
    """All operands in FP8, and keys and values alone; values in rows and in columns, descales of every kind."""
    monkeypatch.setattr(conversion, "pays", lambda *asked: True)  # of calls that a test can afford
    variant, given = cases(name, rows=400, document=23)[name]
    given = {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    for n, per in enumerate(("tensor", "head", 64, "token")):
        query = poisoned((2, 4, 333, 64), torch.bfloat16, "cuda", seed=n)
        key, value = (poisoned((2, 2, 400, 64), torch.float32, "cuda", seed=10 + n + i) for i in range(2))
        key8, value8 = weft.fp8.quantize(key, per=per), weft.fp8.quantize(value, per=per, layout=layout)
        options = {**given, "k_descale": key8.descale, "v_descale": value8.descale}
        if n > 1:  # descales of rows, which hopper does not multiply by
            query, options["q_descale"] = weft.fp8.quantize(query, per=per)
        assert "made bf16 first" in variant.explain(query, key8.data, value8.data, **options)
        check_copies(variant, (query, key8.data, value8.data), **options)


@on_hopper
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page, per", [(16, "token"), (64, "tensor"), (1, "tensor"), (256, "token")])
def test_many_queries_take_copies_of_pages(page, per, packed, monkeypatch) -> None:
    monkeypatch.setattr(conversion, "pays", lambda *asked: True)
    tensors, options = paged_call(page, per, packed)
    tensors, options = [t.cuda() for t in tensors], {n: t.cuda() for n, t in options.items()}
    assert "made bf16 first" in CAUSAL.explain(*tensors, **options)
    found = CAUSAL(*tensors, **options)
    exact = CAUSAL.reference(*tensors, **options, out_dtype=torch.float64)
    check_errors(found, exact, CAUSAL.reference(*tensors, **options), "pages")


def check_copies(variant, tensors, **options) -> None:
    """Against float64; plain torch has the same bf16 copies."""
    found = variant(*tensors, **options)
    exact = variant.reference(*tensors, **{**options, "out_dtype": torch.float64})
    names = ("q_descale", "k_descale", "v_descale")
    real = [
        t if t.dtype == torch.bfloat16 else weft.fp8.dequantize(weft.fp8.Quantized(t, options[n]), torch.bfloat16)
        for t, n in zip(tensors, names)
    ]
    plain = variant.reference(*real, **{n: v for n, v in options.items() if n not in names})
    check_errors(found, exact, plain, variant.name)


@on_hopper
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", list(products.VARIANTS))
@pytest.mark.parametrize("sizes", list(products.SIZES))
def test_products_of_fp8(sizes, name, layout) -> None:
    """As test_fp8_on_hopper.py has them on a CPU; twice, of which the second time takes the direct way."""
    declared, shape = weft.Attention(**products.VARIANTS[name], name=f"products_{name}"), products.SIZES[sizes]
    operands = {n: t.cuda() for n, t in products.operands_of(name, shape).items()}
    for seed, per in enumerate(("head", "tensor", "token", 128, "head", 128)):
        given = products.quantized(*shape, layout, per, seed, "cuda")
        options = {OF[n]: x.descale for n, x in given.items()}
        tensors = [x.data for x in given.values()]
        assert "+fp8" in declared.explain(*tensors, **operands, **options)
        out, lse = declared(*tensors, **operands, **options, return_lse=True)
        products.check_rounded(declared, given, shape[4] - shape[3], operands, out, lse)


@on_hopper
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (96, 80)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(products.VARIANTS))
def test_products_of_fp8_of_sequences_of_their_own_lengths(name, packed, layout, widths) -> None:
    """Twice, of which the second time takes the direct way."""
    declared = weft.Attention(**products.VARIANTS[name], name=f"ragged_{name}")
    for per in ("head", "token", "tensor", *([] if packed else [128])):
        given, operands, lengths = products.ragged(packed, name, layout, per, widths, "cuda")
        options = {OF[n]: x.descale for n, x in given.items()} | lengths
        tensors = [x.data for x in given.values()]
        assert "+fp8" in declared.explain(*tensors, **operands, **options)
        for _ in range(2):
            out, lse = declared(*tensors, **operands, **options, return_lse=True)
            products.check_ragged(declared, packed, given, operands, out, lse)


@on_hopper
def test_products_of_fp8_in_a_compiled_call() -> None:
    given = products.quantized(*products.SIZES["square"], "columns", "head", device="cuda")
    tensors = [x.data for x in given.values()]
    options = {OF[n]: x.descale for n, x in given.items()}
    compiled = torch.compile(lambda *t: CAUSAL(*t, **options), fullgraph=True)
    assert torch.equal(compiled(*tensors), CAUSAL(*tensors, **options))


@on_hopper
@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_descale_of_values_that_is_nan_is_not_lost(block: int) -> None:
    """Whichever tile has it: the hardware's maximum would drop it."""
    given = products.quantized(1, 1, 1, 64, 512, 64, 64, "rows", 128, device="cuda")
    options = {OF[n]: x.descale for n, x in given.items()}
    options["v_descale"][:, :, block] = float("nan")
    with weft.settings(check=False):
        out = weft.Attention(name="full")(*(x.data for x in given.values()), **options)
    assert bool(out.isnan().all())
