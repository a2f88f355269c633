"""Draws declarations: masks, scores and scales from the grammar of the language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from .calls import CACHED_RANKS, ON_A_GPU, Latent, Variant
from .tree import INFIX, PREFIX, SCORE, Kind, Node, Num, Op, Read, Scalar, Sym, nodes, size, symbols

Q, K, HEAD, BATCH = Sym("q_pos"), Sym("kv_pos"), Sym("head"), Sym("batch")
LENGTHS = (Sym("q_len"), Sym("kv_len"), Sym("head_dim"), Sym("group"))
INT_NAMES, FLOAT_NAMES = ("n", "m"), ("x", "y")
FLOAT_KINDS = (
    *("sum", "sum", "sum", "times", "times", "divide", "extreme", "extreme", "where", "where"),
    *("function", "function", "function", "guarded", "int", "neg", "uniform"),
)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LARGEST = 70  # nodes of an expression
CACHED_SHARE = {"triton": 0.02, "hopper": 0.06}  # of declarations of latent caches as models have them


def make(name: str, *args: Node) -> Op:
    """An operator with the kind that the language gives it."""
    kinds = {a.kind for a in (args[1:] if name == "where" else args)}
    if name in (*COMPARISONS, "and", "or", "xor", "not"):
        return Op(name, args, "bool")
    if name in ("floordiv", "mod", "floor"):
        return Op(name, args, "int")
    same: Kind = "bool" if kinds == {"bool"} else "int" if kinds == {"int"} else "float"
    return Op(
        name, args, same if name in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where") else "float"
    )


def number(value: float) -> Num:
    return Num(value)


def clamp(node: Node, low: int, high: int) -> Node:
    return make("minimum", make("maximum", node, Num(low)), Num(high))


@dataclass
class Drawer:
    """Draws expressions of one variant; remembers what it drew, so that parts occur again."""

    random: Random
    where: str  # "score", "mask", "scale"
    tensors: dict[str, tuple[Kind, tuple[Node, ...]]] = field(default_factory=dict)  # one index each, mostly
    drawn: dict[Kind, list[Node]] = field(default_factory=lambda: {"int": [], "float": [], "bool": []})
    uniform: bool = False  # only what is one number for the whole call

    def pick(self, *choices: object) -> object:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # -- leaves
    def constant(self, kind: Kind) -> Num:
        if kind == "int":
            return Num(self.random.choice((0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, -1, -3)))
        return Num(self.random.choice((0.5, 0.25, 2.0, 1.0, -1.0, 0.1, 0.3, -0.7, 1.5, 0.0, 3.7)))

    def scalar(self, kind: Kind) -> Scalar:
        return Scalar(self.random.choice(INT_NAMES if kind == "int" else FLOAT_NAMES), kind)

    def symbol(self) -> Sym:
        if self.uniform:
            return self.random.choice(LENGTHS)
        if self.where == "scale":
            return self.random.choice((HEAD, Sym("kv_head"), BATCH, *LENGTHS))
        return self.random.choice((Q, K, Q, K, Q, K, HEAD, Sym("kv_head"), BATCH, *LENGTHS))

    def read(self, kind: Kind) -> Node:
        """A read of a tensor operand, new or one that was read before, by the same index or another of its kind."""
        known = [n for n, (of, index) in self.tensors.items() if of == kind and self._may_read(index)]
        if known and self.chance(0.5):
            name = self.random.choice(known)
            index = self.tensors[name][1]
            if self.chance(0.5):
                index = tuple(self._other_index(i) for i in index)
            return Read(name, kind, index)
        rank = self.random.choice((1, 1, 1, 2, 2, 2, 3, 4))
        index = tuple(self.index() for _ in range(rank))
        name = f"{ {'float': 'w', 'int': 'doc', 'bool': 'flag'}[kind] }{len(self.tensors)}"
        self.tensors[name] = (kind, index)
        return Read(name, kind, index)

    def _may_read(self, index: tuple[Node, ...]) -> bool:
        """A scale reads nothing by position."""
        return self.where != "scale" or not any(symbols(i) & {"q_pos", "kv_pos"} for i in index)

    def _other_index(self, index: Node) -> Node:
        if index in (Q, K) and self.where != "scale":
            return K if index == Q else Q
        return self.index() if self.chance(0.3) else index

    def index(self) -> Node:
        """An int expression that Weft can prove to lie in a tensor."""
        if self.where == "scale" or self.chance(0.45):
            plain = (HEAD, Sym("kv_head"), BATCH, HEAD, BATCH, Num(0), make("mod", HEAD, Num(2)), Sym("group"))
            return self.random.choice(plain)
        position = self.random.choice((Q, K))
        kinds: Sequence[Callable[[], Node]] = (
            lambda: position, lambda: position, lambda: position,
            lambda: clamp(position, 0, self.random.choice((3, 20, 40))),
            lambda: make("floordiv", clamp(position, 0, 500), Num(self.random.choice((2, 5, 16)))),
            lambda: make("mod", position, Num(self.random.choice((2, 3, 7)))),
            lambda: make("abs", make("sub", Q, K)),
            lambda: clamp(make("sub", Q, K), 0, 12),
            lambda: clamp(Drawer(self.random, "mask", self.tensors).ints(2), 0, self.random.choice((1, 4, 9))),
            lambda: make("add", position, Num(2)),
        )  # fmt: skip
        return self.random.choice(kinds)()

    # -- expressions
    def expression(self, kind: Kind, depth: int) -> Node:
        again = [n for n in self.drawn[kind] if size(n) > 1]
        if again and self.chance(0.2) and not self.uniform:
            return self.random.choice(again)
        found = {"int": self.ints, "float": self.floats, "bool": self.bools}[kind](depth)
        if not self.uniform:
            self.drawn[kind].append(found)
        return found

    def of_one_number(self, kind: Kind, depth: int) -> Node:
        """A part that is one number for the whole call."""
        before, self.uniform = self.uniform, True
        found = {"int": self.ints, "float": self.floats, "bool": self.bools}[kind](depth)
        self.uniform = before
        return found

    def ints(self, depth: int) -> Node:
        if depth <= 0 or self.chance(0.15):
            return self._int_leaf()
        a = lambda: self.expression("int", depth - 1)  # noqa: E731
        match self.random.choice(
            ("sum", "sum", "sum", "times", "divide", "divide", "extreme", "where", "abs", "neg", "floor")
        ):
            case "sum":
                return make(self.random.choice(("add", "sub", "sub")), a(), a())
            case "times":
                return make("mul", Num(self.random.choice((2, 3, -1, 5, -2))), a())
            case "divide":
                return make(self.random.choice(("floordiv", "mod")), a(), self.divisor())
            case "extreme":
                return make(self.random.choice(("minimum", "maximum")), a(), a())
            case "where":
                return make("where", self.expression("bool", depth - 1), a(), a())
            case "floor":
                return make("floor", self.expression("float" if self.chance(0.7) else "int", depth - 1))
            case name:
                return make(name, a())

    def divisor(self) -> Node:
        """Never 0, as far as Weft can prove."""
        kinds = (Num(2), Num(3), Num(5), Num(7), Num(16), Num(-3), Num(-1), Sym("group"), Sym("head_dim"),
                 make("maximum", self.scalar("int"), Num(1)), make("add", HEAD, Num(1)))  # fmt: skip
        return self.random.choice(kinds[:10] if self.uniform else kinds)

    def _int_leaf(self) -> Node:
        roll = self.random.random()
        if roll < 0.25:
            return self.constant("int")
        if roll < 0.4:
            return self.scalar("int")
        if roll < 0.5 and not self.uniform:
            return self.read("int")
        return self.symbol()

    def floats(self, depth: int) -> Node:
        if depth <= 0 or self.chance(0.15):
            return self._float_leaf()
        a = lambda: self.expression("float", depth - 1)  # noqa: E731
        match self.random.choice(FLOAT_KINDS):
            case "sum":
                return make(self.random.choice(("add", "sub")), a(), a())
            case "times":
                return make("mul", a(), self._tame(depth - 1))
            case "divide":
                return make("div", a(), self._away_from_zero(depth - 1))
            case "extreme":
                return make(self.random.choice(("minimum", "maximum")), a(), a())
            case "where":
                return make("where", self.expression("bool", depth - 1), a(), a())
            case "function":
                return make(self.random.choice(("tanh", "sigmoid", "sin", "cos", "abs", "softplus", "logsigmoid")), a())
            case "guarded":
                return self._guarded(depth - 1)
            case "int":
                return self._of_int(depth - 1)
            case "uniform":
                return self.of_one_number("float", depth - 1)
            case name:
                return make(name, a())

    def _of_int(self, depth: int) -> Node:
        return make(
            self.random.choice(("mul", "mul", "add")),
            Num(self.random.choice((0.1, 0.25, -0.05, 0.5))),
            self.ints(depth),
        )

    def _tame(self, depth: int) -> Node:
        """A float of size 1 or so."""
        if depth <= 0 or self.chance(0.5):
            return self._float_leaf()
        return make(self.random.choice(("tanh", "sigmoid", "sin", "cos")), self.expression("float", depth - 1))

    def _away_from_zero(self, depth: int) -> Node:
        a = self.expression("float", max(0, depth))
        plain = (
            Num(2.0),
            Num(0.5),
            Num(-4.0),
            Num(8),
            make("add", self.scalar("float"), Num(4.0)),
            make("sqrt", Sym("head_dim")),
        )
        bounded = (
            make("add", make("abs", a), Num(0.5)),
            make("exp", make("tanh", a)),
            make("add", make("mul", a, a), Num(1.0)),
        )
        return self.random.choice((*plain, *bounded))

    def _guarded(self, depth: int) -> Node:
        """A function with a domain, of what lies in it."""
        a = self.expression("float", depth)
        name = self.random.choice(("exp", "exp2", "log", "log2", "sqrt", "rsqrt"))
        if name in ("exp", "exp2"):
            return make(
                name, self.random.choice((make("minimum", a, Num(1.5)), make("neg", make("abs", a)), make("tanh", a)))
            )
        inside = make(
            "add", self.random.choice((make("abs", a), make("mul", a, a))), Num(self.random.choice((0.25, 1.0, 1)))
        )
        if self.chance(0.2):  # outside the domain where it is not taken
            return make("where", make("gt", a, Num(0.25)), make(name, a), Num(0.5))
        return make(name, inside)

    def _float_leaf(self) -> Node:
        roll = self.random.random()
        if self.where == "score" and not self.uniform and roll < 0.3:
            return SCORE
        if roll < 0.5:
            return self.constant("float")
        if roll < 0.7:
            return self.scalar("float")
        if roll < 0.92 and not self.uniform:
            return self.read("float")
        return make("mul", Num(self.random.choice((0.05, 0.1, 0.25))), self.symbol())

    def bools(self, depth: int) -> Node:
        if not self.uniform and self.chance(0.08):
            return self.read("bool")
        if depth <= 0 or self.chance(0.4):
            return self.comparison(max(0, depth - 1))
        a = lambda: self.expression("bool", depth - 1)  # noqa: E731
        match self.random.choice(("and", "and", "or", "or", "xor", "not", "where", "same", "uniform")):
            case "not":
                return make("not", a())
            case "where":
                return make("where", a(), a(), a())
            case "same":
                return make(self.random.choice(("eq", "ne")), a(), a())
            case "uniform":
                return self.of_one_number("bool", depth - 1)
            case name:
                return make(name, a(), a())

    def comparison(self, depth: int) -> Node:
        if self.chance(0.25):
            kind = self.random.choice(("float", "int"))
            a, b = self.expression("float", depth), self.expression(kind, depth)
            return make(self.random.choice(COMPARISONS[:4]), a, b)
        if self.chance(0.5) and not self.uniform and self.where != "scale":
            return self.affine()
        return make(self.random.choice(COMPARISONS), self.expression("int", depth), self.expression("int", depth))

    # -- what masks and scores are mostly made of
    def affine(self) -> Node:
        """A comparison of positions that has a closed form."""
        q: Node = Q if self.chance(0.7) else make("mul", Num(self.random.choice((2, 3))), Q)
        k: Node = K if self.chance(0.7) else make("mul", Num(self.random.choice((2, 3))), K)
        shift = self.random.choice((Num(0), Num(0), self.constant("int"), self.scalar("int"), HEAD, self.by_head()))
        name = self.random.choice(("le", "le", "lt", "ge", "gt", "eq", "ne"))
        return self.random.choice(
            (make(name, k, make("add", q, shift)), make(name, make("sub", q, k), shift), make(name, k, q))
        )

    def by_head(self) -> Node:
        affine = make("mul", Num(7), make("add", self.random.choice((HEAD, Sym("kv_head"))), Num(1)))
        of_scalar = make("mul", Sym("kv_head"), self.scalar("int"))
        return self.random.choice((affine, of_scalar, Read("table", "int", (HEAD,)), make("mul", Num(4), BATCH)))

    def mask_part(self) -> Node:
        n = self.random.choice((self.scalar("int"), Num(5), Num(16), Num(40), self.by_head()))
        block = Num(self.random.choice((3, 8, 16, 40)))
        causal = make("le", K, Q)
        position = self.random.choice((Q, K))
        document = self.random.choice((("doc", (BATCH,)), ("doc", ()), ("ids", (BATCH, HEAD))))
        parts: Sequence[Callable[[], Node]] = (
            lambda: causal, lambda: causal, self.affine, self.affine, self.affine,
            lambda: make("lt", make("sub", Q, K), n),
            lambda: make("lt", make("abs", make("sub", Q, K)), n),
            self.quotient,
            lambda: make("lt", position, n),
            lambda: make("le", make("floordiv", K, block), make("floordiv", Q, block)),
            lambda: make("eq", make("floordiv", K, block), make("floordiv", Q, block)),
            lambda: make("eq", make("mod", position, Num(self.random.choice((2, 3, 5)))), Num(0)),
            lambda: make("eq", make("mod", make("sub", Q, K), Num(self.random.choice((2, 3, -4)))), Num(0)),
            lambda: make("eq", *(Read(document[0], "int", (*document[1], p)) for p in (Q, K))),
            lambda: Read("keep", "bool", (BATCH, K)),
            lambda: make("lt", K, Read("lens", "int", (BATCH,))),
            lambda: make("lt", K, make("add", make("mul", Num(2), Read("lens", "int", (BATCH,))), n)),
            lambda: make("le", make("sub", *(Read("doc", "int", (BATCH, p)) for p in (K, Q))), self.constant("int")),
            lambda: make("gt", Read("level", "float", (self.random.choice((HEAD, K, Q)),)), self.constant("float")),
            lambda: Read("blocks", "bool", (HEAD, *_blocks(16, self.random.choice((8, 16))))),
            lambda: make("gt", Read("kinds", "int", (BATCH, *_blocks(8, 12))), self.constant("int")),
            lambda: Read("allowed", "bool", (BATCH, Q, K)),
            lambda: self.of_one_number("bool", 1),
            lambda: self.comparison(2), lambda: self.bools(2),
        )  # fmt: skip
        return self.random.choice(parts)()

    def mask(self) -> Node:
        found = self.mask_part()
        self.drawn["bool"].append(found)
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            other = self.mask_part() if self.chance(0.8) else self.random.choice(self.drawn["bool"])
            self.drawn["bool"].append(other)
            if self.chance(0.15):
                other = make("not", other)
            name = self.random.choice(("and", "and", "or", "or", "or", "xor", "where"))
            if name == "where":
                found = make(
                    "where", self.of_one_number("bool", 1) if self.chance(0.5) else self.bools(1), found, other
                )
            else:
                found = make(name, found, other)
        return found

    def score_step(self, score: Node) -> Node:
        """One more thing done to a score."""
        cap = self.random.choice((Num(5.0), Num(20.0), make("add", self.scalar("float"), Num(5.0))))
        slope = Read("slopes", "float", (self.random.choice((HEAD, HEAD, Sym("kv_head"))),))
        padding = Read("padding", "float", (BATCH, K))
        bias = self.random.choice(((HEAD, Q), (HEAD, K), (BATCH, HEAD, K), (BATCH, Q), (Q,), (K,)))
        whose = self.random.choice(((), (HEAD,), (Sym("kv_head"),), (BATCH,), (BATCH, HEAD)))
        steps: Sequence[Callable[[], Node]] = (
            lambda: make("mul", cap, make("tanh", make("div", score, cap))),
            lambda: make("add", score, make("mul", slope, make("sub", K, Q))),
            lambda: make("div", score, make("add", make("abs", slope), Num(0.5))),
            lambda: make("add", score, Read("bias", "float", bias)),
            lambda: make("add", score, Read("pair", "float", (HEAD, Q, K))),
            lambda: make("add", score, Read(f"pairs{len(whose)}", "float", (*whose, Q, K))),
            lambda: make("add", score, Read(f"near{len(whose)}", "float", (*whose, self.bucket()))),
            lambda: make("mul", score, make("exp", make("tanh", Read("warmth", "float", ())))),
            lambda: make("add", score, padding),
            lambda: make("where", self.bools(1), score, Num(self.random.choice((-1e4, -1e9, float("-inf"))))),
            lambda: make("minimum", score, make("mul", Num(2.0), cap)),
            lambda: make("maximum", score, make("neg", cap)),
            lambda: make("mul", Num(-0.5), make("abs", score)),
            lambda: make(self.random.choice(("softplus", "logsigmoid")), score),
            lambda: make("where", self.of_one_number("bool", 1), score, make("mul", Num(0.5), score)),
            lambda: make("sub", score, make("mul", Num(0.05), make("abs", make("sub", Q, K)))),
            lambda: make("mul", score, self.of_one_number("float", 2)),
            lambda: make("mul", score, self._tame(2)),
            lambda: make("add", score, self.bounded(3)),
            lambda: make("add", score, self.bounded(3)),
            lambda: make("where", self.bools(2), score, self.bounded(2)),
        )  # fmt: skip
        return self.random.choice(steps)()

    def bucket(self) -> Node:
        """Which entry of a table a pair of positions reads."""
        distance, most = make("sub", Q, K), Num(self.random.choice((3, 20)))
        far = make("floor", make("mul", Num(2.0), make("log2", make("add", Num(1.0), make("abs", distance)))))
        window = make("add", clamp(distance, -8, 8), Num(8))
        block = Num(self.random.choice((2, 5)))
        blocks = make("abs", make("sub", make("floordiv", Q, block), make("floordiv", K, block)))
        apart = clamp(Read("apart", "int", (BATCH, Q, K)), 0, 6)
        kinds: Sequence[Node] = (
            make("abs", distance), clamp(distance, 0, 12), window, make("minimum", far, most), blocks, apart,
            make("minimum", Q, K), clamp(make("mul", Num(2), make("sub", K, Q)), 0, 9),
        )  # fmt: skip
        return self.random.choice(kinds)

    def past(self, score: Node) -> Node:
        """A score that has a value only where keys lie in the past, and an infinite slope or NaN elsewhere."""
        distance = make("mul", Num(0.25), make("sub", Q, K))
        shifted = make("add", distance, Num(0.25))
        weight = self.random.choice((Num(0.5), Read("slopes", "float", (HEAD,)), self.scalar("float"), score))
        kinds = (make("log", shifted), make("sqrt", distance), make("rsqrt", shifted), make("div", Num(1.0), shifted))
        return make("add", score, make("mul", weight, self.random.choice(kinds)))

    def up_to_an_end(self, score: Node) -> Node:
        """A score that has a value up to the last row and the last key, and none, or infinity, behind them."""
        left = self.random.choice(
            (
                make("sub", Sym("kv_len"), Q), make("sub", Sym("kv_len"), Q), make("sub", Sym("kv_len"), K),
                make("add", make("sub", Sym("kv_len"), Q), K), make("add", make("sub", Q, K), Sym("kv_len")),
                make("add", Q, Num(1)),
            )
        )  # fmt: skip
        x = make("mul", Num(self.random.choice((1.0, 0.25))), left)
        steep = make("maximum", make("mul", Num(-4.0), left), Num(-8.0))
        value = self.random.choice(
            (
                make("log", x), make("log2", x), make("sqrt", make("sub", x, Num(0.25))), make("rsqrt", x),
                make("div", Num(1.0), x), make("div", Num(0.5), left), make("exp", steep), make("exp2", steep),
            )
        )  # fmt: skip
        bias = Read("bias", "float", self.random.choice(((HEAD, Q), (HEAD, K))))
        of_head = Read("slopes", "float", (HEAD,))
        weight = self.random.choice((Num(0.5), Num(-0.5), of_head, bias, self.scalar("float"), score))
        steps: Sequence[Callable[[], Node]] = (
            lambda: make("add", score, make("mul", weight, value)),
            lambda: make("sub", score, make("mul", weight, value)),
            lambda: make("mul", score, value),
            lambda: make("div", score, x),
            lambda: make("minimum", score, make("sub", Num(4.0), value)),
            lambda: make("where", make("lt", K, Q), make("add", score, value), score),
        )  # fmt: skip
        return self.random.choice(steps)()

    def quotient(self) -> Node:
        """A condition that a quotient of floats decides, exact where its operands are multiples."""
        a = self.random.choice((Q, K, make("sub", Q, K), make("mul", Num(1.0), Q), make("mul", Num(0.5), K)))
        divisor = Num(self.random.choice((3, 7, 10, 3.0, 7.0, 25, -7)))
        quotient = make("div", a, divisor)
        floored = make("floor", quotient)
        return self.random.choice(
            (
                make("eq", make("mod", floored, Num(2)), Num(0)),
                make("le", make("floor", make("div", K, divisor)), make("floor", make("div", Q, divisor))),
                make("le", quotient, Num(self.random.choice((1.0, 2, 5.0)))),
                make("ge", quotient, Num(self.random.choice((1.0, 0, -1.0)))),
                make("ne", make("sub", floored, K), Num(0)),
            )
        )

    def bounded(self, depth: int) -> Node:
        found = self.expression("float", depth)
        return found if self.chance(0.3) else make(self.random.choice(("tanh", "sin", "sigmoid")), found)

    def score(self) -> Node:
        roll = self.random.random()
        if roll < 0.2:
            return SCORE
        if roll < 0.3:  # without q.k
            return self.random.choice(
                (self.bounded(2), Num(0.0), self.scalar("float"), make("mul", Num(-0.1), self.ints(1)), self.ints(1))
            )
        if roll < 0.45:
            return self.floats(4)
        found: Node = SCORE
        for _ in range(self.random.choice((1, 1, 2, 3))):
            found = self.score_step(found)
        return found

    def scale(self) -> Node | None:
        roll = self.random.random()
        if roll < 0.6:
            return None
        if roll < 0.75:
            return Num(self.random.choice((0.0, 0.125, -0.25, 1.0, 1, 0.37)))
        x = self.scalar("float")
        kinds = (
            make("rsqrt", Sym("head_dim")),
            make("div", x, make("sqrt", Sym("head_dim"))),
            make("exp", make("neg", make("abs", x))),
            make("mul", Num(0.25), make("tanh", self.floats(1))),
            make("div", make("log", make("add", Sym("kv_len"), Num(1))), Num(8.0)),
            Read("slopes", "float", (HEAD,)),
        )
        return self.random.choice(kinds)

    def sink(self) -> Node | None:
        roll = self.random.random()
        if roll < 0.6:
            return None
        if roll < 0.7:
            return Num(self.random.choice((0.0, 0, 1.5, -2.0, 30.0, 1e4, -1e9, float("-inf"))))
        own = Read("sinks", "float", (self.random.choice((HEAD, HEAD, Sym("kv_head"))),))
        kinds = (
            own,
            own,
            make("mul", self.scalar("float"), own),
            make("log", make("add", make("abs", own), Num(0.25))),
            Read("sinks2", "float", (BATCH, HEAD)),
            make("sub", Read("slopes", "float", (HEAD,)), own),
            make("where", make("lt", HEAD, Num(2)), own, Num(float("-inf"))),
            self.floats(2),
            self.ints(1),
        )
        return self.random.choice(kinds)

    def dropout(self) -> Num | Scalar | None:
        if self.random.random() < 0.8:
            return None
        return self.random.choice((Num(0.1), Num(0.5), Num(0.0), Num(0.99), Scalar("drop", "float")))


def draw_variant(random: Random, target: str = "cpu", ends: bool = False) -> Variant:
    """A declaration for calls on a target; some have no call that is defined: whoever draws calls gives these up.

    ends: its score has a value only where rows and keys are, or where they see each other.
    """
    tensors: dict[str, tuple[Kind, tuple[Node, ...]]] = {}
    while True:
        drawer = Drawer(random, "mask", tensors)
        mask = Num(True) if random.random() < 0.12 else drawer.mask()
        scorer = Drawer(random, "score", tensors, {k: list(v) for k, v in drawer.drawn.items()})
        score = scorer.score()
        if random.random() < (0.25 if ends else 0.08):
            mask, score = make("and", make("le", K, Q), mask), scorer.past(score)
        elif random.random() < (1.0 if ends else 0.08):
            score = scorer.up_to_an_end(score)
        scale = Drawer(random, "scale", tensors).scale()
        sink = Drawer(random, "scale", tensors).sink()
        dropout = Drawer(random, "scale", tensors).dropout()
        latent = Latent(random.choice((8, 16, 20)), random.choice((0, 4, 8))) if random.random() < 0.08 else None
        if target in ON_A_GPU and random.random() < CACHED_SHARE[target]:
            latent = Latent(random.choice(CACHED_RANKS), 64)
        drawn = random.choice(("softmax", "softmax", "softmax", "sigmoid", "relu"))
        normalizer = "softmax" if sink is not None else drawn
        variant = Variant(score, mask, scale, latent, sink, dropout, normalizer)
        if max(size(mask), size(score)) <= LARGEST and _consistent(variant):
            return variant
        tensors.clear()


def _blocks(queries: int, keys: int) -> tuple[Node, Node]:
    """Numbers of the blocks of both positions."""
    return make("floordiv", Q, Num(queries)), make("floordiv", K, Num(keys))


def _consistent(variant: Variant) -> bool:
    """Every name stands for one operand, and no operator has only numbers, which Python would compute."""
    kinds: dict[str, tuple[Kind, int]] = {}
    for read in variant.reads:
        if kinds.setdefault(read.name, (read.kind, len(read.index))) != (read.kind, len(read.index)):
            return False
    return not any(_is_plain(n) for tree in variant.trees for n in _operators(tree))


def _operators(tree: Node) -> list[Op]:
    return [n for n in nodes(tree) if isinstance(n, Op)]


def _is_plain(node: Op) -> bool:
    return node.name in {**INFIX, **PREFIX} and all(isinstance(a, Num) for a in node.args)
