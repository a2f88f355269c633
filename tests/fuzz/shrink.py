"""Makes a failing case small: fewer operands, simpler expressions, smaller sizes, plain layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .calls import Built, Call, Given, Variant, build, main_names
from .dense import Undefined
from .judge import Verdict, judge
from .tree import SCORE, Node, Num, Op, Read, children, nodes, with_children

MOST = {"interpret": 40, "triton": 60, "hopper": 60}  # cases tried, where a call takes long
USUAL = 250


def shrunk(built: Built, verdict: Verdict) -> tuple[Built, Verdict]:
    """The smallest case found that fails in the same way: it raises the same error, or is wrong."""
    left = MOST.get(built.call.target, USUAL)
    progress = True
    while progress and left > 0:
        progress = False
        for variant, call in _smaller(built.variant, built.call):
            left -= 1
            found = _failing(variant, call, built, verdict)
            if found is not None:
                built, verdict = found
                progress = True
                break
            if left <= 0:
                break
    return built, verdict


def _failing(variant: Variant, call: Call, before: Built, verdict: Verdict) -> tuple[Built, Verdict] | None:
    names = main_names(variant, call)
    call = replace(
        call, scalars=tuple(s for s in call.scalars if s[0] in variant.scalars),
        tensors=tuple(t for t in call.tensors if t[0] in variant.tensors),
        wanted=tuple(n for n in call.wanted if n in (*names, *variant.tensors)),
        lens=None if call.lens is None else call.lens.fitted(call.batch, call.q_len, call.kv_len),
    )  # fmt: skip
    device = before.tensors["query"].device.type
    try:
        built = build(variant, call, device)
        found = judge(built)
    except (Undefined, AssertionError):
        return None
    except Exception:  # what is drawn by hand need not be sound: a declaration may be refused
        return None
    return (built, found) if found.kind == verdict.kind and _cause(found) == _cause(verdict) else None


def _cause(verdict: Verdict) -> str:
    """The error's type and first words; of wrong numbers, that they are wrong."""
    return "" if verdict.kind == "wrong" else re.sub(r"[\d`'\"].*", "", verdict.message)[:60]


def _smaller(variant: Variant, call: Call) -> Iterator[tuple[Variant, Call]]:
    """Cases that are simpler in one way, the greatest steps first."""
    yield from ((variant, smaller) for smaller in _smaller_calls(call))
    for name in ("mask", "score", "scale", "sink"):
        tree = getattr(variant, name)
        if tree is None:
            continue
        plain = {"mask": Num(True), "score": SCORE}.get(name)
        if tree != plain:
            yield replace(variant, **{name: plain}), call
        for simpler in _simpler(tree):
            yield replace(variant, **{name: simpler}), call
    if variant.normalizer != "softmax":
        yield replace(variant, normalizer="softmax"), call
    if variant.dropout is not None:
        yield replace(variant, dropout=None), call
    yield from ((variant, smaller) for smaller in _plainer_calls(call))


def _smaller_calls(call: Call) -> Iterator[Call]:
    plain = {"wanted": (), "schedule": None, "lse": False, "q_offset": None, "dout": "plain"}
    plain |= {"fp8": (), "columns": False, "apart": False}
    for field, least in plain.items():
        if getattr(call, field) != least:
            yield replace(call, **{field: least})
    if len(call.fp8) > 1:
        yield from (replace(call, fp8=tuple(one for one in call.fp8 if one is not other)) for other in call.fp8)
    for n, (name, kind, of) in enumerate(call.fp8):
        if (kind, of) != ("e4m3", ""):
            yield replace(call, fp8=(*call.fp8[:n], (name, "e4m3", ""), *call.fp8[n + 1 :]))
    yield from (replace(call, wanted=(name,)) for name in call.wanted if len(call.wanted) > 1)
    yield from _fewer_sequences(call)
    if call.batch > 1 and not isinstance(call.q_offset, tuple):
        yield replace(call, batch=1)
    if isinstance(call.q_offset, tuple) and call.batch > 1:
        yield replace(call, batch=1, q_offset=call.q_offset[:1])
    if call.heads > 1:
        yield replace(call, heads=1, kv_heads=1)
        if call.heads > 2:
            yield replace(call, heads=2, kv_heads=1)
    for field in ("q_len", "kv_len"):
        length = getattr(call, field)
        yield from (replace(call, **{field: n}) for n in (1, 2, 6, length // 2, length - 1) if 0 < n < length)
    if len(call.main) == 3:
        yield from (replace(call, **{f: 4}) for f in ("dim", "value_dim") if getattr(call, f) > 4)


def _fewer_sequences(call: Call) -> Iterator[Call]:
    lens = call.lens
    if lens is None:
        return
    offsets = call.q_offset if isinstance(call.q_offset, tuple) else None
    if offsets is None:
        yield replace(call, lens=None, pages=None)
    if call.pages is not None:
        yield replace(call, pages=None)
        yield from (
            replace(call, pages=replace(call.pages, **{f: n}))
            for f, n in (("shares", False), ("spare", 0), ("rows", 1), ("rows", 4))
            if getattr(call.pages, f) != n
        )
    yield from (
        replace(call, lens=replace(lens, **{f: n}))
        for f, n in (("brief", False), ("dtype", "int32"))
        if getattr(lens, f) != n
    )
    if lens.packed and len(lens.q) > 1:
        for n in range(len(lens.q)):
            fewer = replace(lens, q=lens.q[:n] + lens.q[n + 1 :], kv=lens.kv[:n] + lens.kv[n + 1 :])
            yield replace(
                call, lens=fewer, q_len=max(1, sum(fewer.q)), kv_len=max(1, sum(fewer.kv)),
                q_offset=call.q_offset if offsets is None else offsets[:n] + offsets[n + 1 :],
            )  # fmt: skip


def _plainer_calls(call: Call) -> Iterator[Call]:
    if any(g.layout != "plain" for g in call.main):
        yield replace(call, main=tuple(replace(g, layout="plain") for g in call.main))
    for i, given in enumerate(call.main):
        if given.layout != "plain":
            yield replace(call, main=(*call.main[:i], replace(given, layout="plain"), *call.main[i + 1 :]))
    for i, (name, given) in enumerate(call.tensors):
        for simpler in _plainer(given):
            yield replace(call, tensors=(*call.tensors[:i], (name, simpler), *call.tensors[i + 1 :]))
    for i, (name, value) in enumerate(call.scalars):
        for simpler in (0, 1, 2):
            if abs(value) > simpler:
                given = simpler if isinstance(value, int) else float(simpler)
                yield replace(call, scalars=(*call.scalars[:i], (name, given), *call.scalars[i + 1 :]))
    if call.dtype not in ("float32",):
        yield replace(call, dtype="float32")


def _plainer(given: Given) -> Iterator[Given]:
    plain_dtype = {"f": "float32", "b": "bfloat16"}.get(given.dtype[0], "int64")
    plain_dtype = "float32" if "float" in given.dtype else given.dtype if given.dtype == "bool" else plain_dtype
    changes: tuple[dict[str, object], ...] = ({"layout": "plain"}, {"slack": 0}, {"dtype": plain_dtype})
    for change in changes:
        if any(getattr(given, k) != v for k, v in change.items()):
            yield replace(given, **change)  # type: ignore[arg-type]


def _simpler(tree: Node) -> Iterator[Node]:
    """The expression with one part replaced by one of its own parts, or by a number."""
    for path, node in _paths(tree):
        if isinstance(node, Num):
            continue
        below = [n for n in nodes(node) if n is not node and n.kind == node.kind]
        numbers = {"int": (0, 1), "float": (0.0, 1.0), "bool": (True, False)}[node.kind]
        constants: list[Node] = [Num(v) for v in numbers]
        for other in [*below[:6], *constants]:
            changed = _replaced(tree, path, other)
            if not any(
                isinstance(n, Op) and n.args and all(isinstance(a, Num) for a in n.args) for n in nodes(changed)
            ):
                yield changed
        if isinstance(node, Read):
            continue


def _paths(tree: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    yield path, tree
    for i, child in enumerate(children(tree)):
        yield from _paths(child, (*path, i))


def _replaced(tree: Node, path: tuple[int, ...], other: Node) -> Node:
    if not path:
        return other
    below = list(children(tree))
    below[path[0]] = _replaced(below[path[0]], path[1:], other)
    return with_children(tree, tuple(below))
