"""Integer expressions as sums of products, so that equal ones look equal and simple inequalities can be proven.

`simplified(e)` is `Sum.of(e).expr`; `never_negative(e)` proves `e >= 0` for all run-time values or says False. Nothing
depends on a proof for its soundness: proofs only remove code that could never matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ....ir.expr import Call, Const, Expr, Symbol, _result
from ....ir.operators import OPERATORS, Number
from ....ir.walk import children, rebuild

Key = tuple[str, ...]  # texts of the factors of a product, sorted; () for the constant
Term = tuple[int, tuple[Expr, ...]]  # coefficient and factors

_POSITIONS = ("q_pos", "kv_pos", "q_first", "q_last", "kv_first", "kv_last")
_AT_LEAST = {  # what every call guarantees about a symbol; q positions may be negative
    "kv_pos": 0, "kv_first": 0, "kv_last": 0, "q_len": 0, "kv_len": 0, "head": 0, "kv_head": 0, "batch": 0,
    "group": 1, "head_dim": 1, "_q_span": 0, "_kv_span": 0,
    # names in a tile program, before their number
    "_block": 1, "_length": 0, "_begin": 0, "_end": 0, "_full_begin": 0, "_full_end": 0, "_lo": 0, "_hi": 0,
    "_full_lo": 0, "_full_hi": 0,
}  # fmt: skip
_PROOF_STEPS = 128
_KNOWN: dict[tuple[str, str], bool] = {}  # proofs tried, by text
_LONGEST_PROOF = 300  # characters; longer expressions are not worth the time
_MOST_KNOWN = 10_000


def make(op: str, *args: Expr) -> Expr:
    """Operator `op` on nodes, without a source line: what the compiler writes."""
    return Call(op, args, _result(OPERATORS[op], args, ""))


def is_bool(node: Expr, value: bool) -> bool:
    """Whether a node is the constant True, or the constant False."""
    return isinstance(node, Const) and node.value is value


def const(value: Number) -> Const:
    return Const(value)


def name(text: str) -> Symbol:
    """An integer symbol of the compiler's own."""
    return Symbol(text, "int")


@dataclass(frozen=True)
class Sum:
    """Integer coefficients times products of atoms; an atom is any other integer expression, itself simplified."""

    terms: Mapping[Key, Term]

    @staticmethod
    def of(node: Expr) -> Sum:
        if not isinstance(node, Call):
            return Sum._taken_apart(node)
        known = _SUMS.get(id(node))
        if known is None or known[0] is not node:
            if len(_SUMS) >= _MOST_KNOWN:
                _SUMS.clear()
            known = _SUMS[id(node)] = (node, Sum._taken_apart(node))
        return known[1]

    @staticmethod
    def _taken_apart(node: Expr) -> Sum:
        match node:
            case Const(value):
                return Sum.constant(int(value))
            case Call("add", (a, b)):
                return Sum.of(a) + Sum.of(b)
            case Call("sub", (a, b)):
                return Sum.of(a) - Sum.of(b)
            case Call("neg", (a,)):
                return Sum.of(a).scaled(-1)
            case Call("mul", (a, b)):
                return Sum.of(a) * Sum.of(b)
            case Call("floordiv", (a, b)):
                return _quotient(Sum.of(a), Sum.of(b))
            case Call("mod", (a, b)):
                return _remainder(Sum.of(a), Sum.of(b))
            case _:
                after = tuple(Sum.of(c).expr if c.dtype == "int" else c for c in children(node))
                same = all(a.text == b.text for a, b in zip(after, children(node)))
                return Sum.atom(node if same else rebuild(node, after))

    @staticmethod
    def constant(value: int) -> Sum:
        return Sum({(): (value, ())} if value else {})

    @staticmethod
    def atom(node: Expr) -> Sum:
        """`node` as one factor."""
        return Sum({(node.text,): (1, (node,))})

    def __add__(self, other: Sum) -> Sum:
        terms = dict(self.terms)
        for key, (coefficient, factors) in other.terms.items():
            total = coefficient + (terms[key][0] if key in terms else 0)
            if total:
                terms[key] = (total, factors)
            else:
                del terms[key]
        return Sum(terms)

    def __sub__(self, other: Sum) -> Sum:
        return self + other.scaled(-1)

    def __mul__(self, other: Sum) -> Sum:
        return _collected((a * b, f + g) for a, f in self.terms.values() for b, g in other.terms.values())

    def scaled(self, by: int) -> Sum:
        return Sum({k: (c * by, f) for k, (c, f) in self.terms.items()} if by else {})

    def shifted(self, by: int) -> Sum:
        return self + Sum.constant(by)

    @property
    def value(self) -> int | None:
        """The number it is, when it is one."""
        if not self.terms:
            return 0
        return self.terms[()][0] if set(self.terms) == {()} else None

    @cached_property
    def expr(self) -> Expr:
        """An expression that reads well: positions first, what is subtracted later, the number last."""
        terms = [self.terms[k] for k in sorted(self.terms, key=lambda k: _rank(k, self.terms[k][0]))]
        if not terms:
            return const(0)
        if terms[0][0] < 0 < terms[-1][0]:  # 5 - x rather than -x + 5
            terms = [terms[-1], *terms[:-1]]
        (coefficient, factors), rest = terms[0], terms[1:]
        result = _product(coefficient, factors)
        for coefficient, factors in rest:
            result = make("add" if coefficient > 0 else "sub", result, _product(abs(coefficient), factors))
        return result

    @property
    def text(self) -> str:
        return self.expr.text


def simplified(node: Expr) -> Expr:
    """An equal integer expression with like terms collected."""
    return Sum.of(node).expr


def plus(node: Expr, by: int) -> Expr:
    return Sum.of(node).shifted(by).expr


def difference(a: Expr, b: Expr) -> Expr:
    return (Sum.of(a) - Sum.of(b)).expr


def _rank(key: Key, coefficient: int) -> tuple[int, bool, Key]:
    """Where a term stands: what is added, what is subtracted, the number; positions before other names."""
    group = 2 if not key else 0 if coefficient > 0 else 1
    return (group, not set(key) & set(_POSITIONS), key)


def _collected(terms: Iterable[Term]) -> Sum:
    found: dict[Key, Term] = {}
    for coefficient, factors in terms:
        ordered = tuple(sorted(factors, key=lambda f: f.text))
        key = tuple(f.text for f in ordered)
        found[key] = (found.get(key, (0, ()))[0] + coefficient, ordered)
    return Sum({k: t for k, t in found.items() if t[0]})


def _product(coefficient: int, factors: tuple[Expr, ...]) -> Expr:
    if not factors:
        return const(coefficient)
    result = factors[0]
    for factor in factors[1:]:
        result = make("mul", result, factor)
    if coefficient == -1:
        return make("neg", result)
    return result if coefficient == 1 else make("mul", const(coefficient), result)


def _quotient(a: Sum, b: Sum) -> Sum:
    """(k*d*x + r) // d = k*x + r // d for a number d; the divisor is made positive."""
    d = b.value
    if d is None or d == 0:
        return Sum.atom(make("floordiv", a.expr, b.expr))
    if d < 0:
        return _quotient(a.scaled(-1), Sum.constant(-d))
    whole = Sum({k: (c // d, f) for k, (c, f) in a.terms.items() if c % d == 0 or (k == () and c // d)})
    rest = a - whole.scaled(d)
    number = rest.value
    if number is not None:
        return whole.shifted(number // d)
    return whole + Sum.atom(make("floordiv", rest.expr, const(d)))


def _remainder(a: Sum, b: Sum) -> Sum:
    """(k*d*x + r) % d = r % d for a number d; x % -d = -(-x % d)."""
    d = b.value
    if d is None or d == 0:
        return Sum.atom(make("mod", a.expr, b.expr))
    if d < 0:
        return _remainder(a.scaled(-1), Sum.constant(-d)).scaled(-1)
    rest = Sum({k: (c % d, f) for k, (c, f) in a.terms.items() if c % d})
    number = rest.value
    if number is not None:
        return Sum.constant(number % d)
    if rest.terms != a.terms:
        return Sum.of(make("mod", rest.expr, const(d)))
    return Sum.atom(make("mod", a.expr, const(d)))


# -- choices ----------------------------------------------------------------------------------------------------------
def minimum(*items: Expr) -> Expr:
    return extremum("minimum", items)


def maximum(*items: Expr) -> Expr:
    return extremum("maximum", items)


def extremum(op: str, items: Iterable[Expr]) -> Expr:
    """min or max of the items, without those that never decide it."""
    kept: list[Expr] = []
    for item in _flat(op, items):
        if any(_decides(op, k, item) for k in kept):
            continue
        kept = [*(k for k in kept if not _decides(op, item, k)), item]
    result = kept[0]
    for item in kept[1:]:
        result = make(op, result, item)
    return result


def _flat(op: str, items: Iterable[Expr]) -> list[Expr]:
    flat: list[Expr] = []
    for item in items:
        flat += _flat(op, item.args) if isinstance(item, Call) and item.op == op else [item]
    return flat


def _decides(op: str, winner: Expr, other: Expr) -> bool:
    low, high = (winner, other) if op == "minimum" else (other, winner)
    return at_most(low, high)


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """where(condition, a, b), or one of them where that is all it can be."""
    if isinstance(condition, Const):
        return a if condition.value else b
    return a if a.text == b.text else make("where", condition, a, b)


def all_of(conditions: Iterable[Expr]) -> Expr:
    """Conjunction of bool expressions; Const(True) for none."""
    found: dict[str, Expr] = {}
    for condition in conditions:
        if isinstance(condition, Const):
            if not condition.value:
                return const(False)
        else:
            found.setdefault(condition.text, condition)
    result: Expr = const(True)
    for n, condition in enumerate(found.values()):
        result = make("and", result, condition) if n else condition
    return result


def not_above(a: Expr, b: Expr) -> Expr:
    """The condition a <= b, or the constant it always is; written with like terms on one side."""
    if at_most(a, b):
        return const(True)
    if at_most(plus(b, 1), a):
        return const(False)
    gap = Sum.of(b) - Sum.of(a)
    left = Sum({k: (-c, f) for k, (c, f) in gap.terms.items() if c < 0})
    right = Sum({k: t for k, t in gap.terms.items() if t[0] > 0})
    if left.terms.get((), (0,))[0] == 1:  # x + 1 <= y reads better as x < y
        return make("lt", left.shifted(-1).expr, right.expr)
    return make("le", left.expr, right.expr)


_SUMS: dict[int, tuple[Expr, Sum]] = {}  # by identity of the node, which is kept alive here


# -- proofs -----------------------------------------------------------------------------------------------------------
def at_most(a: Expr, b: Expr) -> bool:
    """Whether a <= b is certain for all run-time values."""
    key = (a.text, b.text)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        short = len(a.text) + len(b.text) <= _LONGEST_PROOF
        _KNOWN[key] = a.text == b.text or (short and never_negative(Sum.of(b) - Sum.of(a)))
    return _KNOWN[key]


def is_positive(node: Expr) -> bool:
    return never_negative(Sum.of(node).shifted(-1))


def never_negative(total: Sum) -> bool:
    """Whether the sum is certainly >= 0."""
    return _proven(_by_span(total), [_PROOF_STEPS])


def _by_span(total: Sum) -> Sum:
    """A tile's last position written as its first plus a span that is not negative."""
    for axis in ("q", "kv"):
        last = f"{axis}_last"
        if any(last in key for key in total.terms):
            total = _replaced(total, {last: Sum.of(name(f"{axis}_first")) + Sum.of(name(f"_{axis}_span"))})
    return total


def _replaced(total: Sum, mapping: Mapping[str, Sum]) -> Sum:
    """Factors replaced by sums, by their text."""
    result = Sum({k: t for k, t in total.terms.items() if not any(text in mapping for text in k)})
    for key, (coefficient, factors) in total.terms.items():
        if any(text in mapping for text in key):
            part = Sum.constant(coefficient)
            for factor in factors:
                part = part * (mapping.get(factor.text) or Sum.atom(factor))
            result = result + part
    return result


def _proven(total: Sum, steps: list[int]) -> bool:
    steps[0] -= 1
    if steps[0] < 0:
        return False
    total = _without_quotient_pairs(total, steps)
    if _lower(total, steps) >= 0:
        return True
    choices = [
        (factors[0], coefficient)
        for coefficient, factors in total.terms.values()
        if len(factors) == 1 and isinstance(factors[0], Call) and factors[0].op in ("minimum", "maximum", "where")
    ]
    if not choices:
        return False
    # Choices that need a proof of every branch go first: each branch may then pick its own winner of the others.
    atom, coefficient = min(choices, key=lambda c: _one_branch_is_enough(*c))
    return _by_cases(total, atom, coefficient, steps)


def _one_branch_is_enough(atom: Call, coefficient: int) -> bool:
    return atom.op != "where" and (atom.op == "maximum") == (coefficient > 0)


def _by_cases(total: Sum, atom: Call, coefficient: int, steps: list[int]) -> bool:
    if atom.op == "where":
        cases = [_taken(total, atom.args[0].text, branch) for branch in (1, 2)]
        return all(_proven(_by_span(c), steps) for c in cases)
    rest = total + Sum({(atom.text,): (-coefficient, (atom,))})
    cases = [_by_span(rest + Sum.of(a).scaled(coefficient)) for a in atom.args]
    # max >= each of its arguments, so one proof is enough where it is added; a min that is added needs both.
    enough = any if _one_branch_is_enough(atom, coefficient) else all
    return enough(_proven(c, steps) for c in cases)


def _taken(total: Sum, condition: str, branch: int) -> Sum:
    wheres = {
        f.text: Sum.of(f.args[branch])
        for _, factors in total.terms.values()
        for f in factors
        if isinstance(f, Call) and f.op == "where" and f.args[0].text == condition
    }
    return _replaced(total, wheres)


def _lower(total: Sum, steps: list[int]) -> float:
    """A lower bound from what is known of every factor; -inf where nothing is known."""
    bound = 0.0
    for coefficient, factors in total.terms.values():
        if not factors:
            bound += coefficient
            continue
        product = 1
        for factor in factors:
            least = _at_least(factor, steps)
            if least < 0:
                return float("-inf")
            product *= least
        if coefficient < 0:
            return float("-inf")
        bound += coefficient * product
    return bound


def _at_least(atom: Expr, steps: list[int]) -> int:
    """0 or 1 where the atom is surely at least that, else -1."""
    match atom:
        case Symbol(text):
            return _AT_LEAST.get(text.rstrip("0123456789"), -1)
        case Call("abs"):
            return 0
        case Call("mod", (_, d)):
            return 0 if _proven(_by_span(Sum.of(d)).shifted(-1), steps) else -1
        case Call("floordiv", (a, d)):
            fine = _proven(_by_span(Sum.of(d)).shifted(-1), steps) and _proven(_by_span(Sum.of(a)), steps)
            return 0 if fine else -1
        case Call("minimum" | "maximum" | "where" as op, args):
            parts = (_proven(_by_span(Sum.of(a)), steps) for a in args[-2:])
            return 0 if (any(parts) if op == "maximum" else all(parts)) else -1
        case _:
            return -1


def _without_quotient_pairs(total: Sum, steps: list[int]) -> Sum:
    """c * (x // d) - c * (y // d) >= 0 where x >= y and d > 0, so such pairs may be dropped."""
    for key, (coefficient, factors) in list(total.terms.items()):
        if coefficient >= 0 or not _quotients(factors):
            continue
        for other, (paired, others) in list(total.terms.items()):
            if paired >= -coefficient and len(others) == len(factors) and _not_less(others, factors, steps):
                rest = {k: t for k, t in total.terms.items() if k not in (key, other)}
                if paired + coefficient:
                    rest[other] = (paired + coefficient, others)
                return _without_quotient_pairs(Sum(rest), steps)
    return total


def _quotients(factors: tuple[Expr, ...]) -> list[Call]:
    return [f for f in factors if isinstance(f, Call) and f.op == "floordiv"]


def _not_less(large: tuple[Expr, ...], small: tuple[Expr, ...], steps: list[int]) -> bool:
    """Products that differ in one quotient by the same divisor, the larger numerator in `large`."""
    a = [f for f in large if f.text not in {s.text for s in small}]
    b = [f for f in small if f.text not in {s.text for s in large}]
    if len(a) != 1 or len(b) != 1 or not _quotients((a[0],)) or not _quotients((b[0],)):
        return False
    (x, d), (y, e) = a[0].args, b[0].args  # type: ignore[union-attr]
    shared = [f for f in large if f is not a[0]]
    if d.text != e.text or any(_at_least(f, steps) < 0 and f.text != d.text for f in shared):
        return False
    # d * (x // d): a positive divisor is proven here; a run-time one is assumed by whoever wrote the quotient.
    return _proven(_by_span(Sum.of(d)).shifted(-1), steps) and _proven(_by_span(Sum.of(x) - Sum.of(y)), steps)
