"""Packed documents: several sequences in one row, attention inside each, and no masks or tile lists built beforehand.

The mask reads the document of both positions from a tensor, so that a new packing is only new data. Kernels measure
which tiles hold a visible pair, and visit no others; one backward pass shows that gradients stay inside documents too.
"""

import time

import torch

import weft
from weft import masks

packed = weft.Attention(mask=masks.causal & masks.document(weft.tensor("document", 2, int)), name="packed")


def document_ids(lengths: list[list[int]], device: torch.device) -> torch.Tensor:
    """int64 [batch, length]: 0 for the tokens of a row's first document, 1 for those of its second, and so on."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(device)


def main(length: int = 2048, heads: int = 4, dim: int = 64) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    quarter = length // 4
    ids = document_ids([[quarter, length - quarter], [quarter, quarter, quarter, length - 3 * quarter]], device)
    query, key, value = (
        torch.randn(2, heads, length, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    print(packed.show_mask(length, length, block_q=length // 16, block_kv=length // 16, document=ids, batch=1))
    out = packed(query, key, value, document=ids)
    out[1, :, :quarter].sum().backward()  # the first document of the second row
    assert key.grad is not None
    touched = key.grad.abs().sum((1, 3)) > 0
    inside = torch.zeros_like(touched)
    inside[1, :quarter] = True
    print("gradients reach the document that the loss reads, and nothing else:", torch.equal(touched, inside))

    alone = packed(*(x[1:, :, :quarter] for x in (query, key, value)), document=ids[1:, :quarter])
    print(f"packed against alone: largest difference {(out[1:, :, :quarter] - alone).abs().max().item():.1e}")

    with torch.no_grad():
        for label, row in (("one document a row", [length]), ("documents of 128", [128] * (length // 128))):
            given = document_ids([row, row], device)
            packed(query, key, value, document=given)
            _wait(device)
            start = time.perf_counter()
            for _ in range(5):
                packed(query, key, value, document=given)
            _wait(device)
            print(f"{label}: {(time.perf_counter() - start) / 5 * 1000:.2f} ms")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
