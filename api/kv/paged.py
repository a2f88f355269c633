"""A cache in blocks: sequences of any lengths share one pool of memory, and equal prefixes share blocks."""

from __future__ import annotations

from functools import partial

import torch

from ..ir.attention import Latent
from ..ir.errors import WeftError, collected, counted, shown
from ..runtime.call import LARGEST_PAGE, is_page
from ..runtime.descales import is_fp8
from .cache import Cache
from .given import MOST, is_size, size_problems
from .scales import Given, Scale
from .step import Step


class PagedCache(Cache):
    """Keys and values of many sequences in blocks of `page` tokens (PagedAttention: Kwon et al. 2023, 2309.06180).

    Each layer has a pool of keys [blocks, Hkv, page, D] and one of values [blocks, Hkv, page, Dv]; all layers share one
    block table and one account. A step of a model extends its sequences, appends the rows of each layer, and commits:

        with cache.extend([a, b], [3, 1]) as step:  # a gets three rows, b one
            for layer in range(cache.layers):
                step.append(layer, key, value)  # [2, Hkv, 3, D]
                out = variant(query, step.keys(layer), step.values(layer), **step.options_of(layer))

    Lengths and blocks are kept on the host, so that no step waits for the device. Work on it goes in the order of the
    current stream.

    blocks: how many there are. page: tokens of a block, a power of two from 1 to 256. layers: pools. value_dim: Dv, D
    where not given. latent: in place of kv_heads and head_dim, vectors [1, rank + rope] without values, for variants
    with `latent=`. dtype: bf16, fp16, fp32 or fp64; or torch.float8_e4m3fn or e5m2, whose rows the cache quantises as
    it appends them. scale: "token" for one descale a row and head, or "head" for one a head. A head's is given as
    k_descale and v_descale, a number or [layers, Hkv], or is twice what the first rows of a layer want. Larger numbers
    saturate. In FP8 the rotary columns of a latent cache are a tensor of their own, of rope_dtype: bf16, or what the
    model computes in.
    """

    def __init__(
        self, blocks: int, *, layers: int = 1, kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, latent: Latent | None = None, page: int = 16, dtype: torch.dtype,
        device: torch.device | str = "cpu", scale: Scale | None = None, k_descale: Given = None,
        v_descale: Given = None, rope_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        ranks = self.share.ranks
        if not is_size(page) or page % ranks or not is_page(page // ranks):
            times = "" if ranks == 1 else f"{ranks} tokens times "
            raise WeftError(
                f"{type(self).__name__}: page: expected {times}a power of two from 1 to {LARGEST_PAGE}, got "
                f"{shown(page)}"
            )
        if page == ranks and is_fp8(dtype) and scale != "head":
            raise WeftError(
                f"{type(self).__name__}: page: expected {2 * ranks} or more beside a descale for each token, got "
                f"{page}; pass scale='head'"
            )
        super().__init__(
            blocks, page, layers, kv_heads, head_dim, value_dim, latent, dtype, device,
            scale, (k_descale, v_descale), rope_dtype,
        )  # fmt: skip

    def fixed_step(self, sequences: int, length: int = 1, *, pages: int) -> Step:
        """A step whose tensors stay where they are, for CUDA graphs: up to so many sequences, rows of each, and pages.

        `fixed.fill(step)` lets it stand for a step of this cache. What lies behind the sequences of that one gets
        nothing, and nothing is written for it.
        """
        given = {"sequences": sequences, "length": length, "pages": pages}
        problems = size_problems(given)
        if not problems and sequences * max(length, pages) > MOST:
            problems = [f"expected at most 2**30 rows, and as many pages, got {given}"]
        if problems:
            raise collected("fixed_step", problems)
        with torch.inference_mode(False):
            zeros = partial(torch.zeros, dtype=torch.int32, device=self.device)
            tensors = (zeros(sequences), zeros(sequences), zeros(sequences, length), zeros(sequences, length) - 1)
            own_lens = None if self.share.ranks == 1 else zeros(sequences)
            table = zeros(sequences, pages)
            return self._makes_step(self, (), (), (), (*tensors, table), None, "fixed", None, own_lens)

    def __repr__(self) -> str:
        u = self.usage
        kept = f" ({u.kept} of them kept for reuse)" if u.kept else ""
        swapped = f", pages on the host: {u.swapped}" if u.swapped else ""
        return (
            f"{type(self).__name__}({counted(len(self), 'sequence')}, {counted(u.tokens, 'token')}; {u.used} of "
            f"{counted(u.blocks, 'block')} of {u.page} used, "
            f"{u.shared} shared, {u.free} free{kept}, {u.fragmentation:.1%} fragmentation{swapped}; "
            f"{u.bytes / 2**20:.1f} MiB, {counted(self.layers, 'layer')})"
        )
