"""A case as a script that repeats it, with public names of Weft and torch alone."""

from __future__ import annotations

import re

from .calls import HELPERS, LAYOUTS, Built, offset_text
from .judge import Verdict, declaration
from .tree import INTS

POSITIONAL = ("query", "key", "value", "cache")


def script(built: Built, verdict: Verdict) -> str:
    """Python that makes the call and prints what came, beside what was expected."""
    call = built.call
    body = [declaration(built.variant), *built.lines]
    if call.wanted:
        body.append("; ".join(f"{n} = {n}.detach().requires_grad_()" for n in call.wanted))
    method = ".reference" if call.target == "reference" else ""
    body.append(f"{'out, lse' if call.lse else 'out'} = variant{method}({', '.join(_arguments(built))})")
    if call.wanted:
        body += _gradients(built)
    if verdict.place is not None:
        body.append(_print(verdict))
    return f"# {verdict.message[:300]}\n" + "\n".join([*_header("\n".join(body)), *body]) + "\n"


def _arguments(built: Built) -> list[str]:
    call = built.call
    found = [f"{n}_given" if n in built.stored else n for n in built.names if n in POSITIONAL]
    found += [f"{n}={n}" for n in built.stored if n not in built.names]
    found += [] if call.out_dtype is None else [f"out_dtype=torch.{call.out_dtype}"]
    found += [f"{n}={n}" for n in built.tensors if n not in POSITIONAL]
    found += [f"{n}={v!r}" for n, v in call.scalars]
    if call.q_offset is not None:
        found.append(f"q_offset={offset_text(call.q_offset, built.tensors['query'].device.type)}")
    if built.variant.dropout is not None:
        found += [f"{n}={t}" for n, t in call.dropping(built.tensors["query"].device.type).items()]
    found += [f"{n}={t}" for n, t in call.lengths(built.tensors["query"].device.type).items()]
    found += [] if call.named_target is None else [f"target={call.named_target!r}"]
    if call.target != "reference":
        found += [f"form={call.form!r}"] if call.form in ("expanded", "absorbed") else []
    found += [f"schedule={call.schedule!r}"] if call.schedule else []
    if call.deterministic is not None and call.target != "reference":
        found.append(f"deterministic={call.deterministic}")
    found += ["return_lse=True"] if call.lse else []
    return found


def _header(body: str) -> list[str]:
    used = sorted(n for n in (*INTS, "score") if re.search(rf"(?<!\.)\b{n}\b(?!=)", body))
    lines = ["import torch, weft", *([f"from weft import {', '.join(used)}"] if used else [])]
    helpers = [line for line in HELPERS.strip().splitlines() if re.search(rf"\b{_defined(line)}\b", body)]
    return [*lines, *helpers]


def _defined(line: str) -> str:
    return line.split()[1].split("(")[0] if line.startswith("def ") else line.split()[0]


def _gradients(built: Built) -> list[str]:
    """The same numbers that the fuzzer begins a backward with."""
    call = built.call
    device = ".cuda()" if built.tensors["query"].is_cuda else ""
    drawn = "torch.randn({0}.shape, generator=generator).to({0}.dtype)" + device
    lines = [
        f"generator = torch.Generator().manual_seed({call.seed})",
        f"dout = {drawn.format('out')}",
        *([layout] if (layout := LAYOUTS[call.dout].format(x="dout", poison='float("nan")')) else []),
        *([f"dlse = {drawn.format('lse')}"] if call.lse else []),
    ]
    outputs = [n for n in ("out", "lse") if (n == "out" and call.dout != "none") or (n == "lse" and call.lse)]
    given, leaves = [f"d{n}" for n in outputs], [f"d{n}" for n in call.wanted]
    arguments = f"[{', '.join(outputs)}], [{', '.join(call.wanted)}], [{', '.join(given)}], materialize_grads=True"
    return [*lines, f"[{', '.join(leaves)}] = torch.autograd.grad({arguments})"]


def _print(verdict: Verdict) -> str:
    assert verdict.place is not None
    name, at, want, _ = verdict.place
    place = f"{list(at)}" if at else ""
    return f'print("{name}{place}: got", {name}{place}.item(), "expected", {want!r})'
