"""The `triton` and `hopper` targets on a GPU against float64: families of masks, scores, shapes, dtypes, gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime.call import SLOTS
from weft.runtime.driver import builds

from ..support import check_variant, mostly, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

window = weft.scalar("window", int)
prefix = weft.scalar("prefix", int)
slopes = weft.tensor("slopes", 1)
temperature = weft.tensor("temperature", 1)
bias_q = weft.tensor("bias_q", 3)
bias_kv = weft.tensor("bias_kv", 3)
doc, docs = weft.tensor("doc", 1, int), weft.tensor("docs", 2, int)

CAUSAL = weft.Attention(mask=masks.causal, name="causal")
VARIANTS = {
    "dense": (weft.Attention(name="dense"), {}),
    "causal": (CAUSAL, {}),
    "window": (weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="window_causal"), {"window": 100}),
    "both_sides": (weft.Attention(mask=(q_pos - kv_pos < 70) & (kv_pos - q_pos < 40), name="both_sides"), {}),
    "prefix": (weft.Attention(mask=masks.causal | (kv_pos < prefix), name="prefix_lm"), {"prefix": 150}),
    "dilated": (weft.Attention(mask=masks.causal & ((q_pos - kv_pos) % 3 == 0) & (q_pos - kv_pos < 200),
                               name="dilated"), {}),
    "block_causal": (weft.Attention(mask=kv_pos // 48 <= q_pos // 48, name="block_causal"), {}),
    "global_window": (weft.Attention(mask=masks.causal & ((kv_pos < 20) | (q_pos - kv_pos < 60)),
                                     name="global_window"), {}),
    "softcap": (weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="softcap"), {}),
    "alibi": (weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi"), {"slopes": "head"}),
    "temperature": (weft.Attention(score * temperature[head], masks.causal, name="temperature"),
                    {"temperature": "head"}),
    "sigmoid": (weft.Attention(4.0 * weft.sigmoid(score) + weft.abs(score) / 8.0, name="sigmoid_abs"), {}),
    "softplus": (weft.Attention(weft.softplus(score) + weft.logsigmoid(-3.0 * score), masks.causal, name="soft"), {}),
    "biases": (weft.Attention(score + bias_q[weft.batch, head, q_pos] * weft.cos(score)
                              + bias_kv[weft.batch, head, kv_pos], name="biases"),
               {"bias_q": "q", "bias_kv": "kv"}),
    "documents": (weft.Attention(mask=masks.causal & (doc[q_pos] == doc[kv_pos]), name="documents"), {"doc": "doc"}),
    "documents_of_batch": (weft.Attention(mask=masks.causal & masks.document(docs), name="documents_of_batch"),
                           {"docs": "docs"}),
    "documents_or_prefix": (weft.Attention(mask=masks.document(docs) | masks.prefix_lm(70), name="or_prefix"),
                            {"docs": "docs"}),
    "documents_two_ranges": (weft.Attention(mask=masks.document(docs) & masks.global_window(20, 60), name="two_ranges"),
                             {"docs": "docs"}),
    "unsorted_by_head": (weft.Attention(mask=(docs[weft.batch, kv_pos] <= head) & (kv_pos < q_pos + 100 * head),
                                        name="unsorted_by_head"), {"docs": "shuffled"}),
    "nothing": (weft.Attention(mask=(kv_pos <= q_pos) & (q_pos >= 40), name="first_rows_empty"), {}),
}  # fmt: skip


def operands_of(spec, shape, kv_len, seed=3):
    batch, heads, q_len, _ = shape
    generator = torch.Generator().manual_seed(seed)
    made = {
        "head": lambda: torch.rand(heads, generator=generator) * 0.5 + 0.1,
        "q": lambda: torch.randn(batch, heads, q_len, generator=generator),
        "kv": lambda: torch.randn(batch, heads, kv_len, generator=generator),
        "docs": lambda: torch.randint(0, 5, (batch, max(q_len, kv_len)), generator=generator).sort().values << 40,
        "shuffled": lambda: torch.randint(0, 5, (batch, max(q_len, kv_len)), generator=generator).to(torch.int8),
        "doc": lambda: torch.sort(torch.randint(0, 5, (max(q_len, kv_len),), generator=generator)).values.int(),
    }
    return {n: made[v]().cuda() if isinstance(v, str) else v for n, v in spec.items()}


def check(
    name,
    shape,
    kv_heads,
    kv_len,
    value_dim=None,
    dtype=torch.bfloat16,
    blhd=False,
    target="triton",
    gradients=True,
    **options,
):
    variant, spec = VARIANTS[name]
    batch, _, _, dim = shape
    query = poisoned(shape, dtype, "cuda", blhd, seed=0)
    key = poisoned((batch, kv_heads, kv_len, dim), dtype, "cuda", blhd, seed=1)
    value = poisoned((batch, kv_heads, kv_len, value_dim or dim), dtype, "cuda", blhd, seed=2)
    given = operands_of(spec, shape, kv_len)
    floats = tuple(n for n, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
    check_variant(
        variant, query, key, value, target=target, operands=given, differentiate=floats if gradients else (),
        gradients=gradients, label=f"{name} {target} {shape} {kv_heads} {kv_len} {dtype}", **options,
    )  # fmt: skip


@pytest.mark.slow(9)
@pytest.mark.sampled(39)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name, dim, target):
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")
    if dim == 64:
        check(name, (2, 4, 300, 64), 2, 300, target=target)
    else:
        check(name, (1, 2, 257, 128), 1, 257, target=target, gradients=target == "hopper")


MEASURED = ["documents_of_batch", "documents_or_prefix", "documents_two_ranges", "unsorted_by_head"]


def check_measured(name, length, dim, target, **options):
    if dim == 64:
        check(name, (2, 4, length, 64), 2, length, target=target, **options)
    else:
        check(name, (1, 2, max(1, length // 3), 128), 1, length, target=target, **options)


@pytest.mark.slow(11)
@pytest.mark.sampled(43)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("length", [1, 64, 129, 1100])
def test_measured_tiles(name, length, target, dim):
    check_measured(name, length, dim, target)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 192, 250, 521])
@pytest.mark.parametrize("name", mostly(["causal"], ["causal", "window"]))
def test_lengths(name, length, target):
    if name == "causal":
        check(name, (1, 4, length, 64), 2, length, target=target)
    else:
        check(name, (1, 2, length, 128), 2, length, target=target, gradients=target == "hopper")


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("q_len,kv_len", [(1, 500), (70, 333), (333, 70), (200, 1)])
@pytest.mark.parametrize("name", mostly(["causal"], ["causal", "dense"]))
def test_cross_lengths(name, q_len, kv_len, target):
    dim, kv_heads = (64, 1) if name == "causal" else (128, 4)
    check(name, (2, 4, q_len, dim), kv_heads, kv_len, target=target)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["causal", "softcap"])
@pytest.mark.parametrize("dim", [16, 32, 40, 80, 96, 192, 256])
def test_head_dims(dim, name):
    if name == "causal":
        check(name, (1, 4, 200, dim), 2, 200)
    else:
        check(name, (1, 2, 130, dim), 2, 130, value_dim=64, dtype=torch.float16)


@pytest.mark.slow(9)
@pytest.mark.sampled(53)
@pytest.mark.parametrize(
    "name, given",
    [("causal", {}), ("softcap", {"dtype": torch.float16}), ("documents_of_batch", {}),
     ("both_sides", {"deterministic": True})],
)  # fmt: skip
@pytest.mark.parametrize(
    "dim, value_dim",
    [(16, 16), (24, 32), (32, 64), (32, 128), (64, 16), (40, 40), (56, 48), (72, 96), (80, 80), (96, 96),
     (128, 64), (64, 128), (104, 40),
     (136, 64), (160, 128), (192, 128), (192, 40), (256, 128), (72, 200), (256, 256)],
)  # fmt: skip
def test_head_dimensions_of_tiles_in_pieces_and_filled_up(dim, value_dim, name, given):
    sizes = ((1, 4, 130, dim), 1, 257) if name == "both_sides" else ((2, 4, 300, dim), 2, 300)
    check(name, *sizes, value_dim=value_dim, target="hopper", **given)


@pytest.mark.sampled(84)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["dense", "causal", "prefix", "softcap", "temperature", "nothing", "alibi"])
def test_gradients_in_two_passes(name, dim, dtype):
    sizes = ((2, 4, 300, dim), 2, 333) if dtype == torch.bfloat16 else ((1, 2, 65, dim), 1, 129)
    check(name, *sizes, target="hopper", deterministic=True, dtype=dtype)


@pytest.mark.sampled(27)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("length", [1, 129, 1100])
def test_measured_tiles_in_two_passes(name, length, dim):
    check_measured(name, length, dim, "hopper", deterministic=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "alibi", "softcap"])
def test_dtypes(name, dtype):
    check(name, (2, 4, 200, 64), 1, 200, dtype=dtype)


@pytest.mark.parametrize("target, dtype, largest, error", [
    ("triton", torch.float32, 9, 5e-7), ("triton", torch.bfloat16, 6, 3e-6), ("hopper", torch.bfloat16, 6, 3e-6)
])  # fmt: skip
def test_sines_of_angles(target, dtype, largest, error):
    angles, sizes = weft.tensor("angles", 1), 10.0 ** torch.arange(-6, largest + 1).repeat_interleave(50)
    turned = weft.Attention(0.0 * score + weft.sin(angles[q_pos]) + weft.cos(2.0 * angles[q_pos]), kv_pos == q_pos)
    given = torch.randn(len(sizes), generator=torch.Generator().manual_seed(1)) * sizes
    exact = torch.sin(given.double()) + torch.cos(2.0 * given.double())
    query = torch.zeros(1, 1, len(given), 64, dtype=dtype, device="cuda")
    _, lse = turned(query, query, query, angles=given.cuda(), target=target, return_lse=True)
    assert (lse[0, 0].double().cpu() - exact).abs().max() < error


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_transposed_views_and_offsets(target):
    check("alibi", (2, 4, 200, 64), 2, 260, blhd=True, target=target)
    check("causal", (2, 4, 100, 64), 2, 300, target=target, q_offset=37)


@pytest.mark.slow(12)
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name, dim",
    mostly(
        [("causal", 64), ("documents_of_batch", 128), ("causal", 256), ("window", 64)],
        [*product(("causal", "documents_of_batch"), (64, 128, 256)), ("window", 64)],
    ),
)
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_an_offset_of_each_batch_row(target, name, dim):
    offsets = torch.tensor([5, 111], dtype=torch.int32, device="cuda")
    check(name, (2, 4, 100, dim), 2, 300, target=target, q_offset=offsets, deterministic=name == "window")


@pytest.mark.slow(15)
@pytest.mark.sampled(19)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_repeated_launches_agree_bit_for_bit(target, dim, deterministic):
    """All results do; of the hopper target's one pass, up to D 128, all but dQ, which is summed in any order."""
    q, k, v = (torch.randn(2, 8, 1000, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    docs = (torch.arange(1000, device="cuda") // 300).expand(2, -1)
    one_pass = target == "hopper" and not deterministic and dim <= 128
    for variant, given in ((CAUSAL, {}), (VARIANTS["documents_of_batch"][0], {"docs": docs})):
        out, lse = variant(q, k, v, target=target, return_lse=True, deterministic=deterministic, **given)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, [q, k, v], dout, retain_graph=True)
        for _ in range(200 if target == "hopper" and not deterministic else 20):
            again, again_lse = variant(q, k, v, target=target, return_lse=True, deterministic=deterministic, **given)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)
            found = torch.autograd.grad(again, [q, k, v], dout)
            for name, a, b in zip("qkv", first, found):
                if one_pass and name == "q":
                    assert (a - b).float().norm() <= 1e-3 * a.float().norm()
                else:
                    assert torch.equal(a, b), f"{variant.name} {target} D{dim}: a bit of d{name} differs"


@pytest.mark.slow(12)
@pytest.mark.parametrize("dim", [64, 128])
def test_first_shares_are_stored_before_others_are_added(dim):
    """Many programs of few heads wait for each other, on two streams at once; a share that is lost or read too early is
    far off."""
    generator = torch.Generator().manual_seed(dim)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for heads, q_len, kv_len in ((1, 6000, 6000), (16, 1024, 1024), (3, 1, 700), (2, 1700, 3000), (40, 300, 200)):
        lengths = (q_len, kv_len, kv_len)
        q, k, v = (
            torch.randn(1, heads, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in lengths
        )
        offset = int(torch.randint(0, 3, (), generator=generator)) * 100
        calls = [CAUSAL(q, k, v, q_offset=offset, target="hopper", deterministic=d) for d in (True, False)]
        dout = torch.randn_like(calls[0])
        exact = torch.autograd.grad(calls[0], [q, k, v], dout)[0]
        torch.cuda.synchronize()
        found = []
        for turn in range(60):
            with torch.cuda.stream(streams[turn % 2]):
                found.append(torch.autograd.grad(calls[1], [q, k, v], dout, retain_graph=True)[0])
        torch.cuda.synchronize()
        for dq in found:
            assert (dq - exact).float().norm() <= 4e-3 * exact.float().norm()


@pytest.mark.slow(9)
def test_determinism_is_as_torch_is_set():
    q, k, v = (torch.randn(1, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    asked = torch.autograd.grad(CAUSAL(q, k, v, deterministic=True).sum(), [q, k, v])
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.autograd.grad(CAUSAL(q, k, v).sum(), [q, k, v])
        chosen = torch.autograd.grad(CAUSAL(q, k, v, deterministic=False).sum(), [q, k, v])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(asked, found))
    assert not all(torch.equal(a, b) for a, b in zip(asked, chosen))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_wanted_gradients_alone(wanted, dim):
    """Each is what it is beside the others."""
    tensors = {n: torch.randn(1, 4, 300, dim, device="cuda", dtype=torch.bfloat16) for n in "qkv"}
    all_of = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    out = CAUSAL(*all_of.values())
    dout = torch.randn_like(out)
    whole = dict(zip("qkv", torch.autograd.grad(out, list(all_of.values()), dout)))
    some = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
    found = torch.autograd.grad(CAUSAL(*some.values()), [some[n] for n in wanted], dout)
    for name, gradient in zip(wanted, found):
        error = (gradient - whole[name]).float().norm() / whole[name].float().norm()
        assert error <= 1e-3, f"d{name}: {error:.1e}"


def test_gradients_of_views_that_cannot_be_read_in_place():
    """What flows back may have any strides: the hopper target copies what its loads cannot take."""
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = CAUSAL(q, k, v, target="hopper")
    whole = torch.randn(2, 4, 200, 67, device="cuda", dtype=torch.bfloat16)
    for dout in (
        whole[..., 3:],
        whole[:1, :, :, :64].expand(2, -1, -1, -1),
        torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(out),
    ):
        found = torch.autograd.grad(out, [q, k, v], dout, retain_graph=True)
        usual = torch.autograd.grad(out, [q, k, v], dout.contiguous(), retain_graph=True)
        for name, a, b in zip("qkv", found, usual):
            assert (a - b).float().norm() <= 1e-3 * b.float().norm(), name


@pytest.mark.slow(17)
def test_new_lengths_batches_and_windows_compile_nothing():
    variant, _ = VARIANTS["window"]

    def run(batch, length, width, target):
        q, k, v = (
            torch.randn(batch, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        variant(q, k, v, window=width, target=target).sum().backward()

    for target in ("triton", "hopper"):
        run(2, 256, 64, target)
        run(2, 1, 64, target)  # few queries have a kernel of their own
        modules, kernels = builds(), _compiled_kernels()
        for batch, length, width in ((1, 256, 64), (3, 1000, 1), (2, 77, 16), (1, 1, 5), (5, 1024, 1000)):
            run(batch, length, width, target)
        assert builds() == modules, f"{target}: a new size loaded a module"
        assert _compiled_kernels() == kernels, f"{target}: a new size compiled a kernel"


def _compiled_kernels():
    """How many GPU kernels this process has compiled."""
    import gc

    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.jit import JITFunction

    functions = [f for f in gc.get_objects() if type(f) in (JITFunction, GluonJITFunction)]
    return sum(len(caches[0]) for f in functions for caches in f.device_caches.values())


def test_memory_is_linear_in_length(most_memory):
    q, k, v = (
        torch.randn(1, 2, 100_000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    extra = most_memory(lambda: CAUSAL(q, k, v, target="triton").sum().backward())
    assert extra < 12 * q.numel() * q.element_size(), f"{extra / 2**20:.0f} MiB"


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_offsets_beyond_int32(target):
    length, heads, dim = 70_000, 1, 64
    whole = torch.empty(2, length, 512, dim, device="cuda", dtype=torch.bfloat16)  # 4.6e9 elements
    view = whole.transpose(1, 2)[:, -1:]
    view.copy_(torch.randn(2, heads, length, dim))
    near = view.contiguous()
    variant = VARIANTS["window"][0]
    far_out = variant(view, view, view, window=64, target=target)
    assert torch.equal(far_out, variant(near, near, near, window=64, target=target))
    leaves = [x.detach().requires_grad_() for x in (view, near)]
    far, close = (variant(x, x, x, window=64, target=target, deterministic=False).sum() for x in leaves)
    (a,), (b,) = torch.autograd.grad(far, leaves[0]), torch.autograd.grad(close, leaves[1])
    assert (a - b).float().norm() <= 1e-3 * b.float().norm()


def test_nan_of_one_batch_row_stays_there():
    for target in ("triton", "hopper"):
        q, k, v = (torch.randn(3, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        clean = CAUSAL(q, k, v, target=target)
        for tensor in (q, k, v):
            tensor[1] = float("nan")
        out = CAUSAL(q, k, v, target=target)
        assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])


def test_latent_forms():
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=128, rope=64), name="mla")
    dtype = torch.bfloat16
    query = torch.randn(2, 4, 150, 192, device="cuda", dtype=dtype)
    cache = torch.randn(2, 1, 150, 192, device="cuda", dtype=dtype)
    uk, uv = (torch.randn(4, 128, 128, device="cuda", dtype=dtype) / 11 for _ in range(2))
    exact = mla.reference(query.double(), cache.double(), uk=uk.double(), uv=uv.double())
    for form in ("expanded", "absorbed"):
        out = mla(query, cache, uk=uk, uv=uv, form=form)
        assert (out.double() - exact).norm() / exact.norm() < 2e-2, form


@pytest.mark.parametrize("heads", [4, 1, 2])  # one after the other by the same kernels
def test_gradients_of_the_expanded_latent_form(heads):
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=128, rope=64), name="mla")
    shapes = ((2, heads, 150, 192), (2, 1, 150, 192), (heads, 128, 128), (heads, 128, 128))
    given = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / (11 if len(shape) == 3 else 1) for shape in shapes
    ]

    def gradients(call, dtype):
        query, cache, uk, uv = leaves = [x.to(dtype).requires_grad_() for x in given]
        out = call(query, cache, uk=uk, uv=uv)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    found = gradients(mla, torch.bfloat16)
    plain = gradients(mla.reference, torch.bfloat16)
    exact = gradients(mla.reference, torch.float64)
    for name, got, usual, wanted in zip(("query", "cache", "uk", "uv"), found, plain, exact):
        error, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (got, usual))
        assert error <= 2 * allowed + 2e-3, f"{name}: {error:.4f}, plain torch {allowed:.4f}"


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_documents_change_between_replays_of_a_graph(target):
    variant = VARIANTS["documents_of_batch"][0]
    q, k, v = (torch.randn(2, 4, 700, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    docs = torch.zeros(2, 700, dtype=torch.int64, device="cuda")
    variant(q, k, v, docs=docs, target=target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = variant(q, k, v, docs=docs, target=target)
    for length in (700, 100, 256, 33, 700):
        docs.copy_((torch.arange(700, device="cuda") // length).expand(2, -1))
        graph.replay()
        q64, k64, v64 = (x.double() for x in (q, k, v))
        exact = variant.reference(q64, k64, v64, docs=docs)
        assert (out.double() - exact).norm() / exact.norm() < 1e-2, length
        assert torch.equal(out, variant(q, k, v, docs=docs.clone(), target=target)), length


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["causal", "alibi", "softcap"])
@pytest.mark.parametrize("algorithm", ["standard", "streaming"])
def test_other_schedules(algorithm, name):
    check(name, (2, 4, 300, 64), 2, 300, dtype=torch.float16, schedule=algorithm)


@pytest.mark.slow(29)
def test_torch_compile_with_the_gpu_targets():
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: CAUSAL(q, k, v) * 2, fullgraph=True)
    assert torch.equal(compiled(q, k, v), CAUSAL(q, k, v) * 2)
    arguments = (q, k, v, None, [], [], [], 0, *[None] * len(SLOTS), 64, CAUSAL.canonical.text, "")
    torch.library.opcheck(torch.ops.weft.attention.default, arguments)


def test_cuda_graphs_replay():
    for target in ("triton", "hopper"):
        q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        CAUSAL(q, k, v, target=target)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = CAUSAL(q, k, v, target=target)
        for _ in range(3):
            q.normal_()
            graph.replay()
            assert torch.equal(out, CAUSAL(q, k, v, target=target))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dim, value_dim", [(20, 20), (40, 40), (64, 64), (80, 40), (96, 96), (100, 100), (192, 128)])
def test_operands_without_16_byte_alignment(dim, value_dim):
    def odd(seed, heads, width):
        whole = torch.full((2, heads, 130, width + 5), float("nan"), dtype=torch.bfloat16, device="cuda")
        whole[..., 3 : width + 3] = torch.randn(
            2, heads, 130, width, generator=torch.Generator().manual_seed(seed)
        ).cuda()
        return whole[..., 3 : width + 3]

    check_variant(
        CAUSAL, odd(0, 4, dim), odd(1, 2, dim), odd(2, 2, value_dim), target="triton", label=f"odd {dim} {value_dim}"
    )
