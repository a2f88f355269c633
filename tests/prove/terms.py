"""Expressions of the language as terms of the solver, at one choice of values for symbols and operands.

Ints have any size here (widths.py asks what fits). `//` and `%` round towards minus infinity; by 0 they give anything
in a tile program, as on a GPU, while a call with such a divisor in its mask is refused. Reads of tensors are
uninterpreted functions of their indices. What computes with floats is opaque: a number or a condition that may be
anything, the same wherever it is written the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import z3

from weft.codegen import function_lines
from weft.ir.canonical import canonical
from weft.ir.expr import Call, Const, Expr, Load, Scalar, Symbol, symbol
from weft.ir.operators import OPERATORS
from weft.ir.walk import children, nodes, substitute

from .polynomials import Choice, Polynomial, Products

MOST_SCALED = 40  # comparisons that are scaled by a divisor
INT31, INT32, INT64 = 2**30, 2**31, 2**63
_COMPARISONS = {"lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__", "eq": "__eq__", "ne": "__ne__"}


@dataclass
class Terms:
    """Turns expressions into terms, and collects what is known of the names that it makes on the way.

    trusted: texts of reads that the mask computes with, which a call promises to be below 2**30 in size.
    """

    trusted: frozenset[str] = frozenset()
    known: list[z3.BoolRef] = field(default_factory=list)  # what the names are
    products: Products = field(default_factory=Products)
    choices: dict[str, Choice] = field(default_factory=dict)
    divisors: dict[str, Polynomial] = field(default_factory=dict)  # of quotients by what is no number
    compared: list[Polynomial] = field(default_factory=list)  # differences whose signs were asked for
    opaque: dict[str, z3.ExprRef] = field(default_factory=dict)  # by text
    reads: dict[str, tuple[Load, list[Polynomial], z3.ExprRef]] = field(default_factory=dict)  # by name
    _made: dict[object, str] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # terms whose ids are keys

    def scalar(self, node: Scalar) -> Polynomial:
        return self._ranged(f"arg {node.name}", -INT32 + 1, INT32 - 1)

    def _ranged(self, name: str, low: int, high: int) -> Polynomial:
        if name not in self._made:
            self._made[name] = name
            self.known += [z3.Int(name) >= low, z3.Int(name) <= high]
        return Polynomial.of_name(name)

    def term(self, value: Polynomial) -> z3.ArithRef:
        return self.products.term(value)

    def numbers(self) -> list[str]:
        """Names that are free: symbols, scalars and what was read."""
        known = {"q_len", "kv_len", "q_offset", "q_pos", "kv_pos", "start", "block", "head", "batch", "group"}
        return sorted(known | {name for name in self._made.values() if name.startswith("arg ")} | self.reads.keys())

    def everything(self, exact: bool) -> list[z3.BoolRef]:
        """All that is known; `exact` adds what products are, which is not linear."""
        facts = self.products.facts(self.choices, self._scaled())
        return [*self.known, *facts, *(self.products.exact() if exact else [])]

    def _scaled(self) -> list[tuple[Polynomial, Polynomial]]:
        """Comparisons with a quotient by what is no number, times its divisor: `x // d < e` speaks of `x < d * e`."""
        found = {}
        for p in self.compared:
            inside = {n for product in p.terms for n in product} & self.divisors.keys()
            found |= {(self.divisors[n].key, p.key): (self.divisors[n], p) for n in sorted(inside)}
        return [found[key] for key in sorted(found)][:MOST_SCALED]

    # -- what is made once for equal operands -------------------------------------------------------------------------
    def chosen(self, condition: z3.BoolRef, yes: Polynomial, no: Polynomial) -> Polynomial:
        if z3.is_true(condition) or yes.key == no.key:
            return yes
        if z3.is_false(condition):
            return no
        key = ("choice", condition.get_id(), yes.key, no.key)
        if key not in self._made:
            name = self._made[key] = f"choice {len(self._made)}"
            self._kept.append(condition)
            self.choices[name] = Choice(condition, yes, no)
            self.known.append(z3.Int(name) == z3.If(condition, self.term(yes), self.term(no)))
        return Polynomial.of_name(self._made[key])

    def extremum(self, least: bool, a: Polynomial, b: Polynomial) -> Polynomial:
        value = (a - b).value
        if value is not None:
            return a if (value <= 0) == least else b
        first, second = sorted((a, b), key=lambda p: p.key)
        condition = self.term(first) <= self.term(second)
        return self.chosen(condition, first, second) if least else self.chosen(condition, second, first)

    def quotient(self, a: Polynomial, d: Polynomial) -> Polynomial:
        """a // d; anything where d is 0."""
        if d.value == 1:
            return a
        if d.value is not None and a.value is not None and d.value:
            return Polynomial.number(a.value // d.value)
        key = ("quotient", a.key, d.key)
        if key not in self._made:
            name = self._made[key] = f"quotient {len(self._made)}"
            if d.value is None:
                self.divisors[name] = d
            divisor, rest = self.term(d), self.term(a - d * Polynomial.of_name(name))
            self.known.append(z3.Implies(divisor > 0, z3.And(rest >= 0, rest < divisor)))
            self.known.append(z3.Implies(divisor < 0, z3.And(rest <= 0, rest > divisor)))
        return Polynomial.of_name(self._made[key])

    def remainder(self, a: Polynomial, d: Polynomial) -> Polynomial:
        return a - d * self.quotient(a, d)


@dataclass
class Reader:
    """Terms of expressions at given values of symbols.

    values: polynomials and conditions by the name of a symbol. renamed: symbols by which a tile program calls what the
    mask calls otherwise, for texts of what is opaque. bounded: ints read from tensors are cut (`read_limits`) where
    they are computed with, as tile programs of GPU kernels do.
    """

    terms: Terms
    values: Mapping[str, Polynomial | z3.BoolRef]
    renamed: Mapping[str, str] = field(default_factory=dict)
    bounded: bool = False
    divisors: list[Polynomial] = field(default_factory=list)  # of `//` and `%` that were read
    indices: list[Polynomial] = field(default_factory=list)  # of tensors
    computed: list[Polynomial] = field(default_factory=list)  # results of the arithmetic that was read
    _read: dict[tuple[int, bool], tuple[Expr, Polynomial | z3.BoolRef]] = field(default_factory=dict)

    def integer(self, node: Expr, compared: bool = False) -> Polynomial:
        """compared: the value goes into a comparison, with no arithmetic between."""
        key = (id(node), compared)
        if key not in self._read:
            self._read[key] = (node, self._integer(node, compared))
        return self._read[key][1]  # type: ignore[return-value]

    def _integer(self, node: Expr, compared: bool) -> Polynomial:
        match node:
            case Const(value):
                return Polynomial.number(int(value))
            case Symbol(name):
                return self.values[name]  # type: ignore[return-value]
            case Scalar():
                return self.terms.scalar(node)
            case Load():
                return self._load(node, compared)
            case Call("where", (condition, a, b)):
                return self.terms.chosen(self.truth(condition), self.integer(a, compared), self.integer(b, compared))
            case Call("minimum" | "maximum" as op, (a, b)):
                return self.terms.extremum(op == "minimum", self.integer(a, compared), self.integer(b, compared))
            case Call(op) if OPERATORS[op].makes_ints:
                return self._opaque_integer(node)
            case Call(op, args):
                if op in ("floordiv", "mod"):
                    self.divisors += [self.integer(d) for d in branches(args[1])]
                result = self._arithmetic(op, [self.integer(a) for a in args])
                self.computed.append(result)
                return result
            case _:
                raise TypeError(f"no integer: {node}")

    def _arithmetic(self, op: str, args: list[Polynomial]) -> Polynomial:
        match op, args:
            case "add", [a, b]:
                return a + b
            case "sub", [a, b]:
                return a - b
            case "mul", [a, b]:
                return a * b
            case "neg", [a]:
                return -a
            case "abs", [a]:
                return self.terms.extremum(False, a, -a)
            case "floordiv" | "mod", [a, b]:
                return self.terms.quotient(a, b) if op == "floordiv" else self.terms.remainder(a, b)
            case _:
                raise TypeError(f"no arithmetic of ints: {op}")

    # -- conditions ---------------------------------------------------------------------------------------------------
    def truth(self, node: Expr) -> z3.BoolRef:
        key = (id(node), False)
        if key not in self._read:
            self._read[key] = (node, self._truth(node))
        return self._read[key][1]  # type: ignore[return-value]

    def _truth(self, node: Expr) -> z3.BoolRef:
        match node:
            case Const(value):
                return z3.BoolVal(bool(value))
            case Symbol(name):
                return self.values[name]  # type: ignore[return-value]
            case Load():
                return self._load_of_bools(node)
            case Call("not", (a,)):
                return z3.Not(self.truth(a))
            case Call("and", (a, b)):
                return z3.And(self.truth(a), self.truth(b))
            case Call("or", (a, b)):
                return z3.Or(self.truth(a), self.truth(b))
            case Call("xor" | "eq" | "ne" as op, (a, b)) if a.dtype == "bool":
                same = self.truth(a) == self.truth(b)
                return same if op == "eq" else z3.Not(same)
            case Call("where", (condition, a, b)):
                return z3.If(self.truth(condition), self.truth(a), self.truth(b))
            case Call(op, (a, b)) if {a.dtype, b.dtype} == {"int"}:
                difference = self.integer(a, True) - self.integer(b, True)
                self.terms.compared.append(difference)
                return getattr(self.terms.term(difference), _COMPARISONS[op])(0)
            case Call():
                return self._opaque(node, z3.Bool)  # type: ignore[return-value]
            case _:
                raise TypeError(f"no condition: {node}")

    # -- what has no rule ---------------------------------------------------------------------------------------------
    def _opaque(self, node: Expr, sort: object) -> z3.ExprRef:
        text = canonical(substitute(node, {k: symbol(v) for k, v in self.renamed.items()})).text
        if text not in self.terms.opaque:
            self.terms.opaque[text] = sort(f"opaque {text}")  # type: ignore[operator]
        return self.terms.opaque[text]

    def _opaque_integer(self, node: Expr) -> Polynomial:
        name = str(self._opaque(node, z3.Int))
        limit = INT31 if name.removeprefix("opaque ") in self.terms.trusted else INT32
        return self.terms._ranged(name, -limit + 1, limit - 1)

    def _function(self, node: Load, sort: z3.SortRef) -> tuple[z3.ExprRef, list[Polynomial]]:
        index = [self.integer(i) for i in node.index]
        self.indices += index
        read = z3.Function(f"read {node.tensor.name}", *[z3.IntSort()] * node.tensor.rank, sort)
        return read(*(self.terms.term(i) for i in index)), index

    def _load(self, node: Load, compared: bool) -> Polynomial:
        read, index = self._function(node, z3.IntSort())
        name = f"{node.tensor.name} at {[i.key for i in index]}"
        trusted = node.text in self.terms.trusted
        if name not in self.terms.reads:
            self.terms.reads[name] = (node, index, read)
            self.terms.known.append(z3.Int(name) == read)
        self.terms._ranged(name, -INT64, INT64 - 1)
        value = Polynomial.of_name(name)
        if trusted:
            self.terms.known.append(z3.And(z3.Int(name) > -INT31, z3.Int(name) < INT31))
        if trusted or compared or not self.bounded:
            return value
        least, greatest = map(Polynomial.number, read_limits())
        return self.terms.extremum(True, self.terms.extremum(False, value, least), greatest)

    def _load_of_bools(self, node: Load) -> z3.BoolRef:
        read, index = self._function(node, z3.BoolSort())
        self.terms.reads.setdefault(f"{node.tensor.name} at {[i.key for i in index]}", (node, index, read))
        return read  # type: ignore[return-value]


@cache
def read_limits() -> tuple[int, int]:
    """Where tile programs of GPU kernels cut an int that they read from a tensor: as the printed helper has it."""
    found = [int(n) for n in re.findall(r"-?\d{6,}", function_lines.AS_BOUND)]
    if len(found) != 2:
        raise ValueError(f"as_bound is written otherwise: {function_lines.AS_BOUND}")
    return min(found), max(found)


def branches(divisor: Expr) -> list[Expr]:
    """What a divisor may be: a call is refused where either branch of a `where` is 0, whichever is taken."""
    match divisor:
        case Call("where", (_, a, b)):
            return [divisor, *branches(a), *branches(b)]
        case _:
            return [divisor]


def trusted_reads(root: Expr) -> frozenset[str]:
    """Texts of what is read or made of floats and then computed with: a call promises such ints to be below 2**30."""

    def visit(node: Expr, computed: bool) -> set[str]:
        if isinstance(node, Load):
            own = {node.text} if computed and node.dtype == "int" else set()
            return own.union(*(visit(i, False) for i in node.index))
        if not isinstance(node, Call):
            return set()
        operator = OPERATORS[node.op]
        own = {canonical(node).text} if computed and operator.makes_ints else set()
        inherits = operator.chooses
        inside = computed if inherits else node.dtype == "int" and not operator.makes_ints
        return own.union(*(visit(child, inside) for child in children(node)))

    return frozenset(visit(root, False))


def has_floats(root: Expr) -> bool:
    """Whether something of it is opaque."""
    return any(node.dtype == "float" for node in nodes(root))
