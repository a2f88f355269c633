"""Launchers of GPU targets on CPU tensors, with what they launch replaced: what the host does without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from weft.calls import conversion
from weft.codegen import torch_private
from weft.codegen.launch import launching
from weft.codegen.launch.device import Device
from weft.compiler.planning.machines import hardware
from weft.runtime import descales

Compiled = Callable[[Any, Sequence[Any]], Any]  # (binding, arguments with tensors) -> a kernel that can be launched


def go_without_a_gpu(monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    """As on an H200, but that nothing is compiled, and what is launched is what `compiled` gives."""
    made = Device.__init__

    def here(self: Any, number: int, interprets: bool) -> None:
        made(self, number, interprets)
        self.number = -1  # what CPU tensors say of theirs
        self.empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        self.guard, self.current = torch_private.guard, lambda: -1

    def all_of_them(self: Any, asked: Sequence[Any]) -> list[Any]:
        return [compiled(one.binding, one.arguments) for one in asked]

    h200 = hardware.by_name("h200")
    monkeypatch.setattr(hardware, "for_device", lambda device: h200)
    monkeypatch.setattr(Device, "hardware", lambda self: h200)
    monkeypatch.setattr(Device, "processors", lambda self: h200.sms)
    monkeypatch.setattr(Device, "__init__", here)
    monkeypatch.setattr(Device, "compiled", all_of_them)
    monkeypatch.setattr(Device, "stream", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(conversion, "_known_arch", lambda device: h200.arch)
    monkeypatch.setattr(descales, "are_looked_at", lambda descale: False)  # as they are where they lie on a GPU
    zero = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launching, "counter", lambda device: zero)
    monkeypatch.setattr(launching, "stream_function", lambda: lambda device: 0)
