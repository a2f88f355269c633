"""The table of operators: every pass knows every operator in it, and what a record lacks is told at once."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import head, kv_pos, q_pos, score
from weft.codegen.dialects import GLUON, TORCH, TRITON, Dialect, Printer
from weft.codegen.function_lines import IEEE
from weft.codegen.functions import FunctionPrinter
from weft.compiler.analysis.tiles.facts import Facts
from weft.compiler.analysis.tiles.programs import _function, _values
from weft.compiler.analysis.values.ranges import range_of
from weft.compiler.analysis.values.symbolic import _check as check_symbolic
from weft.compiler.analysis.values.symbolic import derivative, simplify
from weft.ir import functions
from weft.ir.canonical import canonical
from weft.ir.errors import InternalError
from weft.ir.expr import Call, Const, Expr, call, expression
from weft.ir.operators import OPERATORS, STRUCTURAL, Operator, function_names
from weft.ir.parse import parse
from weft.ir.reference import _torch_function, evaluate

from ..support import check_variant, poisoned

cap, size = weft.scalar("cap", float), weft.scalar("size", int)
table = weft.tensor("table", 3)
EVERY = pytest.mark.parametrize("op", list(OPERATORS.values()), ids=list(OPERATORS))
VALUES = (0.4, 0.9, 1.7, 2.2)  # of the score: where every function has a value, and away from ties with cap
ENV: dict[str, Any] = {
    "score": torch.tensor(VALUES, dtype=torch.float64), "cap": 1.3, "size": 2, "head": 0,
    "q_pos": torch.tensor([0, 3, 5, 8]), "kv_pos": torch.tensor([2, 0, 5, 3]),
}  # fmt: skip


def sample(op: Operator) -> Expr:
    """The operator applied to operands that it takes, of which some value is different for each pair of positions."""
    if op.name == "where":
        return call("where", q_pos < kv_pos, score, cap)
    of = {"int": (q_pos, kv_pos + 1, size), "bool": (q_pos < kv_pos, head < 1, q_pos < 2)}
    return call(op.name, *of.get(op.takes, (score, cap, q_pos))[: op.arity])


def value(node: Expr, env: dict[str, Any] = ENV) -> torch.Tensor:
    return evaluate(node, env, torch.float64, torch.device("cpu")).expand(len(VALUES))


def at_place(env: dict[str, Any], place: int) -> dict[str, Any]:
    """The environment with the numbers of one place for its tensors."""
    return {k: v[place].item() if isinstance(v, torch.Tensor) else v for k, v in env.items()}


def close(got: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got).double().expand(len(VALUES)), wanted.double(), rtol=1e-6, atol=0)


# -- every pass, every operator ---------------------------------------------------------------------------------------
@EVERY
def test_text_reads_back(op: Operator) -> None:
    node = sample(op)
    assert str(parse(str(node), {"cap": cap, "size": size})) == str(node)


@EVERY
def test_python_writes_it(op: Operator) -> None:
    """Signs are Python's own, of the expressions; functions are public."""
    operands = dict(zip("abc", sample(op).args))  # type: ignore[union-attr]
    if op.is_function:
        written = getattr(weft, op.name)(*operands.values())
    else:
        written = eval(f"a {op.sign} b" if op.arity == 2 else f"{op.sign} a", operands)
    assert isinstance(written, Call)
    assert (written.op, str(written)) == (op.name, str(sample(op)))


@EVERY
def test_the_canonical_form_is_stable_and_keeps_the_value(op: Operator) -> None:
    node = sample(op)
    assert str(canonical(canonical(node))) == str(canonical(node))
    close(value(canonical(node)), value(node))
    if op.commutative:
        assert str(canonical(call(op.name, *reversed(node.args)))) == str(canonical(node))  # type: ignore[union-attr]


@EVERY
def test_the_reference_computes_what_python_does(op: Operator) -> None:
    node = sample(op)
    assert isinstance(node, Call)
    places = zip(*(value(a).tolist() for a in node.args))
    close([op.python(*operands) for operands in places], value(node))


@EVERY
def test_constants_are_folded_where_that_is_exact(op: Operator) -> None:
    node = sample(op)
    assert isinstance(node, Call)
    constants = tuple(expression(value(a)[1].item()) for a in node.args)
    folded = canonical(call(op.name, *constants))
    assert isinstance(folded, Const) or not op.exact
    close(value(folded), value(node)[1].expand(len(VALUES)))


@EVERY
def test_simplify_keeps_type_and_value(op: Operator) -> None:
    node = sample(op)
    assert simplify(node).dtype == node.dtype
    close(value(simplify(node)), value(node))
    assert str(simplify(simplify(node))) == str(simplify(node))


def _around(node: Expr, step: float) -> torch.Tensor:
    return value(node, {**ENV, "score": ENV["score"] + step})


@EVERY
def test_the_derivative_is_that_of_differences(op: Operator) -> None:
    """Of each operand in turn, also behind another function."""
    node = sample(op)
    assert isinstance(node, Call)
    if node.dtype != "float":
        assert str(derivative(node, score)) == "0.0"
        return
    for place, argument in enumerate(node.args):
        if argument.dtype != "float":
            continue
        for inner in (0.75 * score, 1.5 * score, weft.exp(score)):  # no ties with the other operands
            at = call(op.name, *(inner if n == place else a for n, a in enumerate(node.args)))
            numeric = (_around(at, 1e-6) - _around(at, -1e-6)) / 2e-6
            torch.testing.assert_close(value(derivative(at, score)), numeric, rtol=1e-6, atol=1e-8)


@EVERY
def test_tile_programs_run_it(op: Operator) -> None:
    node = sample(op)
    close([_function(node)(_values(at_place(ENV, n))) for n in range(len(VALUES))], value(node))


def test_tile_programs_give_0_for_a_division_by_0() -> None:
    env = _values({"q_pos": 7, "head": 0})
    assert [_function(call(name, q_pos, head))(env) for name in ("floordiv", "mod")] == [0, 0]


@EVERY
def test_ranges_hold_every_value(op: Operator) -> None:
    if op.takes == "bool" or op.gives in ("bool", "float"):
        return
    operands: list[Expr] = [q_pos, kv_pos, size][: op.arity]
    if op.name == "where":
        operands[0] = q_pos < 2
    env = {"q_pos": (-3, 4), "kv_pos": (1, 5), "size": (2, 2)}
    low, high = range_of(call(op.name, *operands), env)
    grid = itertools.product(*(range(a, b + 1) for a, b in env.values()))
    found = [op.python(*((q < 2 if op.name == "where" else q), kv, s)[: op.arity]) for q, kv, s in grid]
    assert low <= min(found) and max(found) <= high
    if op.int_range is not None:
        assert (low, high) == (min(found), max(found)), "the rule is exact on these ranges"


@EVERY
def test_torch_writes_it_on_tiles_and_on_numbers(op: Operator) -> None:
    namespace = {"torch": torch, "math": math, **ENV, "arg_cap": 1.3, "arg_size": 2}
    exec(IEEE, namespace)
    node = sample(op)
    close(eval(Printer(TORCH)(node), namespace), value(node))
    assert isinstance(node, Call)
    mirrored = Call(op.name, node.args[::-1], node.dtype)  # the plain number on the other side
    if op.arity == 2 and op.takes != "int":
        close(eval(Printer(TORCH)(mirrored), namespace), value(mirrored))
    numbers = Printer(TORCH, scalar_code=True)(node)
    close([eval(numbers, at_place(namespace, n)) for n in range(len(VALUES))], value(node))


@EVERY
@pytest.mark.parametrize("language", [TRITON, GLUON], ids=["triton", "gluon"])
def test_gpu_languages_have_what_is_printed(op: Operator, language: Dialect) -> None:
    """Every function that the text calls is one of the language, or a helper that is printed with it."""
    pytest.importorskip("triton")
    import triton.experimental.gluon.language
    import triton.language

    module = {"tl": triton.language, "gl": triton.experimental.gluon.language}[language.module]
    text = Printer(language)(sample(op))
    helpers = FunctionPrinter(Facts(weft.Attention()), language)._helpers(text)
    for attribute in re.findall(rf"\b{language.module}\.(\w+)", text + "".join(helpers)):
        assert hasattr(module, attribute), attribute
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    defined = {n.name for h in helpers for n in ast.parse(h).body if isinstance(n, ast.FunctionDef)}
    assert {c.func.id for c in calls if isinstance(c.func, ast.Name)} <= defined


def test_a_choice_may_hang_on_a_scalar_alone() -> None:
    query, key, val = (poisoned((1, 1, 20, 16), torch.float32, seed=n) for n in range(3))
    variant = weft.Attention(score=weft.where(cap < 1.0, score, weft.where(cap < 2.0, 0.5, -score)), name="switched")
    for number in (0.5, 1.5, 2.5):
        check_variant(variant, query, key, val, target="cpu", operands={"cap": number})


def test_a_helper_is_printed_wherever_it_is_called() -> None:
    """Also right behind a sign or a bracket, and for another helper; not for a function of torch or Triton."""
    printer = FunctionPrinter(Facts(weft.Attention()), TRITON)

    def helpers(text: str) -> list[str]:
        return [re.findall(r"def (\w+)", h)[0] for h in printer._helpers(text)]

    assert helpers("return tl.exp(-tanh(x))") == ["tanh"]
    assert helpers("return floor_mod(a, b)") == ["floor_div", "floor_mod"]
    assert helpers("return tl.tanh(x) + arctanh(x)") == []


def test_places_of_operands_are_counted_in_64_bits() -> None:
    node = table[0, q_pos - kv_pos, head]
    for dialect, m in ((TRITON, "tl"), (GLUON, "gl")):
        terms = Printer(dialect)(node).split("arg_table + ")[1].split(").to(")[0].split(" + ")
        assert terms == [f"{m}.cast({index}, {m}.int64) * s{d}_table"
                         for d, index in enumerate(("0", "q_pos - kv_pos", "head"))]  # fmt: skip


# -- public functions -------------------------------------------------------------------------------------------------
def test_functions_are_public() -> None:
    assert len(set(weft.__all__)) == len(weft.__all__)
    for name in function_names():
        assert name in weft.__all__ and name in dir(weft) and name in dir(functions)
        function = getattr(weft, name)
        assert function is getattr(functions, name) and function.__name__ == name
        assert list(inspect.signature(function).parameters) == list(OPERATORS[name].operands)
        assert pickle.loads(pickle.dumps(function)) is function
        assert not doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(
            function.__doc__, {"weft": weft}, name, None, None)).failed  # fmt: skip


def test_a_star_import_gives_the_functions() -> None:
    namespace: dict[str, Any] = {}
    exec("from weft import *", namespace)
    assert namespace["tanh"] is weft.tanh and namespace["abs"] is weft.abs


def test_operands_have_names_and_a_number() -> None:
    assert str(weft.where(condition=q_pos < 1, b=0.0, a=score)) == "where(q_pos < 1, score, 0.0)"
    with pytest.raises(TypeError, match=r"where\(condition, a, b\): missing a required argument: 'b'"):
        weft.where(q_pos < 1, score)
    with pytest.raises(TypeError, match=r"tanh\(x\): too many positional arguments"):
        weft.tanh(score, score)


@pytest.mark.parametrize("name", ["tnah", "inspect", "Operator", "mod", "neg"])
def test_what_is_no_function_is_no_attribute(name: str) -> None:
    with pytest.raises(AttributeError, match=f"weft has no '{name}'"):
        getattr(weft, name)


# -- one more operator is one record ----------------------------------------------------------------------------------
ERF = Operator(
    "erf", ("x",), "number", "float", math.erf, "erf", ("1.1283791670955126 * exp(-x * x)",), doc="The error function.",
    gpu="{m}.erf({0})", tile="torch.erf({0})", number="math.erf({0})",
)  # fmt: skip
HYPOT = Operator(
    "hypot", ("a", "b"), "number", "float", math.hypot, "hypot", ("a / result", "b / result"), doc="Length.",
    gpu="hypot({0}, {1})", tile="torch.hypot({0}, {1})", number="math.hypot({0}, {1})",
    helper='{jit}\ndef hypot(a, b):\n    """Length of a vector."""\n    return {m}.sqrt(a * a + b * b)\n',
)  # fmt: skip
CLIP = Operator(
    "clip", ("x", "low", "high"), "number", "same", lambda x, low, high: min(max(x, low), high), "clamp",
    ("where((low < x) & (x < high), 1.0, 0.0)", "where((x < low) & (low < high), 1.0, 0.0)",
     "where(high < maximum(x, low), 1.0, 0.0)"),
    doc="x, kept between two bounds.",
    int_range=lambda x, a, b: (min(max(x[0], a[0]), b[0]), min(max(x[1], a[1]), b[1])),
    gpu="{m}.minimum({m}.maximum({0}, {1}), {2})",
    tile="torch.clamp(torch.clamp({0}, min={1}), max={2})", number="min(max({0}, {1}), {2})",
)  # fmt: skip
CEIL = Operator(
    "ceil", ("x",), "number", "int", math.ceil, "ceil", doc="The smallest int not below x.",
    gpu="{m}.ceil({0}).to({m}.int32)", tile="torch.ceil({0}).long()", number="math.ceil({0})",
)  # fmt: skip
MADE = {op.name: op for op in (ERF, HYPOT, CLIP, CEIL)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Four operators that the language lacks, declared by their records alone."""
    for name, op in MADE.items():
        monkeypatch.setitem(OPERATORS, name, op)
    with weft.settings(cache_dir=tmp_path):
        yield weft


def scored(name: str) -> weft.Attention:
    """A variant whose score needs the value and the slope of a function that was made here."""
    x, far = score / 2.0, 1.0 * (kv_pos - q_pos) / 8.0
    scores = {
        "erf": 3.0 * weft.erf(x) + score,
        "hypot": weft.hypot(x, cap) - weft.hypot(far * far + 0.5, x),
        "clip": weft.clip(score, -0.75, cap) * 2.0 + weft.clip(kv_pos - q_pos, -2, 3),
        "ceil": x + weft.ceil(far + x) * 0.5,  # of distances alone it would stand in their table
    }
    return weft.Attention(score=scores[name], mask=kv_pos <= q_pos + 2, name=f"with_{name}")


@pytest.mark.parametrize("op", list(MADE.values()), ids=list(MADE))
def test_one_record_is_enough_for_every_pass(made: Any, op: Operator) -> None:
    for test in (
        test_text_reads_back, test_python_writes_it, test_the_canonical_form_is_stable_and_keeps_the_value,
        test_the_reference_computes_what_python_does, test_constants_are_folded_where_that_is_exact,
        test_simplify_keeps_type_and_value, test_the_derivative_is_that_of_differences, test_tile_programs_run_it,
        test_ranges_hold_every_value, test_torch_writes_it_on_tiles_and_on_numbers,
    ):  # fmt: skip
        test(op)


@pytest.mark.parametrize("name", list(MADE))
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_one_record_is_enough_to_compute_with_it(made: Any, name: str, target: str) -> None:
    """Forward and every gradient, against the reference in float64."""
    if target == "interpret":
        pytest.importorskip("triton")
    query, key, val = (poisoned((1, 2, 40, 16), torch.float32, seed=n) for n in range(3))
    operands = {"cap": 1.25} if name in ("hypot", "clip") else {}
    check_variant(scored(name), query, key, val, target=target, operands=operands)


@pytest.mark.parametrize(
    ("name", "written", "slope"),
    [
        ("erf", "tl.erf(", "tl.exp("),
        ("hypot", "def hypot(a, b):", "hypot("),
        ("clip", "tl.minimum(tl.maximum(", "tl.where("),
        ("ceil", "tl.ceil(", ""),
    ],
)
def test_one_record_is_enough_to_print_kernels(made: Any, name: str, written: str, slope: str) -> None:
    pytest.importorskip("triton")
    variant, sizes = scored(name), weft.shape(heads=2, q_len=128, head_dim=64)
    forward = variant.source(sizes, device="h200", target="triton")
    backward = variant.source(sizes, direction="backward", device="h200", target="triton")
    assert written in forward and written in backward
    derivatives = backward.split("def dscores(")[1].split("@triton.jit")[0]
    assert slope in derivatives
    assert written.replace("tl.", "gl.") in FunctionPrinter(Facts(variant), GLUON).forward()


def test_a_mask_may_use_one_more_function(made: Any) -> None:
    """Tile bounds and what is measured know nothing of it, and are sound."""
    reach = weft.ceil(4.0 * weft.erf(q_pos / 20.0))
    mask = (kv_pos <= q_pos) & (q_pos - kv_pos < reach + 1)
    query, key, val = (poisoned((1, 1, 150, 16), torch.float32, seed=n) for n in range(3))
    check_variant(weft.Attention(mask=mask, name="reaching"), query, key, val, target="cpu")


# -- what is wrong is told at once ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "two words"}, "expected a Python identifier"),
        ({"name": "lambda"}, "no keyword"),
        ({"doc": ""}, "expected doc"),
        ({"slopes": ()}, r"expected slopes, 1 for 1 operands \(or STRUCTURAL\), got 0"),
        ({"slopes": ("x", "x")}, "got 2"),
        ({"gives": "int"}, "expected no slopes"),
        ({"gpu": ""}, "expected gpu, how a function is written there"),
        ({"tile": ""}, "expected tile"),
        ({"number": ""}, "expected number"),
        ({"number": "math.erf(x)"}, "number: expected one place for each of 1 operands, got 'math.erf"),
        ({"gluon": "gl.erf({0}, {1})"}, "gluon: expected one place"),
        ({"commutative": True}, "expected 2 operands of what is commutative, got 1"),
        ({"tile_and_number": "torch.erf({0})"}, "tile_and_number: expected a commutative operator"),
        ({"fast_helper": "def erf"}, "expected a helper that it takes the place of"),
    ],
)
def test_a_record_says_what_it_lacks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        dataclasses.replace(ERF, **changes)


def test_a_record_lists_all_that_it_lacks() -> None:
    with pytest.raises(InternalError, match=r"operator erf: expected doc.*; expected slopes.*; expected gpu"):
        dataclasses.replace(ERF, doc="", slopes=(), gpu="")


@pytest.mark.parametrize(
    ("variant", "approximate"),
    [
        (weft.Attention(cap * weft.tanh(score / cap), name="capped"), True),
        (weft.Attention(score + weft.sin(score), weft.cos(0.1 * q_pos) > 0.5, name="waves_masked"), False),
        (weft.Attention(score * weft.where(weft.tanh(score) < 0.5, 1.0, 2.0), name="chosen"), False),
        (weft.Attention(score + table[head, weft.floor(4.0 * weft.sin(q_pos)) + 4, 0], name="indexed"), False),
    ],
    ids=lambda given: given.name if isinstance(given, weft.Attention) else "",
)
def test_no_decision_is_made_by_an_approximation(variant: weft.Attention, approximate: bool) -> None:
    """The two sides of a comparison would meet or not as the hardware rounds."""
    for dtype, wanted in ((torch.bfloat16, approximate), (torch.float32, False)):
        operands = [torch.empty(1, 4, 64, 64, dtype=dtype, device="meta")] * 3
        source = variant.source(*operands, device="h200", target="triton")
        assert (".approx.f32" in source.replace("ex2.approx", "")) == wanted


def test_modules_say_what_they_cannot_find() -> None:
    with pytest.raises(InternalError, match="torch has no special.errf"):
        _torch_function("special.errf")
    with pytest.raises(InternalError, match="erf is STRUCTURAL, but nothing is built in for it; give slopes"):
        check_symbolic([dataclasses.replace(ERF, slopes=STRUCTURAL)])
    with pytest.raises(InternalError, match=r"operator erf: slope `exp\(y\)`: unknown name 'y'"):
        check_symbolic([dataclasses.replace(ERF, slopes=("exp(y)",))])
    with pytest.raises(InternalError, match=r"operator erf: slope `q_pos \* x`: expected x, result, got `q_pos`"):
        check_symbolic([dataclasses.replace(ERF, slopes=("q_pos * x",))])


# -- what decides ------------------------------------------------------------------------------------------------------
Q, K, RATE = q_pos, kv_pos, weft.scalar("rate", float)


def printed(expr: Expr) -> str:
    """One function of Triton's, as a kernel calls it."""
    mask = weft.Attention(mask=expr, name="decided")
    return FunctionPrinter(Facts(mask), TRITON)._mask_parts()[0].splitlines()[-1]


DECIDED = [
    (weft.floor((Q - K) / 7) == 0, "tl.div_rn((q_pos - kv_pos) * 1.0, 7.0)"),
    (Q / RATE <= 3, "tl.div_rn(q_pos * 1.0, arg_rate)"),
    (weft.floor(Q / 8) == 0, "(q_pos * 0.125)"),  # as exact
    (0.7 * Q - 7.0 >= K, "tl.fma(0.7, q_pos * 1.0, 0.0) - 7.0"),  # not one operation
    (0.5 * Q - 7.0 >= K, "0.5 * q_pos - 7.0"),  # which would be no other number
    (0.7 * Q >= 7.0, "0.7 * q_pos"),
]


@pytest.mark.parametrize(("expr", "text"), DECIDED, ids=[str(e) for e, _ in DECIDED])
def test_what_decides_is_rounded_alike_everywhere(expr: Expr, text: str) -> None:
    assert text in printed(expr)


def test_shared_parts_of_a_decision_are_rounded_too() -> None:
    shared = weft.Attention(mask=Q / RATE * (Q / RATE) >= K, name="shared")
    text = FunctionPrinter(Facts(shared), TRITON)._mask_parts()[0]
    assert "t0 = tl.div_rn(q_pos * 1.0, arg_rate)" in text
