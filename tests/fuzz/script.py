"""A case as a script that repeats it, with public names of Weft and torch alone."""

from __future__ import annotations

import re

from .calls import HELPERS, LAYOUTS, Built, offset_text
from .judge import Verdict, declaration
from .tree import INTS


def script(built: Built, verdict: Verdict) -> str:
    """Python that makes the call and prints what came, beside what was expected."""
    call, variant = built.call, built.variant
    declared = declaration(variant)
    body = [declared, *built.lines]
    keywords = [f"{n}={n}" for n in built.tensors if n not in ("query", "key", "value", "cache")]
    keywords += [f"{n}={v!r}" for n, v in call.scalars]
    keywords += [f"q_offset={offset_text(call.q_offset)}"] if call.q_offset is not None else []
    options = [f"target={call.target!r}"] + ([f"schedule={call.schedule!r}"] if call.schedule else [])
    options += [f"form={call.form!r}"] if call.form in ("expanded", "absorbed") else []
    main = [n for n in built.names if n in ("query", "key", "value", "cache")]
    if call.wanted:
        body.append(f"for x in ({', '.join(call.wanted)},): x.requires_grad_()" if _are_leaves(built) else
                    "; ".join(f"{n} = {n}.detach().requires_grad_()" for n in call.wanted))  # fmt: skip
    arguments = ", ".join([*main, *keywords])
    results = "out, lse" if call.lse else "out"
    lse = ", return_lse=True" if call.lse else ""
    body.append(f"{results} = variant({arguments}, {', '.join(options)}{lse})")
    if call.wanted:
        body += _gradients(built)
    body += [_print(verdict), _reference(built, arguments, lse)] if verdict.kind == "wrong" else []
    text = "\n".join([*_header("\n".join(body), call.target), *body])
    return f"# {verdict.message[:300]}\n{text}\n"


def _are_leaves(built: Built) -> bool:
    return all(g.layout == "plain" for g in built.call.main) and all(g.layout == "plain" for _, g in built.call.tensors)


def _header(body: str, target: str) -> list[str]:
    used = sorted(n for n in (*INTS, "score") if re.search(rf"\b{n}\b", body))
    lines = ["import torch, weft", *([f"from weft import {', '.join(used)}"] if used else [])]
    helpers = [line for line in HELPERS.strip().splitlines() if re.search(rf"\b{_defined(line)}\b", body)]
    if target in ("triton", "hopper"):
        helpers = [line.replace("manual_seed(seed))", "manual_seed(seed)).cuda()") for line in helpers]
    return [*lines, *helpers]


def _defined(line: str) -> str:
    return line.split()[1].split("(")[0] if line.startswith("def ") else line.split()[0]


def _gradients(built: Built) -> list[str]:
    call = built.call
    device = ".cuda()" if call.target in ("triton", "hopper") else ""
    lines = [f"generator = torch.Generator().manual_seed({call.seed})",
             f"dout = torch.randn(out.shape, generator=generator).to(out.dtype){device}"]  # fmt: skip
    layout = LAYOUTS[call.dout].format(x="dout", poison='float("nan")')
    lines += [layout] if layout else []
    weights = "dout"
    if call.lse:
        lines.append(f"dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype){device}")
        weights = "dout, dlse"
    outputs = "out, lse" if call.lse else "out"
    names = ", ".join(f"d{n}" for n in call.wanted)
    return [*lines, f"{names}{',' if len(call.wanted) == 1 else ''} = torch.autograd.grad(({outputs},), "
            f"({', '.join(call.wanted)},), ({weights},), allow_unused=True)"]  # fmt: skip


def _print(verdict: Verdict) -> str:
    if verdict.place is None:
        return f"print({verdict.message!r})"
    name, at, want, _ = verdict.place
    place = f"{list(at)}" if at else ""
    return f'print("{name}{place}: got", {name}{place}.item(), "expected", {want!r})'


def _reference(built: Built, arguments: str, lse: str) -> str:
    return f"# variant.reference({arguments}{lse}) is Weft's own definition"
