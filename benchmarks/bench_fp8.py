"""Rows whose query, key and value are FP8: operands, the call of Weft, and cuDNN's FP8 attention as a peer.

cuDNN's is no backend of SDPA: it is called by the graphs of `pip install nvidia-cudnn-frontend`, where that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_rows import Row

Tensor = torch.Tensor
LARGEST = 448.0  # of e4m3
SCALE_OF_WEIGHTS = 256.0  # of cuDNN's, which are at most 1 before it
PLANS = 3  # of cuDNN's plans, those that are tried


@dataclass(frozen=True)
class Quantized:
    """Query, key and value as e4m3 numbers, with one descale each, which cuDNN takes and no other kind, or more."""

    data: tuple[Tensor, Tensor, Tensor]
    descales: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def of(row: Row, tensors: tuple[Tensor, ...]) -> Quantized:
        """The layout is that of the values alone."""
        import weft

        layouts = ("rows", "rows", row.fp8)
        made = [weft.fp8.quantize(x.detach(), row.fp8_per, layout=layout) for x, layout in zip(tensors, layouts)]
        return Quantized(tuple(x.data for x in made), tuple(x.descale for x in made))  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, Tensor]:
        return dict(zip(("q_descale", "k_descale", "v_descale"), self.descales))

    def real(self, dtype: torch.dtype) -> list[Tensor]:
        """What the numbers stand for."""
        import weft

        pairs = zip(self.data, self.descales)
        return [weft.fp8.dequantize(weft.fp8.Quantized(x, descale), dtype) for x, descale in pairs]


class Cudnn:
    """A forward of cuDNN's graph API. Its output is e4m3 too, as it is on Hopper, with a scale of its own."""

    def __init__(self, row: Row, quantized: Quantized) -> None:
        import cudnn

        self.cudnn, self.handle = cudnn, cudnn.create_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        # rows of a token beside each other, [B, S, H, D], as cuDNN's own tests have them
        own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in quantized.data]
        width = (*quantized.data[0].shape[:3], row.value_dim)
        self.out = _token_rows(width, own[0].device)
        self.graph, self.given = self._graph(row, own)
        numbers = dict.fromkeys(("scale_s", "descale_s", "scale_o", "amax_s", "amax_o"), 1.0)
        numbers |= {"scale_s": SCALE_OF_WEIGHTS, "descale_s": 1 / SCALE_OF_WEIGHTS}
        tensors = {n: torch.full((1, 1, 1, 1), number, device=own[0].device) for n, number in numbers.items()}
        tensors |= {f"descale_{n}": d.reshape(1, 1, 1, 1) for n, d in zip("qkv", quantized.descales)}
        statistics = torch.empty(*width[:3], 1, device=own[0].device)
        tensors |= dict(zip("qkv", own)) | {"o": self.out, "stats": statistics}
        self.scale, largest = tensors["scale_o"], tensors["amax_o"]
        self.pack = {handle: tensors[name] for name, handle in self.given.items()}
        self.run = self._planned(None)
        self.run()
        self.scale.copy_(LARGEST / largest.clamp(min=1e-12))  # by what the first call says
        self.run = self._fastest()

    def _graph(self, row: Row, own: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        """The graph with its plans, and its tensors by name."""
        c = self.cudnn
        floats, eighths = c.data_type.FLOAT, c.data_type.FP8_E4M3
        graph = c.pygraph(
            io_data_type=eighths, intermediate_data_type=floats, compute_data_type=floats, handle=self.handle
        )  # fmt: skip
        given = {
            n: graph.tensor(name=n, dim=tuple(x.shape), stride=x.stride(), data_type=eighths)
            for n, x in zip("qkv", own)
        }
        one = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1)}
        numbers = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {n: graph.tensor(name=n, **one, data_type=floats) for n in numbers}
        mask = {} if row.variant == "full" else {"diagonal_alignment": c.diagonal_alignment.TOP_LEFT, "right_bound": 0}
        o, stats, amax_s, amax_o = graph.sdpa_fp8(
            **given, generate_stats=True, attn_scale=1 / math.sqrt(row.dim), **scales, **mask
        )
        batch, heads, rows, _ = self.out.shape
        of_rows = (heads * rows, rows, 1, 1)
        stats.set_output(True).set_dim((batch, heads, rows, 1)).set_stride(of_rows).set_data_type(floats)
        o.set_output(True).set_dim(tuple(self.out.shape)).set_stride(self.out.stride()).set_data_type(eighths)
        for number in (amax_s, amax_o):
            number.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(floats)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([c.heur_mode.A, c.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, {**given, **scales, "o": o, "stats": stats, "amax_s": amax_s, "amax_o": amax_o}

    def _planned(self, number: int | None) -> Callable[[], None]:
        """A call by one of the plans; None: by the one that cuDNN chose."""
        graph = self.graph
        if number is not None:
            graph.build_plan_at_index(number)
        of_plan = () if number is None else (number,)
        size = graph.get_workspace_size() if number is None else graph.get_workspace_size_plan_at_index(number)
        workspace = torch.empty(max(16, size), device=self.out.device, dtype=torch.uint8)
        execute = graph.execute if number is None else graph.execute_plan_at_index
        return lambda: execute(self.pack, workspace, *of_plan, handle=self.handle)

    def _fastest(self) -> Callable[[], None]:
        """Of the first plans, in place of what cuDNN thinks best."""
        from bench_measure import launch_times  # lazy: it imports this module by way of bench_peers

        found = [(min(launch_times(self.run, 3)), self.run)]
        for number in range(min(PLANS, self.graph.get_execution_plan_count())):
            try:
                call = self._planned(number)
                found.append((min(launch_times(call, 3)), call))
            except Exception:
                continue
        return min(found, key=lambda timed: timed[0])[1]

    def forward(self) -> Tensor:
        self.run()
        return self.out

    def real(self, out: Tensor) -> Tensor:
        return out.float() / self.scale


def _token_rows(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An e4m3 tensor [B, H, S, D] in the memory of [B, S, H, D]."""
    batch, heads, rows, width = shape
    return torch.empty(batch, rows, heads, width, device=device, dtype=torch.float8_e4m3fn).transpose(1, 2)
