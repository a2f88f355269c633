"""The symbolic border: the one module that knows sympy. Expressions go in, expressions come out.

Three worlds are kept apart, so that nothing changes its type or its meaning on the way:

- floats: real algebra over sympy rationals; every int inside is one opaque symbol, converted where it is used;
- ints: integer algebra, with `//` and `%` that round down; a `floor` inside is one opaque symbol;
- bools: rebuilt as written, with simplified operands.

Every function of the language is a sympy function of its own, with no rewriting of sympy's (which would merge
exponentials or open up tanh) and with the derivative that torch takes at kinks: that of its record in ir/operators.py,
or the one written out here for what the record calls STRUCTURAL.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache

import sympy

from ....ir.canonical import canonical
from ....ir.errors import InternalError, WeftError
from ....ir.expr import Call, Const, Expr, Load, Scalar, Symbol, call
from ....ir.operators import OPERATORS, STRUCTURAL, Operator
from ....ir.parse import parse
from ....ir.walk import nodes, rebuild, symbols

_COMPARISONS = {"lt": lambda d: d < 0, "le": lambda d: d <= 0, "eq": lambda d: d == 0, "ne": lambda d: d != 0,
                "gt": lambda d: d > 0, "ge": lambda d: d >= 0}  # fmt: skip


def simplify(expr: Expr) -> Expr:
    """An equal expression in canonical form.

    Guarantees: the same type; ints equal bit for bit (barring 32-bit overflow); floats equal up to rounding where
    both sides are finite; factors that a whole tile shares come first in a product, so that they are multiplied once;
    functions keep their form, so that equal parts of different expressions have equal text.

    >>> from ....ir.parse import parse
    >>> simplify(parse("(kv_pos - q_pos) * 2 + q_pos * 2 + score / 8.0 + 0.0"))
    0.125 * score + 2 * kv_pos
    """
    expr = canonical(expr)
    if expr.dtype == "bool":
        return canonical(_condition(expr))
    border = _Border()
    return border.leave(border.enter(expr), expr.dtype)


def derivative(expr: Expr, target: Expr) -> Expr:
    """d expr / d target, a float, simplified; equal parts have the text that they have in `simplify(expr)`.

    target: a symbol (`qk`) or a read of a float tensor; reads with the same indices are the same variable, all
    others are constants. At a kink the derivative is torch's: `abs` 0 at 0, `minimum` and `maximum` half and half at
    a tie, `where` that of the branch taken, `floor` and comparisons 0.

    >>> from ....ir.expr import symbol
    >>> x = symbol("score")
    >>> derivative(50.0 * call("tanh", x / 50.0), x)
    1.0 - tanh(0.02 * score) * tanh(0.02 * score)
    """
    if not isinstance(target, (Symbol, Load)) or target.dtype != "float":
        raise InternalError(f"derivative: expected a float symbol or a read of a float tensor, got `{target}`")
    if expr.dtype != "float":
        return Const(0.0)
    border = _Border()
    return border.leave(border.enter(canonical(expr)).diff(border.enter(canonical(target))), "float")


# -- functions of the language, as sympy sees them --------------------------------------------------------------------
class _Function(sympy.Function):  # type: ignore[misc]
    """A function that sympy leaves alone."""

    op: str  # its name in the language


def _function_of(operator: Operator) -> type[_Function]:
    """The sympy function of an operator."""
    return _BUILT_IN.get(operator.name) or _by_record(operator)


@cache
def _by_record(operator: Operator) -> type[_Function]:
    """A function that is known by its slopes alone."""
    rules = [_slope(operator, text) for text in operator.slopes]

    def fdiff(self: _Function, number: int = 1) -> sympy.Expr:
        return _by_rule(rules[number - 1], {**dict(zip(operator.operands, self.args)), "result": self})

    members = {"op": operator.name, "fdiff": fdiff}
    return types.new_class(f"_{operator.name}", (_Function,), exec_body=lambda space: space.update(members))


def _slope(operator: Operator, text: str) -> Expr:
    """A rule of the table, read."""
    names = {name: Scalar(name, "float") for name in (*operator.operands, "result")}
    try:
        rule = parse(text, names)
    except WeftError as error:
        raise InternalError(f"operator {operator.name}: slope `{text}`: {error}") from error
    if found := [n for n in nodes(rule) if isinstance(n, (Symbol, Load))]:
        raise InternalError(f"operator {operator.name}: slope `{text}`: expected {', '.join(names)}, got `{found[0]}`")
    return rule


def _by_rule(rule: Expr, values: Mapping[str, sympy.Expr]) -> sympy.Expr:
    """A rule of the table over the values of its names, in the form that shares most with them."""
    match rule:
        case Const(value):
            return sympy.Rational(repr(value))
        case Scalar(name):
            return values[name]
        case Call(op, args):
            operands = [_by_rule(a, values) for a in args]
            return _ARITHMETIC[op](*operands) if op in _ARITHMETIC else _function_of(OPERATORS[op])(*operands)
        case _:
            raise InternalError(f"slopes: unknown node {type(rule).__name__}")


class _Less(_Function):
    op = "lt"


class _Equal(_Function):
    op = "eq"


class _Where(_Function):
    op = "where"

    @classmethod
    def eval(cls, condition: sympy.Expr, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return a if a == b else None

    def _eval_derivative(self, variable: sympy.Symbol) -> sympy.Expr:
        condition, a, b = self.args
        return _Where(condition, a.diff(variable), b.diff(variable))


class _Abs(_Function):
    op = "abs"

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return abs(x) if x.is_Rational else None

    def _eval_derivative(self, variable: sympy.Symbol) -> sympy.Expr:
        x = self.args[0]
        slope = x.diff(variable)
        return _Where(_Less(0, x), slope, _Where(_Less(x, 0), -slope, 0))


class _Extreme(_Function):
    """minimum or maximum: the derivative of the side taken, and the mean of both at a tie."""

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a == b:
            return a
        return (min if cls.op == "minimum" else max)(a, b) if a.is_Rational and b.is_Rational else None

    def _eval_derivative(self, variable: sympy.Symbol) -> sympy.Expr:
        a, b = self.args
        low, high = (a, b) if self.op == "minimum" else (b, a)
        slope_a, slope_b = a.diff(variable), b.diff(variable)
        return _Where(_Less(low, high), slope_a, _Where(_Equal(a, b), (slope_a + slope_b) / 2, slope_b))


class _Minimum(_Extreme):
    op = "minimum"


class _Maximum(_Extreme):
    op = "maximum"


class _FloorDiv(_Function):
    op = "floordiv"

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return a if b == 1 else sympy.Integer(a // b) if _both_integers(a, b) else None


class _Mod(_Function):
    op = "mod"

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return sympy.S.Zero if b == 1 else sympy.Integer(a % b) if _both_integers(a, b) else None


def _both_integers(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a.is_Integer and b.is_Integer and b != 0


_BUILT_IN: dict[str, type[_Function]] = {
    f.op: f for f in (_Less, _Equal, _Where, _Abs, _Minimum, _Maximum, _FloorDiv, _Mod)
}
_ARITHMETIC: dict[str, Callable[..., sympy.Expr]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "neg": lambda a: -a, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}  # fmt: skip


def _check(operators: Iterable[Operator]) -> None:
    """What the table leaves to this module is here, and its slopes are expressions."""
    for operator in operators:
        if operator.slopes != STRUCTURAL:
            _by_record(operator)
        elif operator.name not in {**_BUILT_IN, **_ARITHMETIC}:
            raise InternalError(f"simplify: {operator.name} is STRUCTURAL, but nothing is built in for it; give slopes")


_check(OPERATORS.values())


# -- bools ------------------------------------------------------------------------------------------------------------
def _condition(node: Expr) -> Expr:
    """A bool expression with simplified operands; comparisons of ints are decided where their difference is known."""
    match node:
        case Const() | Symbol() | Scalar():
            return node
        case Load(_, index):
            return rebuild(node, tuple(simplify(i) for i in index))
        case Call("where", (condition, a, b)):
            decided = simplify(condition)
            if isinstance(decided, Const):
                return simplify(a if decided.value else b)
            return rebuild(node, (decided, simplify(a), simplify(b)))
        case Call(op, args):
            if op in _COMPARISONS and all(a.dtype == "int" for a in args):
                border = _Border()
                difference = border.enter(args[0]) - border.enter(args[1])
                if difference.is_Integer:
                    return Const(bool(_COMPARISONS[op](difference)))
            return rebuild(node, tuple((_decider if OPERATORS[op].decides else simplify)(a) for a in args))
        case _:
            raise InternalError(f"simplify: unknown node {type(node).__name__}")


def _decider(node: Expr) -> Expr:
    """An operand of a comparison or floor, simplified unless it divides: x * (1 / 7) is not always x / 7."""
    divides = node.dtype == "float" and any(isinstance(n, Call) and n.op == "div" for n in nodes(node))
    return canonical(node) if divides else simplify(node)


# -- numbers ----------------------------------------------------------------------------------------------------------
class _Border:
    """Both directions of one crossing; remembers what its opaque symbols stand for."""

    def __init__(self) -> None:
        self._opaque: dict[str, sympy.Symbol] = {}
        self._meaning: dict[sympy.Symbol, Expr] = {}
        self._left: dict[tuple[sympy.Expr, str], Expr] = {}

    def _atom(self, node: Expr) -> sympy.Symbol:
        if node.text not in self._opaque:
            atom = sympy.Symbol(f"x{len(self._opaque)}")
            self._opaque[node.text] = atom
            self._meaning[atom] = node
        return self._opaque[node.text]

    # -- into sympy
    def enter(self, node: Expr) -> sympy.Expr:
        """`node`, an int or a float, as algebra of its own world."""
        match node:
            case Const(value):
                return self._number(value)
            case Symbol() | Scalar():
                return self._atom(node)
            case Load(_, index):
                return self._atom(rebuild(node, tuple(simplify(i) for i in index)))
            case Call("floor", (x,)):
                inner = _decider(x)
                return self.enter(inner) if inner.dtype == "int" else self._atom(call("floor", inner))
            case Call(op, args) if OPERATORS[op].makes_ints:
                return self._atom(rebuild(node, tuple(_decider(a) for a in args)))
            case Call("where", (condition, a, b)):
                return self._choice(simplify(condition), a, b, node.dtype)
            case Call("mul" | "div"):
                # all at once: a product of two with a number in it would be multiplied out, one of three would not
                return sympy.Mul(*self._factors(node, node.dtype))
            case Call(op, args):
                operands = [self._operand(a, node.dtype) for a in args]
                return _ARITHMETIC[op](*operands) if op in _ARITHMETIC else _function_of(OPERATORS[op])(*operands)
            case _:
                raise InternalError(f"simplify: unknown node {type(node).__name__}")

    def _operand(self, node: Expr, world: str) -> sympy.Expr:
        if node.dtype == world:
            return self.enter(node)
        inner = simplify(node)  # an int where a float is wanted
        return self.enter(inner) if isinstance(inner, Const) else self._atom(inner)

    def _number(self, value: float) -> sympy.Expr:
        if math.isinf(value):
            infinity = self._atom(Const(math.inf))
            return infinity if value > 0 else -infinity
        return sympy.Rational(repr(value))

    def _choice(self, condition: Expr, a: Expr, b: Expr, world: str) -> sympy.Expr:
        if isinstance(condition, Const):
            return self._operand(a if condition.value else b, world)
        return _Where(self._atom(condition), self._operand(a, world), self._operand(b, world))

    def _factors(self, node: Expr, world: str) -> list[sympy.Expr]:
        """The factors of a product, quotients included."""
        match node:
            case Call("mul", (a, b)) if node.dtype == world:
                return [*self._factors(a, world), *self._factors(b, world)]
            case Call("div", (a, b)) if world == "float":
                quotient = self._quotient_of_ints(a, b)
                if quotient is not None:
                    return [quotient]
                below = [self._atom(Const(0.0)) if f == 0 else f for f in self._factors(b, world)]
                return [*self._factors(a, world), *(1 / f for f in below)]
            case _:
                return [self._operand(node, world)]

    def _quotient_of_ints(self, a: Expr, b: Expr) -> sympy.Expr | None:
        """floor(q_pos / 49) must not become floor(q_pos * (1 / 49)): a quotient of ints stays as it is."""
        if a.dtype != "int" or b.dtype != "int":
            return None
        a, b = simplify(a), simplify(b)
        return None if isinstance(a, Const) and isinstance(b, Const) and b.value else self._atom(call("div", a, b))

    # -- out of sympy
    def leave(self, node: sympy.Expr, world: str) -> Expr:
        """`node` as a canonical expression of type `world`."""
        result = self._leave(node, world)
        return canonical(result if result.dtype == world else call("mul", 1.0, result))

    def _leave(self, node: sympy.Expr, world: str) -> Expr:
        if (node, world) not in self._left:
            self._left[node, world] = self._write(node, world)
        return self._left[node, world]

    def _write(self, node: sympy.Expr, world: str) -> Expr:
        if node.is_Rational:
            return _constant(node, world)
        if node.is_Symbol:
            return self._meaning[node]
        if node.is_Add:
            return self._sum(node, world)
        if node.is_Mul or node.is_Pow:
            return self._product(node, [], world)
        if isinstance(node, _Function):
            return call(node.op, *(self._leave(a, world) for a in node.args))
        raise InternalError(f"simplify: sympy gave back {type(node).__name__}, which the language lacks: {node}")

    def _sum(self, node: sympy.Expr, world: str) -> Expr:
        """Terms with common factors taken out; positive terms first, then the others subtracted."""
        common = _common_factor(node.args)
        if common != 1:
            return self._product(common, [sympy.Add(*(term / common for term in node.args))], world)
        signed = [(term, term.as_coeff_Mul()[0] < 0) for term in node.args]
        plus = _ordered(self._leave(term, world) for term, negative in signed if not negative)
        minus = _ordered(self._leave(-term, world) for term, negative in signed if negative)
        if not plus:
            return call("neg", _chain("add", minus, world))
        return _chain("sub", [_chain("add", plus, world), *minus], world)

    def _product(self, node: sympy.Expr, more: list[sympy.Expr], world: str) -> Expr:
        """coefficient * factors / divisors: what the whole tile shares first, divided once, then the rest."""
        coefficient, powers = _primitive(node)
        factors = [self._power(base, power, world) for base, power in powers.items() if power > 0]
        factors = _ordered([*factors, *(self._leave(m, world) for m in more)])
        divisors = _ordered(self._power(base, -power, world) for base, power in powers.items() if power < 0)
        size = [] if abs(coefficient) == 1 else [_constant(coefficient, world)]
        result = None
        for shared in (True, False):
            above = [f for f in factors if _is_shared(f) == shared]
            below = [d for d in divisors if _is_shared(d) == shared]
            above = [*(size if shared else []), *([] if result is None else [result]), *above]
            if below:
                result = call("div", _chain("mul", above, world) if above else 1.0, _chain("mul", below, world))
            elif above:
                result = _chain("mul", above, world)
        assert result is not None
        if coefficient != -1:
            return result
        negative = call("neg", result)
        return simplify(negative) if result.dtype != world else negative  # ints in the float world: as they would enter

    def _power(self, base: sympy.Expr, power: sympy.Expr, world: str) -> Expr:
        """base ** power for a positive whole power, by squaring."""
        if not power.is_Integer:
            raise InternalError(f"simplify: sympy gave back the power {power}, which the language lacks")
        x = self._leave(base, world)
        if power == 1:
            return x
        half = self._power(base, power // 2, world)
        square = _chain("mul", [half, half], world)
        return _chain("mul", [square, x], world) if power % 2 else square


def _constant(value: sympy.Rational, world: str) -> Const:
    if world == "int":
        return Const(int(value))
    try:
        return Const(float(Fraction(int(value.p), int(value.q))))
    except OverflowError:
        return Const(math.copysign(math.inf, value.p))


def _chain(op: str, parts: Sequence[Expr], world: str) -> Expr:
    """parts[0] op parts[1] op ...; arithmetic of the float world is never done in ints, which might overflow."""
    result = parts[0]
    for part in parts[1:]:
        if world == "float" and result.dtype == part.dtype == "int":
            result = call("mul", 1.0, result)
        result = call(op, result, part)
    return result


def _common_factor(terms: Sequence[sympy.Expr]) -> sympy.Expr:
    """What every term can be divided by; a number only if all coefficients have that size."""
    split = [term.as_coeff_Mul() for term in terms]
    sizes = {abs(coefficient) for coefficient, _ in split}
    powers = [rest.as_powers_dict() if rest != 1 else {} for _, rest in split]
    factors = [sizes.pop()] if len(sizes) == 1 else []
    for base in powers[0]:
        exponents = [p.get(base, 0) for p in powers]
        if all(e > 0 for e in exponents):
            factors.append(base ** min(exponents))
        elif all(e < 0 for e in exponents):
            factors.append(base ** max(exponents))
    return sympy.Mul(*factors)


def _primitive(node: sympy.Expr) -> tuple[sympy.Rational, dict[sympy.Expr, sympy.Expr]]:
    """A product as its number and the powers of its factors, to which the common factors of a sum's terms belong."""
    coefficient, rest = node.as_coeff_Mul()
    powers: dict[sympy.Expr, sympy.Expr] = {}
    for base, power in (rest.as_powers_dict() if rest != 1 else {}).items():
        common = _common_factor(base.args) if base.is_Add and power.is_Integer else sympy.S.One
        if common != 1:
            base = sympy.Add(*(term / common for term in base.args))
            number, factors = _primitive(common)
            coefficient *= number**power
            for factor, times in factors.items():
                powers[factor] = powers.get(factor, 0) + times * power
        powers[base] = powers.get(base, 0) + power
    return coefficient, {base: power for base, power in powers.items() if power != 0}


def _spread(node: Expr) -> int:
    """0 if a whole tile shares the value, 1 if a row or column does, 2 if each pair has its own."""
    names = symbols(node)
    return 2 if names & {"qk", "score"} else len(names & {"q_pos", "kv_pos"})


def _is_shared(node: Expr) -> bool:
    return _spread(node) == 0


def _ordered(parts: Iterable[Expr]) -> list[Expr]:
    return sorted(parts, key=lambda p: (isinstance(p, Const), _spread(p), p.text))
