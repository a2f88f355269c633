"""The expanded form of latent attention on a GPU: keys in two tensors, and all gradients, against float64."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score

from ..support import check_errors

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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCORES)
def test_masks_and_scores(name):
    check(name, 4, 300, 300)


@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 127, 128, 129, 191, 256, 521])
def test_lengths_at_the_edges_of_tiles(length):
    check("causal", 2, length, length)
    check("dense", 3, 130, length)
    check("window", 1, length, length + 77)


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_heads(heads):
    check("causal", heads, 200, 260, batch=1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("nope", "rope", "value_dim"), [(128, 32, 64), (128, 8, 128), (64, 32, 64), (64, 16, 128), (64, 24, 80)]
)
def test_widths(nope, rope, value_dim):
    for deterministic in (False, True):
        check("causal", 4, 300, 333, nope=nope, rope=rope, value_dim=value_dim, deterministic=deterministic)


def test_half_precision():
    check("causal", 4, 300, 300, dtype=torch.float16)
    check("cap", 4, 300, 300, nope=64, rope=32, value_dim=64, dtype=torch.float16)


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


@pytest.mark.parametrize("kind", ["lengths", "packed"])
def test_sequences_of_their_own_lengths(kind):
    """A forward on hopper, gradients on triton."""
    lens = torch.tensor([190, 5, 129], device="cuda", dtype=torch.int32)
    batch, total = (3, 200) if kind == "lengths" else (1, 324)
    tensors, own = operands_of("causal", 4, total, total, batch=batch)
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    options = (
        {"q_lens": lens, "kv_lens": lens} if kind == "lengths" else {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    )
    dout = torch.randn(batch, 4, total, 128, device="cuda")
    given = (tensors, own, torch.bfloat16, dout, torch.zeros(batch, 4, total, device="cuda"))
    found = gradients(declared("causal"), *given, target="hopper", form="expanded", **options)
    usual = gradients(declared("causal").reference, *given, **options)
    exact = gradients(declared("causal").reference, *given[:2], torch.float64, *given[3:], **options)
    for label in found:
        check_errors(found[label], exact[label], usual[label], f"{kind} {label}")


def test_a_layer_trains_under_torch_compile():
    layer = weft.nn.LatentAttention(256, 4, kv_lora=RANK, nope=128, rope_dim=64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    plain = torch.autograd.grad(layer(x).float().square().mean(), list(layer.parameters()))
    found = torch.autograd.grad(compiled(x).float().square().mean(), list(layer.parameters()))
    for got, usual in zip(found, plain):
        assert (got - usual).float().norm() <= 3e-2 * usual.float().norm()
