"""Sums of products of named integers, and linear facts about their products.

A product of names is a name of its own to the solver, so that all it sees is linear. What it must know of products for
the arithmetic of tiles is written out: `c * u` against `c * v` by the order of u and v and the sign of c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import z3

Product = tuple[str, ...]  # names, sorted; () for the constant
MOST_PAIRS = 400  # pairs of products compared; more would cost more than they help


@dataclass(frozen=True)
class Polynomial:
    """Integer coefficients by product."""

    terms: Mapping[Product, int]

    @staticmethod
    def number(value: int) -> Polynomial:
        return Polynomial({(): value} if value else {})

    @staticmethod
    def of_name(name: str) -> Polynomial:
        return Polynomial({(name,): 1})

    @property
    def value(self) -> int | None:
        """The number it is, when it is one."""
        if not self.terms:
            return 0
        return self.terms[()] if set(self.terms) == {()} else None

    @cached_property
    def key(self) -> tuple[tuple[Product, int], ...]:
        return tuple(sorted(self.terms.items()))

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for product, coefficient in other.terms.items():
            terms[product] = terms.get(product, 0) + coefficient
        return Polynomial({p: c for p, c in terms.items() if c})

    def __neg__(self) -> Polynomial:
        return Polynomial({p: -c for p, c in self.terms.items()})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Product, int] = {}
        for p, a in self.terms.items():
            for q, b in other.terms.items():
                product = tuple(sorted(p + q))
                terms[product] = terms.get(product, 0) + a * b
        return Polynomial({p: c for p, c in terms.items() if c})


@dataclass(frozen=True)
class Choice:
    """A name that equals one of two polynomials."""

    condition: z3.BoolRef
    yes: Polynomial
    no: Polynomial


class Products:
    """The products that a question speaks of, as names of the solver."""

    def __init__(self) -> None:
        self.seen: dict[Product, z3.ArithRef] = {}

    def term(self, polynomial: Polynomial) -> z3.ArithRef:
        """The polynomial as a linear term of the solver."""
        parts = [c * self._name(p) if p else z3.IntVal(c) for p, c in polynomial.key]
        return z3.Sum(parts) if len(parts) > 1 else parts[0] if parts else z3.IntVal(0)

    def _name(self, product: Product) -> z3.ArithRef:
        if len(product) == 1:
            return z3.Int(product[0])
        if product not in self.seen:
            self.seen[product] = z3.Int("*".join(product))
        return self.seen[product]

    def exact(self) -> list[z3.BoolRef]:
        """What products are: not linear."""
        return [term == z3.Product([z3.Int(n) for n in product]) for product, term in self.seen.items()]

    # -- linear facts -------------------------------------------------------------------------------------------------
    def facts(self, choices: Mapping[str, Choice], scaled: Iterable[tuple[Polynomial, Polynomial]]) -> list[z3.BoolRef]:
        """True statements about the products, linear in their names.

        choices: what names with two cases are. scaled: (c, p) where what is known of p is wanted for c * p too.
        """
        found = [fact for c, p in scaled for fact in self._scaled(c, p)]
        found += [fact for product in list(self.seen) for fact in self._by_cases(product, choices)]
        found += [fact for product in list(self.seen) for fact in self._against_zero(product)]
        pairs = [pair for pair in combinations(self.seen, 2) if _shared(*pair)]
        found += [fact for a, b in pairs[:MOST_PAIRS] for fact in self._compared(a, b)]
        return found

    def _scaled(self, factor: Polynomial, p: Polynomial) -> Iterator[z3.BoolRef]:
        """c * p has the sign of both, and is as far from 0 as c where p is not 0."""
        c, sign, term = self.term(factor), self.term(p), self.term(factor * p)
        yield z3.Implies(sign == 0, term == 0)
        for size, scaled in ((c, term), (-c, -term)):
            yield z3.Implies(z3.And(size > 0, sign > 0), scaled >= size)
            yield z3.Implies(z3.And(size > 0, sign < 0), scaled <= -size)

    def _by_cases(self, product: Product, choices: Mapping[str, Choice]) -> Iterator[z3.BoolRef]:
        """c * min(a, b) is c * a or c * b, whichever min(a, b) is."""
        for name in set(product) & choices.keys():
            choice, rest = choices[name], Polynomial({_without(product, name): 1})
            term = self.term(Polynomial({product: 1}))
            yield z3.If(choice.condition, term == self.term(rest * choice.yes), term == self.term(rest * choice.no))

    def _against_zero(self, product: Product) -> Iterator[z3.BoolRef]:
        """The sign of c * u, and that it is as far from 0 as c where u is not 0."""
        for name in sorted(set(product)):
            rest = _without(product, name)
            c, u, term = self.term(Polynomial({rest: 1})), z3.Int(name), self.seen[product]
            yield z3.Implies(z3.Or(c == 0, u == 0), term == 0)
            for sign, bound in ((1, c), (-1, -c)):
                yield z3.Implies(z3.And(sign * c > 0, u > 0), sign * term >= bound)
                yield z3.Implies(z3.And(sign * c > 0, u < 0), sign * term <= -bound)
            yield z3.Implies(u == 1, term == c)
            yield z3.Implies(u == -1, term == -c)

    def _compared(self, a: Product, b: Product) -> Iterator[z3.BoolRef]:
        """c * u and c * v lie at least c apart where u and v differ."""
        for shared, x, y in _shared(a, b):
            c = self.term(Polynomial({shared: 1}))
            u, v = self.term(Polynomial({x: 1})), self.term(Polynomial({y: 1}))
            cu, cv = self.seen[a], self.seen[b]
            yield z3.Implies(u == v, cu == cv)
            for sign in (1, -1):
                positive, size = sign * c > 0, sign * c
                yield z3.Implies(z3.And(positive, u > v), sign * cu >= sign * cv + size)
                yield z3.Implies(z3.And(positive, u < v), sign * cu + size <= sign * cv)


def _without(product: Product, name: str) -> Product:
    place = product.index(name)
    return product[:place] + product[place + 1 :]


def _shared(a: Product, b: Product) -> list[tuple[Product, Product, Product]]:
    """(c, u, v) where the products are c * u and c * v, with one name more in each."""
    if len(a) != len(b):
        return []
    found = []
    for name in set(a):
        rest = _without(a, name)
        other = list(b)
        for n in rest:
            if n not in other:
                break
            other.remove(n)
        else:
            found.append((rest, (name,), tuple(other)))
    return found
