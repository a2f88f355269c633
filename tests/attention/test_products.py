"""What generated code of target `cpu` calls: products with and without oneDNN, and threads."""

import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import weft
from tests import fresh
from weft import batch, kv_pos, masks, q_pos, score
from weft.codegen import products
from weft.ir.errors import UnavailableError

DOC = weft.tensor("doc", 2, int)
VARIANTS = {
    "causal": weft.Attention(mask=masks.causal, name="threads_causal"),
    "softcap": weft.Attention(5.0 * weft.tanh(score / 5.0), masks.causal, name="threads_softcap"),
    "documents": weft.Attention(
        mask=(DOC[batch, q_pos] == DOC[batch, kv_pos]) & masks.causal, name="threads_documents"
    ),
    "latent": weft.Attention(mask=masks.causal, latent=weft.Latent(32, 16), name="threads_latent"),
}


@pytest.fixture(params=["torch", "oneDNN"])
def engine(request, monkeypatch):
    """Products of tiles by torch's bmm, or by oneDNN: which, a form says."""
    linear, calls = products.one_dnn_linear(), []
    if request.param == "oneDNN" and linear is None:
        pytest.skip("this torch has no oneDNN product to call")

    def counted(*arguments):
        calls.append(arguments)
        return linear(*arguments)

    monkeypatch.setattr(products, "one_dnn_linear", lambda: counted)
    form = "256x256" + "+onednn" * (request.param == "oneDNN")
    schedule = f"flash/flash_forward=cpu:{form}+tiles/flash_backward=cpu:{form}+tiles"
    return SimpleNamespace(name=request.param, calls=calls, schedule=schedule)


@pytest.fixture
def threads():
    """Sets torch's number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run(name, q_len, kv_len, heads=4, kv_heads=2, batch_rows=2, schedule=None):
    """out, lse and gradients of a variant of VARIANTS, and those of its definition in float64."""
    generator = torch.Generator().manual_seed(q_len)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    operands = {}
    if name == "latent":
        tensors = [draw(batch_rows, heads, q_len, 40), draw(batch_rows, 1, kv_len, 48)]
        operands = {"uk": draw(heads, 32, 24), "uv": draw(heads, 32, 20)}
    else:
        tensors = [
            draw(batch_rows, n, length, 32) for n, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
        ]
    if name == "documents":
        operands = {"doc": torch.arange(max(q_len, kv_len)).repeat(batch_rows, 1) // 90}
    leaves = [x for x in (*tensors, *operands.values()) if x.requires_grad]
    out, lse = VARIANTS[name](*tensors, **operands, target="cpu", schedule=schedule, return_lse=True)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = [
        out,
        lse,
        *torch.autograd.grad([out, lse.masked_fill(lse.isinf(), 0.0)], leaves, [dout, torch.ones_like(lse)]),
    ]
    wide = {n: x.double() if x.is_floating_point() else x for n, x in operands.items()}
    exact_out, exact_lse = VARIANTS[name].reference(*(x.double() for x in tensors), **wide, return_lse=True)
    ones = torch.ones_like(exact_lse)
    exact = torch.autograd.grad(
        [exact_out, exact_lse.masked_fill(exact_lse.isinf(), 0.0)], leaves, [dout.double(), ones]
    )
    return found, [exact_out, exact_lse, *exact]


# -- products ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 5, 3, 7), (3, 40, 20, 16), (1, 300, 64, 200), (1, 64, 300, 8), (1, 1, 1, 1)], ids=str
)
def test_products_and_sums_of_them(engine, shape, dtype):
    """x of any strides, as tiles of transposed values are; few rows of w go another way."""
    count, n, k, m = shape
    x, w = torch.randn(count, k, n, dtype=dtype).mT, torch.randn(count, m, k, dtype=dtype)
    bias, total = torch.randn(count, m, dtype=dtype), torch.randn(count, n, m, dtype=dtype)
    exact = x.double() @ w.double().mT
    close = dict(rtol=1e-5, atol=5e-5) if dtype == torch.float32 else dict(rtol=1e-13, atol=1e-13)
    product, add = products.product, products.add_product
    if engine.name == "oneDNN":
        product, add = products.one_dnn_product, products.add_one_dnn_product
    torch.testing.assert_close(product(x, w).double(), exact, **close)
    torch.testing.assert_close(product(x, w, bias).double(), exact + bias.double()[:, None], **close)
    wanted = exact + total.double()
    add(total, x, w)
    torch.testing.assert_close(total.double(), wanted, **close)
    assert bool(engine.calls) == (
        engine.name == "oneDNN" and count == 1 and m > products.FEW_ROWS and dtype == torch.float32
    )


def test_a_factor_of_nan_is_one():
    """MKL leaves such a factor out of products as large as these."""
    x, y = torch.randn(2, 40, 16), torch.randn(2, 16, 40)
    result = torch.zeros(1, 2, 40, 40)
    products.store(result, x, y, math.nan)
    assert products.multiply(x, y, math.nan).isnan().all() and result.isnan().all()
    products.store(result, x, y, 0.5)
    torch.testing.assert_close(result[0], 0.5 * (x @ y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gaps", ["rows", "columns"])
def test_one_dnn_is_given_no_gaps(engine, gaps):
    """It computes w whose rows have gaps one product at a time: a thousand times as long."""
    x, w = torch.randn(1, 20, 16), torch.randn(1, 40, 16)
    spread = torch.zeros(1, 40, 32) if gaps == "rows" else torch.zeros(1, 16, 80).mT
    held = spread[:, : w.shape[1], : w.shape[2]].copy_(w)
    assert not held[0].is_contiguous() and not held[0].mT.is_contiguous()
    multiply = products.one_dnn_product if engine.name == "oneDNN" else products.product
    torch.testing.assert_close(multiply(x, held), x @ w.mT, rtol=1e-5, atol=1e-5)
    assert all(w.is_contiguous() or w.mT.is_contiguous() for _, w, *_ in engine.calls)


@pytest.mark.parametrize("name", ["softcap", "latent"])
def test_heads_that_lie_beside_each_other_leave_no_gaps(engine, name):
    """As a model has them, `[B, L, H, D]` transposed: the query where no scale makes new rows of it, and dO."""
    width = 40 if name == "latent" else 32
    query = torch.randn(1, 300, 2, width).transpose(1, 2).requires_grad_()
    key = torch.randn(1, 300, 1, 48 if name == "latent" else 32).transpose(1, 2).requires_grad_()
    rest = {"uk": torch.randn(2, 32, 24), "uv": torch.randn(2, 32, 20)} if name == "latent" else {"value": key}
    out = VARIANTS[name](query, key, **rest, target="cpu", schedule=engine.schedule)
    torch.autograd.grad(out, (query, key), torch.randn(1, 300, 2, out.shape[3]).transpose(1, 2))
    assert bool(engine.calls) == (engine.name == "oneDNN")
    assert all(w.is_contiguous() or w.mT.is_contiguous() for _, w, *_ in engine.calls)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_by_either_product(engine, name):
    found, exact = run(name, 400, 530, schedule=engine.schedule)
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-4, atol=1e-4)
    assert bool(engine.calls) == (engine.name == "oneDNN")


@pytest.mark.parametrize(
    "op", [None, lambda *arguments: torch.zeros(3, 2), lambda x, w: x], ids=["absent", "wrong", "another signature"]
)
def test_a_private_op_is_tried_before_it_is_used(monkeypatch, op):
    namespace = SimpleNamespace() if op is None else SimpleNamespace(_linear_pointwise=SimpleNamespace(default=op))
    monkeypatch.setattr(torch.ops, "mkldnn", namespace)
    products.one_dnn_linear.cache_clear()
    try:
        assert products.one_dnn_linear() is None
        torch.testing.assert_close(
            products.one_dnn_product(torch.ones(1, 20, 4), torch.ones(1, 30, 4)), torch.full((1, 20, 30), 4.0)
        )
        asked = "flash/flash_forward=cpu:64x64+onednn"
        with pytest.raises(
            UnavailableError, match=r"64x64\+onednn: this torch has no product of oneDNN .*leave \+onednn"
        ):
            VARIANTS["causal"].plan(
                weft.shape(heads=1, q_len=64, head_dim=16, dtype="fp32"), device="cpu", schedule=asked
            )
    finally:
        products.one_dnn_linear.cache_clear()


LENGTHS = """
import torch, weft
from weft.codegen import products

products.SHORT_HEAD = products.SHORT_HEAD_BACKWARD = products.MOST_OF_A_HEAD = 0
form = "256x256+onednn+tiles"
schedule = f"flash/flash_forward=cpu:{form}/flash_backward=cpu:{form}"
variant = weft.Attention(20.0 * weft.tanh(weft.score / 20.0), weft.masks.causal, name="lengths")


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def step(length):
    tensors = torch.randn(3, 1, 1, length, 16, requires_grad=True).unbind(0)
    variant(*tensors, target="cpu", schedule=schedule).sum().backward()


step(700)
before = resident()
for length in range(257, 420):
    step(length)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not say what memory is in use")
def test_memory_does_not_grow_with_every_new_length():
    """oneDNN keeps code of 0.3 MB for each shape that it multiplies: of 163 lengths it would be 300 MB."""
    if products.one_dnn_linear() is None:
        pytest.skip("this torch has no oneDNN product to call")
    assert float(fresh.run(LENGTHS, check=True).stdout) < 100


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize("length", [1, 64, 127, 128, 129, 255, 256, 257, 449, 512, 1000])
def test_tiles_of_queries_are_all_of_them_once(length, regular):
    found = products.row_tiles(length, 256, regular)
    rows = [row for _, here in found for row in range(here.start, here.stop)]
    assert rows == list(range(length))
    assert all(here.start // 256 == number == (here.stop - 1) // 256 for number, here in found)
    sizes = [here.stop - here.start for _, here in found]
    assert not regular or (all(size % 128 == 0 for size in sizes[:-1]) and len(sizes) <= -(-length // 256) + 1)


# -- torch's own attention ---------------------------------------------------------------------------------------------
@pytest.fixture
def attended(monkeypatch):
    """Calls of torch's attention; skips where there is none to call."""
    own, calls = products.own_attention(), []
    if own is None:
        pytest.skip("torch's own attention is not there")

    def counted(*arguments, **options):
        calls.append((arguments, options))
        return own(*arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("weft_generated_"):
            monkeypatch.setattr(module, "whole_attention", lambda scores, of_a_head: counted, raising=False)
    monkeypatch.setattr(products, "whole_attention", lambda scores, of_a_head: counted)
    return calls


NOT_IN_TILES = "flash/flash_forward=cpu:256x256"  # where torch's own will do
SCALED = weft.Attention(mask=(kv_pos <= q_pos) & (q_pos - kv_pos < 50), scale=0.3, name="whole_window")
PLAIN = weft.Attention(mask=masks.causal, name="whole_causal")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("variant", "q_len", "kv_len", "options", "whole"),
    [
        (PLAIN, 70, 70, {}, True), (PLAIN, 1, 300, {}, True), (PLAIN, 3, 300, {"q_offset": 299}, True),
        (PLAIN, 70, 71, {}, False), (PLAIN, 70, 70, {"q_offset": 1}, False), (PLAIN, 3, 300, {}, False),
        (SCALED, 1, 40, {}, True), (SCALED, 1, 60, {}, True), (SCALED, 40, 40, {}, False), (SCALED, 2, 90, {}, False),
    ],
)  # fmt: skip
def test_calls_that_torch_computes_as_they_are(attended, variant, q_len, kv_len, options, whole, dtype):
    """Every query sees the same keys, or causal from the first position on; grouped heads, a scale of its own."""
    q, k, v = (torch.randn(2, h, n, 16).to(dtype).requires_grad_() for h, n in ((4, q_len), (2, kv_len), (2, kv_len)))
    out, lse = variant(q, k, v, target="cpu", schedule=NOT_IN_TILES, return_lse=True, **options)
    assert bool(attended) == whole
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = variant.reference(*wide, return_lse=True, **options)
    error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=error, atol=error)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3 if dtype.itemsize == 2 else error, atol=1e-3)
    dout = torch.randn_like(exact)
    grads = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    for got, wanted in zip(grads, torch.autograd.grad(exact, wide, dout), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2 * error, atol=2 * error)


@pytest.mark.parametrize(("scale", "whole"), [(0.5, True), (0.0, False), (-1.5, False)])
def test_a_scale_that_is_not_positive(attended, scale, whole):
    """torch hides a score before it scales it: -inf times such a scale would be NaN, or inf."""
    x = weft.scalar("x", float)
    variant = weft.Attention(mask=masks.causal, scale=x, name="whole_scaled")
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    exact = variant.reference(q.double(), k.double(), v.double(), x=scale)
    found = variant(q, k, v, x=scale, target="cpu", schedule=NOT_IN_TILES)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert bool(attended) == whole


def test_other_widths_scores_and_masks_have_tiles(attended):
    q, k, v = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 24)
    by_head = weft.Attention(score * (1.0 + weft.head), masks.causal, name="whole_by_head")
    for variant, value, form in ((PLAIN, v, ""), (by_head, k, ""), (VARIANTS["softcap"], k, "")):
        exact = variant.reference(q.double(), k.double(), value.double())
        found = variant(q, k, value, target="cpu", schedule=NOT_IN_TILES + form)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert not attended


def test_a_plan_says_what_torch_computes():
    sizes = weft.shape(heads=2, q_len=64, head_dim=16, dtype="fp32")
    plan = PLAIN.plan(sizes, device="cpu", schedule=NOT_IN_TILES)
    assert plan.kernels[0].computed_whole
    words = "torch's own kernel, which is the faster one: of tiles are all figures but its time"
    assert words in " ".join(PLAIN.explain(sizes, device="cpu", schedule=NOT_IN_TILES).split())
    ahead = weft.shape(heads=2, q_len=60, kv_len=64, head_dim=16, dtype="fp32")
    words = "every query sees the same keys, or all up to its own, is torch's own kernel"
    assert words in " ".join(PLAIN.explain(ahead, device="cpu", schedule=NOT_IN_TILES).split())
    for variant, form in ((VARIANTS["softcap"], ""), (PLAIN, "+tiles")):
        schedule = f"{NOT_IN_TILES}{form}/flash_backward=cpu:256x256{form}"
        assert "torch's own kernel" not in variant.explain(sizes, device="cpu", schedule=schedule)


@pytest.mark.parametrize(
    "op", [None, lambda *arguments, **options: (torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2)), lambda query: query],
    ids=["absent", "wrong", "another signature"],
)  # fmt: skip
def test_torchs_attention_is_tried_before_it_is_used(monkeypatch, op):
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention_for_cpu", op)
    products.own_attention.cache_clear()
    try:
        assert products.own_attention() is None
    finally:
        products.own_attention.cache_clear()


@pytest.mark.skipif(products.own_attention() is None, reason="torch's own attention is not there")
@pytest.mark.parametrize("variant", [weft.Attention(name="sees_all"), VARIANTS["causal"]])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (9, 9), (2, 40)])
def test_nan_in_a_query_is_in_its_row(variant, q_len, kv_len):
    """torch's own kernel gives 0 where a row has few scores and all are NaN."""
    query, key, value = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, kv_len, 8), torch.randn(1, 2, kv_len, 8)
    query[0, 1, -1, 3] = float("nan")
    for lengths in ({}, {"kv_lens": torch.tensor([kv_len])}):
        out, lse = variant(query, key, value, target="cpu", return_lse=True, **lengths)
        assert out[0, 1, -1].isnan().all() and lse[0, 1, -1].isnan()
        assert out[0, 0].isfinite().all() and out[0, 1, :-1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_len", [1, 2, 40, 70, 200])
def test_a_row_of_infinite_scores(kv_len, dtype):
    """All of -inf: it sees nothing. One of inf: NaN, where torch's own kernel gives 0 in 16 bits."""
    for q_len, value_dim in ((1, 8), (3, 8), (3, 4)):  # of which the last has scores in one piece
        query, key, value = (torch.randn(1, 2, n, w) for n, w in ((q_len, 8), (kv_len, 8), (kv_len, value_dim)))
        query[..., 5], key[..., 5] = 1.0, 1.0
        for sign, expected, saved in ((-1.0, 0.0, -math.inf), (1.0, math.nan, None)):
            query[0, 1, -1, 5] = sign * math.inf
            given = [x.to(dtype) for x in (query, key, value)]
            out, lse = weft.Attention(name="sees_all")(*given, target="cpu", return_lse=True)
            torch.testing.assert_close(
                out[0, 1, -1], torch.full_like(out[0, 1, -1], expected), rtol=0, atol=0, equal_nan=True
            )
            assert saved is None or (lse[0, 1, -1] == saved).all()
            assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all() and out[0, 1, :-1].isfinite().all()


@pytest.mark.parametrize("mode", ["bfloat16", "float64", "meta", "autocast"])
@pytest.mark.parametrize("probe", [products.one_dnn_linear, products.own_attention, products.own_backward])
def test_the_mode_of_a_first_call_does_not_decide_for_all(probe, mode):
    """What is tried is tried once in a process; a first call under autocast ended in an error of torch's."""
    usual, before = probe() is not None, torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, mode, before) if "float" in mode else before)
        with (
            torch.device("meta" if mode == "meta" else "cpu"),
            torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
        ):
            assert (probe.__wrapped__() is not None) == usual
    finally:
        torch.set_default_dtype(before)


def test_a_short_call_is_torchs_whatever_makes_tiles_fast(monkeypatch):
    monkeypatch.setattr(products, "SHORT_HEAD", long := 1 << 24)
    short = long - 1
    assert products.whole_attention(products.VERY_SHORT, long, in_tiles=True) is products.own_attention()
    assert products.whole_attention(products.VERY_SHORT + 1, long, in_tiles=True) is None
    assert products.whole_attention(1 << 40, short, in_tiles=True) is products.own_attention()


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lengths", [(600, 600), (70, 900), (30, 30), (1, 500)], ids=str)
def test_any_number_of_threads_gives_the_same_and_repeats_bit_for_bit(threads, name, lengths):
    """More heads than threads, and fewer: then tiles of queries are divided."""
    several = []
    for count in (1, 2, 3, 7):
        threads(count)
        several.append(run(name, *lengths, heads=2, kv_heads=1, batch_rows=2)[0])
        again = run(name, *lengths, heads=2, kv_heads=1, batch_rows=2)[0]
        assert all(torch.equal(a, b) for a, b in zip(several[-1], again, strict=True))
    for found in several[1:]:
        for one, other in zip(several[0], found, strict=True):
            most = max(1.0, float(one.detach().abs().nan_to_num(posinf=0.0).max()))  # what was summed is as large
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 if most < 10.0 else 1e-6 * most)


def test_other_threads_keep_their_number(threads):
    """The threads of the pool have one each; nobody else has, and the number can be set again at any time."""
    seen = {}
    for count in (3, 2, 4):
        threads(count)
        run("causal", 600, 600)
        new = threading.Thread(target=lambda: seen.update(new=torch.get_num_threads()))
        new.start()
        new.join()
        products.in_threads(  # one head is less than the threads, and so computed in threads of the pool
            lambda part, *_: seen.update({part[0]: torch.get_num_threads()}), [[0], [1]], 1, by_tiles=False
        )
        assert torch.get_num_threads() == count and seen == {"new": count, 0: 1, 1: 1}


def test_work_is_divided_evenly_and_none_is_lost(threads):
    for count in (1, 2, 3, 5):
        threads(count)
        for units in (1, 2, 3, 7, 20):
            done = []
            products.in_threads(
                lambda *piece, done=done: done.append(piece),
                [[2 * u, 2 * u + 1] for u in range(units)],
                1,
                by_tiles=True,
            )
            sizes = [len(part) for part, *_ in done]
            used = min(count, products.MOST_THREADS)
            assert max(sizes) - min(sizes) <= 2 and {ways for *_, ways in done} == {-(-used // min(units, used))}
            for k in range(done[0][2]):
                parts = sorted(part for part, first, _ in done if first == k)
                assert [x for part in parts for x in part] == list(range(2 * units))


def test_an_error_in_a_thread_is_the_callers(threads):
    def fail(*_):
        raise ZeroDivisionError("in a thread")

    threads(2)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        products.in_threads(fail, [[0], [1]], 1, by_tiles=False)


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_what_no_thread_can_be_started_for_is_done_by_the_caller(most, threads, monkeypatch):
    """At the end of a process, or of what a system allows: each piece once, and nobody waits for what is missing."""

    class Few(ThreadPoolExecutor):
        begun = 0

        def submit(self, *given):
            if self.begun == most:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            self.begun += 1
            return super().submit(*given)

    monkeypatch.setattr(products, "ThreadPoolExecutor", Few)
    monkeypatch.setattr(products, "_pools", products._Pools())
    threads(2)
    done = []
    products.in_threads(lambda part, k, ways: done.extend(part), [[0], [1]], 1, by_tiles=False)
    assert sorted(done) == [0, 1] and torch.get_num_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system starts processes in another way")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(threads):
    """As a loader's workers are started: the pool's threads stay behind."""
    threads(2)
    wanted = run("causal", 600, 600)[0][0]
    child = os.fork()
    if not child:
        try:
            done = []
            products.in_threads(lambda *_: done.append(1), [[0], [1]], 1, by_tiles=False)
            os._exit(0 if len(done) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run("causal", 600, 600)[0][0], wanted)


def test_long_documents_cost_what_they_see(monkeypatch):
    """Twice the tokens in documents of one length: twice the products, whatever lies between."""
    count = [0]
    product = products.product

    def counted(x, w, bias=None):
        count[0] += x.shape[1] * w.shape[1]
        return product(x, w, bias)

    found = []
    for length in (8192, 16384):
        q = torch.randn(1, 1, length, 16)
        VARIANTS["documents"](q, q, q, doc=torch.arange(length)[None] // 512, target="cpu")

        for module in [m for n, m in sys.modules.items() if n.startswith("weft_generated_threads_documents")]:
            monkeypatch.setattr(module, "product", counted, raising=False)
        count[0] = 0
        VARIANTS["documents"](q, q, q, doc=torch.arange(length)[None] // 512, target="cpu")
        found.append(count[0])
    assert 0 < found[0] and 1.9 <= found[1] / found[0] <= 2.1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_threads_write_what_is_made_in_any_mode(mode, threads):
    threads(2)
    by_head = weft.Attention(mask=(kv_pos % 2 == q_pos % 2) ^ (weft.head % 2 == 1), name="by_head")
    q, k = torch.randn(3, 6, 1, 16), torch.randn(3, 3, 33, 16)
    expected = by_head.reference(q, k, k, q_offset=2)
    with mode():
        made = torch.zeros(4)
        for_all = [[0], [1], [2], [3]]
        products.in_threads(lambda part, *_: made[part[0] : part[-1] + 1].add_(1.0), for_all, 1, by_tiles=False)
        out = by_head(q, k, k, q_offset=2, target="cpu")
        torch.testing.assert_close(out, expected)
    assert made.eq(1.0).all()
