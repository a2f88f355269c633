"""Latent attention (DeepSeek-V2, arXiv 2405.04434): one declaration, two ways to compute it, the same numbers.

Expanded: every cached vector is multiplied out to keys and values of all heads. Absorbed: the key projection is folded
into the query, the heads attend over the latent vectors themselves, and the value projection is applied at the end.
"""

import time

import torch

import weft
from weft import kv_pos, q_pos


def main(rank: int = 128, rope: int = 32, nope: int = 64, heads: int = 8, cached: int = 1024) -> None:
    """One decode step of each form, in float32 through the generated kernels and in float64 through the reference."""
    mla = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=rank, rope=rope), name="mla")
    torch.manual_seed(0)
    query = torch.randn(2, heads, 1, nope + rope)
    cache = torch.randn(2, 1, cached, rank + rope)
    uk, uv = torch.randn(heads, rank, nope) / rank**0.5, torch.randn(heads, rank, nope) / rank**0.5

    exact = mla.reference(query.double(), cache.double(), uk=uk.double(), uv=uv.double())
    absorbed_query = torch.cat([query[..., :nope].double() @ uk.double().transpose(1, 2), query[..., nope:]], dim=-1)
    latent_variant = mla.replace(scale=(nope + rope) ** -0.5, name="mla_latent")
    by_hand = latent_variant.reference(absorbed_query, cache.double()) @ uv.double()
    print(
        f"reference, absorbed by hand against expanded: largest difference {(by_hand - exact).abs().max().item():.1e}"
    )

    expanded_floats = heads * cached * (2 * nope + rope)
    print(f"keys and values a token: expanded {expanded_floats // cached:,} numbers, latent {rank + rope:,}")
    for form in ("expanded", "absorbed"):
        out = mla(query, cache, uk=uk, uv=uv, form=form)  # the first call generates the kernel
        start = time.perf_counter()
        for _ in range(5):
            out = mla(query, cache, uk=uk, uv=uv, form=form)
        milliseconds = (time.perf_counter() - start) / 5 * 1000
        print(
            f"{form}: out {list(out.shape)}, error {(out - exact).abs().max().item():.1e}, {milliseconds:.1f} ms a step"
        )


if __name__ == "__main__":
    main()
