"""Two variants, called forward and backward, and checked against their definitions."""

import torch

import weft
from weft import head, kv_pos, q_pos, score

window = weft.scalar("window", int)  # known when called; a new value compiles nothing
slopes = weft.tensor("slopes", 1)  # a tensor operand, read by index expressions; gradients flow into it

gemma_local = weft.Attention(
    score=50.0 * weft.tanh(score / 50.0),
    mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window),
    name="gemma_local",
)
alibi = weft.Attention(score=score + slopes[head] * (kv_pos - q_pos), mask=kv_pos <= q_pos, name="alibi")


def main(length: int = 512) -> None:
    """Call both; 8 query heads share 2 key heads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    query = torch.randn(2, 8, length, 64, device=device, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, 2, length, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    s = (2.0 ** -torch.arange(1, 9, device=device).to(dtype)).requires_grad_()

    out = gemma_local(query, key, value, window=length // 4)
    exact = gemma_local.reference(query.double(), key.double(), value.double(), window=length // 4)
    print(f"gemma_local: out {list(out.shape)}, largest error against float64 {(out - exact).abs().max().item():.1e}")

    out, lse = alibi(query, key, value, slopes=s, return_lse=True)
    (out.float().square().mean() + lse.mean()).backward()
    assert s.grad is not None
    print(f"alibi: lse {list(lse.shape)} {lse.dtype}, gradient of the slopes:")
    print("  " + "  ".join(f"{g:+.4f}" for g in s.grad.tolist()))
    print("\nthe window's tiles (see also: weft explain, weft source):")
    print(gemma_local.show_mask(length, length, block_q=32, block_kv=32, window=length // 4))


if __name__ == "__main__":
    main()
