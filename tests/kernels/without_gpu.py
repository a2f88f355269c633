"""Launchers of GPU targets on CPU tensors, with what they launch replaced: what the host does without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from weft.codegen import launching
from weft.codegen.targets import hopper_launcher, latent_launcher
from weft.codegen.targets.split_launcher import SplitLauncher
from weft.codegen.targets.triton_launcher import TritonLauncher
from weft.compiler.planning import hardware
from weft.runtime import torch_private

Compiled = Callable[[Any, Sequence[Any]], Any]  # (binding, arguments with tensors) -> a kernel that can be launched


def go_without_a_gpu(monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    """As on an H200, but that nothing is compiled, and what is launched is what `compiled` gives."""
    made = TritonLauncher.__init__

    def here(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.device = -1  # what CPU tensors say of theirs
        self.empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        self.guard = torch_private.guard

    def all_of_them(self: Any, bindings: Any, options: Any, typed: Any) -> list[Any]:
        return [compiled(binding, values) for binding, (_, values) in zip(bindings, typed)]

    h200 = hardware.by_name("h200")
    monkeypatch.setattr(hardware, "for_device", lambda device: h200)
    monkeypatch.setattr(SplitLauncher, "_machine", lambda self: h200)
    for module in (hopper_launcher, latent_launcher):
        monkeypatch.setattr(module, "processors", lambda device: h200.sms)
    monkeypatch.setattr(TritonLauncher, "__init__", here)
    monkeypatch.setattr(TritonLauncher, "_compiled", all_of_them)
    monkeypatch.setattr(TritonLauncher, "_stream", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    zero = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launching, "counter", lambda device: zero)
    monkeypatch.setattr(launching, "stream_function", lambda: lambda device: 0)
