"""FlashInfer over a paged cache, where it is installed: one query a sequence, of grouped heads or latent ones.

Its kernels are compiled by nvcc when first wanted (about two minutes of all of 16 cores), so `Builds` compiles those of
all backends at once, in the background.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Tensor = torch.Tensor
BACKENDS = ("fa2", "fa3")
WORKSPACE = 512 << 20


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


class Builds:
    """Modules that are being compiled, by (latent or not, backend)."""

    def __init__(self, backends: Iterable[str], kinds: Iterable[bool]) -> None:
        from flashinfer import jit  # type: ignore[import-not-found]

        dtypes = (torch.bfloat16,) * 3 + (torch.int32,)
        pool = ThreadPoolExecutor(8)
        self.found: dict[tuple[bool, str], Future[None]] = {}
        for latent in kinds:
            for backend in backends:
                if latent:
                    module = jit.gen_batch_mla_module(backend, *dtypes, 512, 64, False)
                else:
                    module = jit.gen_batch_prefill_module(backend, *dtypes, 128, 128, 0, False, False, False)
                self.found[latent, backend] = pool.submit(module.build, False)
        pool.shutdown(wait=False)

    def ready(self, latent: bool, until: float) -> list[str]:
        """Backends that are compiled by then; of the others it is said why not."""
        names = []
        for (kind, backend), built in self.found.items():
            if kind == latent:
                try:
                    built.result(max(0.0, until - time.perf_counter()))
                    names.append(backend)
                except Exception as problem:  # of nvcc, ninja, or of time
                    kind_name = "latent" if latent else "GQA"
                    text = str(problem) or type(problem).__name__
                    print(f"FlashInfer {backend} of {kind_name} is not built: {text[-600:]}", flush=True)
        return names


class FlashInfer:
    """Its calls read the pools that Weft's read, as views; what it plans for the lengths is not timed."""

    def __init__(self) -> None:
        self.workspace = torch.zeros(WORKSPACE, device="cuda", dtype=torch.uint8)

    def call(
        self, backend: str, query: Tensor, pools: list[Tensor], table: Tensor, lens: list[int], scale: float | None
    ) -> Callable[[], Tensor]:
        """query [B, Hq, 1, D], pools [blocks, Hkv, page, D]; a call returns [B, Hq, 1, Dv]."""
        page = pools[0].shape[2]
        pages = [-(-n // page) for n in lens]
        indices = torch.cat([row[:n] for row, n in zip(table, pages)])
        starts = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        own = query[:, :, 0]
        if scale is not None:
            return self._latent(backend, own, pools[0][:, 0], starts, indices, lens, scale)
        return self._grouped(backend, own, [p.transpose(1, 2) for p in pools], starts, indices, lens)

    def _grouped(
        self, backend: str, query: Tensor, pools: list[Tensor], starts: Tensor, indices: Tensor, lens: list[int]
    ) -> Callable[[], Tensor]:
        import flashinfer

        page, heads, width = pools[0].shape[1:]
        last = torch.tensor([(n - 1) % page + 1 for n in lens], dtype=torch.int32).cuda()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=True, backend=backend
        )
        dtypes = {"q_data_type": query.dtype, "kv_data_type": query.dtype}
        wrapper.plan(starts, indices, last, query.shape[1], heads, width, page, **dtypes)
        return lambda: wrapper.run(query, tuple(pools)).unsqueeze(2)

    def _latent(
        self, backend: str, query: Tensor, pool: Tensor, starts: Tensor, indices: Tensor, lens: list[int], scale: float
    ) -> Callable[[], Tensor]:
        import flashinfer

        dtype, page, rows = query.dtype, pool.shape[1], torch.tensor(lens, dtype=torch.int32).cuda()
        each = torch.arange(len(lens) + 1, dtype=torch.int32).cuda()
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend=backend)
        wrapper.plan(
            each, starts, indices, rows, query.shape[1], 512, 64, page, False, scale, dtype, dtype
        )  # fmt: skip
        parts = [t[..., part] for t in (query, pool) for part in (slice(512), slice(512, None))]
        return lambda: wrapper.run(*parts).unsqueeze(2)
