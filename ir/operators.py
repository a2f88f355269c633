"""The operators of the language, one record each: all that any pass needs to know of one.

One more elementwise function is one more record in `OPERATORS`, and a line in docs/language.md. The public function
`weft.<name>`, printing, reading, constant folding, the reference, the derivative, tile programs and kernels follow.
Nothing here imports torch, sympy or Triton: what they call a function stands in a record as text.
"""

from __future__ import annotations

import keyword
import math
import operator
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, Union

from .errors import InternalError

Number = Union[int, float, bool]
Range: TypeAlias = tuple[int, int]  # lowest and highest value of an int
STRUCTURAL: Literal["structural"] = "structural"


@dataclass(frozen=True)
class Operator:
    """One operator: what it takes and gives, what it computes, and how it is written in every language.

    slopes: d result / d operand for each operand, as text of the language over the names of the operands and `result`,
    with the values that torch takes at kinks; STRUCTURAL where the symbolic border has the operator built in
    (compiler/analysis/values/symbolic.py); nothing for what gives an int or a bool, whose slope is 0.

    gpu, gluon, tile, number: format strings over the printed operands {0}, {1}, ...; `{m}` is the module of the GPU
    language (tl, gl). What has a sign and no text is written by its sign. A function has all of them but gluon. Beside
    a tile, an operand may be a plain number: in a function of floats torch sees it as a tensor, else the text of tile
    must take both (torch.where does) or tile_and_number says how it is written then.

    Raises InternalError that lists what the record lacks.
    """

    name: str
    operands: tuple[str, ...]  # their names, in the public function and in slopes
    takes: Literal["int", "number", "bool", "any"]
    gives: Literal["int", "float", "bool", "same"]  # "same": int when every operand is int, else float
    python: Callable[..., Number]  # its value for plain numbers: constants, and tile programs run in Python
    torch: str  # torch's function, for the reference; a name below torch may have dots
    slopes: tuple[str, ...] | Literal["structural"] = ()
    sign: str | None = None  # infix or prefix; None: written as a function
    precedence: int = 9
    doc: str = ""  # docstring of the public function
    commutative: bool = False
    exact: bool = False  # Python computes what every kernel computes, so that constants are folded
    chooses: bool = False  # the result is one of the operands
    int_range: Callable[..., Range] | None = None  # of the result, from the ranges of int operands; None: anything
    gpu: str = ""
    gluon: str = ""  # "": as gpu has it
    gpu_rounded: str = ""  # on floats, where the value decides something: rounded as IEEE 754 says; "": as elsewhere
    tile: str = ""  # torch, on tiles
    tile_and_number: str = ""  # torch, on a tile {0} and a plain number {1}, where that is written in another way
    number: str = ""  # plain Python numbers, beside `import math`
    helper: str = ""  # function that the gpu text calls; {jit} and {m} stand for decorator and module
    fast_helper: str = ""  # instead on NVIDIA GPUs, of 16-bit operands, but where the value is compared

    def __post_init__(self) -> None:
        problems = [*_name_problems(self), *_slope_problems(self), *_text_problems(self)]
        if problems:
            raise InternalError(f"operator {self.name}: {'; '.join(problems)}")

    @property
    def arity(self) -> int:
        return len(self.operands)

    @property
    def is_function(self) -> bool:
        """Whether it is written, and called by users, by its name."""
        return self.sign is None

    @property
    def computes_floats(self) -> bool:
        """Whether it is a function that turns int operands into floats before anything else."""
        return self.is_function and self.gives == "float"

    @property
    def divides_ints(self) -> bool:
        """Whether it is a division of ints, which wants a divisor that is not 0."""
        return self.takes == self.gives == "int"

    @property
    def makes_ints(self) -> bool:
        """Whether it gives ints of floats, as floor does: nothing is known of them before they are computed."""
        return self.gives == "int" and self.takes == "number"

    @property
    def decides(self) -> bool:
        """Whether the last bit of a float operand may make all the difference, as to a comparison or floor."""
        return self.makes_ints or (self.gives == "bool" and self.takes != "bool")


# -- what a record must have ------------------------------------------------------------------------------------------
def _name_problems(op: Operator) -> list[str]:
    plain = op.name.isidentifier() and op.name.isascii() and not op.name.startswith("_")
    found = [] if plain else ["expected a Python identifier as a name"]
    if op.is_function and keyword.iskeyword(op.name):
        found.append("expected a name that is no keyword of Python, as users call it")
    if op.is_function and not op.doc:
        found.append("expected doc, the docstring of the public function")
    if op.commutative and op.arity != 2:
        found.append(f"expected 2 operands of what is commutative, got {op.arity}")
    return found


def _slope_problems(op: Operator) -> list[str]:
    if op.gives in ("int", "bool"):
        return ["expected no slopes, as the slope of an int or a bool is 0"] if op.slopes else []
    if op.slopes == STRUCTURAL or len(op.slopes) == op.arity:
        return []
    return [f"expected slopes, {op.arity} for {op.arity} operands (or STRUCTURAL), got {len(op.slopes)}"]


def _text_problems(op: Operator) -> list[str]:
    found = []
    for field in ("gpu", "gluon", "gpu_rounded", "tile", "tile_and_number", "number"):
        text = getattr(op, field)
        optional = not op.is_function or field in ("gluon", "gpu_rounded", "tile_and_number")
        places = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None} - {"m"}
        if not text and not optional:
            found.append(f"expected {field}, how a function is written there")
        if text and places != {str(n) for n in range(op.arity)}:
            found.append(f"{field}: expected one place for each of {op.arity} operands, got {text!r}")
    if op.tile_and_number and not op.commutative:
        found.append("tile_and_number: expected a commutative operator, as either operand may be the number")
    if op.fast_helper and not op.helper:
        found.append("fast_helper: expected a helper that it takes the place of")
    return found


# -- ranges of ints ---------------------------------------------------------------------------------------------------
def _product_range(x: Range, y: Range) -> Range:
    products = [a * b for a in x for b in y]
    return min(products), max(products)


def _quotient_range(x: Range, y: Range) -> Range:
    divisors = [d for d in (*y, -1, 1) if d and y[0] <= d <= y[1]]
    quotients = [a // d for a in x for d in divisors] or [0]
    return min(quotients), max(quotients)


def _remainder_range(x: Range, y: Range) -> Range:
    """x % y has the sign of y and is smaller; it is x where 0 <= x < y, and never above an x that is not negative."""
    (a, b), (c, d) = x, y
    if 0 <= a and b < c:
        return a, b
    if c == d and c > 0 and a // c == b // c:
        return a % c, b % c
    low, high = min(c + 1, 0), max(d - 1, 0)
    return (low, min(high, b)) if a >= 0 and c > 0 else (low, high)


# -- helpers of GPU languages -----------------------------------------------------------------------------------------
_FLOOR_DIV = '''{jit}
def floor_div(a, b):
    """a // b rounded towards minus infinity; the hardware's division rounds towards zero."""
    quotient = a // b
    remainder = a - quotient * b
    return {m}.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)
'''
_FLOOR_MOD = '''{jit}
def floor_mod(a, b):
    """a % b with the sign of b."""
    return a - floor_div(a, b) * b
'''
_TANH = '''{jit}
def tanh(x):
    """tanh to a few roundings: a series near 0, where 1 - 2 / (1 + e^2x) would cancel, one exponential elsewhere."""
    square = x * x
    near = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    far = 1.0 - 2.0 / (1.0 + {m}.exp2(2.8853900817779268 * x))
    return {m}.where(square < 0.0625, x * near, far)
'''
_TANH_APPROXIMATE = '''{jit}
def tanh(x):
    """The hardware's tanh: relative error up to 2**-11, about that of the 16-bit operands."""
    return {m}.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], {m}.float32, is_pure=True, pack=1)
'''
_SOFTPLUS = '''{jit}
def softplus(x):
    """log(1 + e^x): nothing overflows, and log(1 + p) of p from 0 to 1 is a polynomial, to 2e-7 of it."""
    p = {m}.exp(-{m}.abs(x))
    far = 0.19105993 + p * (-0.13663214 + p * (0.078225558 + p * (-0.029504987 + p * 0.0052326294)))
    near = 0.99999997 + p * (-0.49999493 + p * (0.33319097 + p * (-0.24842979 + p * far)))
    return {m}.maximum(x, 0.0) + p * near
'''
_SINE = '''{jit}
def sine(x, quarters):
    """sin(x + quarters * pi / 2), x up to 2**40 in size: quarter turns are counted in float64, then polynomials."""
    turned = {m}.cast(x, {m}.float64) * 0.6366197723675814
    counted = turned + 6755399441055744.0  # 1.5 * 2**52, beside which only whole numbers are kept, in its last bits
    angle = {m}.cast((turned - (counted - 6755399441055744.0)) * 1.5707963267948966, {m}.float32)
    square = angle * angle
    odd = angle + angle * square * (-0.16666655 + square * (0.00833216 + square * -0.00019515))
    even = 1.0 - 0.5 * square + square * square * (0.041666647 + square * (-0.0013887361 + square * 2.4437728e-05))
    quadrant = counted.to({m}.int64, bitcast=True).to({m}.int32) + quarters
    value = {m}.where((quadrant & 1) != 0, even, odd)
    return {m}.where((quadrant & 2) != 0, -value, value)
'''
_SINE_APPROXIMATE = '''{jit}
def sine(x, quarters):
    """The hardware's sin(x + quarters * pi / 2), to 2**-20, of what is left of whole turns; x up to 2**24 in size."""
    turned = {m}.fma(x, 0.15915494, quarters * 0.25)
    turns = (turned + 12582912.0) - 12582912.0  # beside 1.5 * 2**23 only whole numbers are kept
    part = {m}.fma(x, 6.4206384e-09, {m}.fma(x, 0.15915494, quarters * 0.25 - turns))  # 1 / (2 pi) to 48 bits
    return {m}.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [part * 6.2831853], {m}.float32, True, 1)
'''

LARGEST_FLOOR = 2**30 - 64  # a float32; ints that are made of floats stay within it, so that a sum of two has 32 bits


# -- the table --------------------------------------------------------------------------------------------------------
_ONE, _TWO = ("x",), ("a", "b")
OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        # signs: Python's own, of ir.expr.Node
        Operator("or", _TWO, "bool", "bool", operator.or_, "logical_or",
                 sign="|", precedence=2, commutative=True, exact=True),
        Operator("xor", _TWO, "bool", "bool", operator.xor, "logical_xor",
                 sign="^", precedence=3, commutative=True, exact=True),
        Operator("and", _TWO, "bool", "bool", operator.and_, "logical_and",
                 sign="&", precedence=4, commutative=True, exact=True),
        Operator("lt", _TWO, "number", "bool", operator.lt, "lt", sign="<", precedence=1, exact=True),
        Operator("le", _TWO, "number", "bool", operator.le, "le", sign="<=", precedence=1, exact=True),
        Operator("gt", _TWO, "number", "bool", operator.gt, "gt", sign=">", precedence=1, exact=True),
        Operator("ge", _TWO, "number", "bool", operator.ge, "ge", sign=">=", precedence=1, exact=True),
        Operator("eq", _TWO, "any", "bool", operator.eq, "eq", sign="==", precedence=1, commutative=True, exact=True),
        Operator("ne", _TWO, "any", "bool", operator.ne, "ne", sign="!=", precedence=1, commutative=True, exact=True),
        Operator("add", _TWO, "number", "same", operator.add, "add", STRUCTURAL, sign="+", precedence=6,
                 commutative=True, exact=True, int_range=lambda x, y: (x[0] + y[0], x[1] + y[1])),
        Operator("sub", _TWO, "number", "same", operator.sub, "sub", STRUCTURAL,
                 sign="-", precedence=6, exact=True, int_range=lambda x, y: (x[0] - y[1], x[1] - y[0])),
        Operator("mul", _TWO, "number", "same", operator.mul, "mul", STRUCTURAL,
                 sign="*", precedence=7, commutative=True, exact=True, int_range=_product_range,
                 gpu_rounded="{m}.fma({0}, {1}, 0.0)"),  # or it would be one with a sum that follows
        Operator("div", _TWO, "number", "float", operator.truediv, "true_divide", STRUCTURAL, sign="/", precedence=7,
                 gpu_rounded="{m}.div_rn({0}, {1})"),  # else it is by a reciprocal, two roundings off
        # in tile programs division by 0 gives 0, as on a GPU nothing traps
        Operator("floordiv", _TWO, "int", "int", lambda a, b: a // b if b else 0, "floor_divide",
                 sign="//", precedence=7, int_range=_quotient_range, gpu="floor_div({0}, {1})", helper=_FLOOR_DIV),
        Operator("mod", _TWO, "int", "int", lambda a, b: a % b if b else 0, "remainder",
                 sign="%", precedence=7, int_range=_remainder_range, gpu="floor_mod({0}, {1})", helper=_FLOOR_MOD),
        Operator("neg", _ONE, "number", "same", operator.neg, "neg", STRUCTURAL,
                 sign="-", precedence=8, exact=True, int_range=lambda x: (-x[1], -x[0])),
        Operator("not", _ONE, "bool", "bool", operator.not_, "logical_not",
                 sign="~", precedence=8, exact=True, number="(not {0})"),
        # choices
        Operator(
            "where", ("condition", "a", "b"), "any", "same", lambda c, a, b: a if c else b, "where", STRUCTURAL,
            doc="`a` where the condition holds, else `b`. The derivative flows into the branch taken.\n\n"
                ">>> weft.where(weft.kv_pos < 4, 0.0, weft.score)\nwhere(kv_pos < 4, 0.0, score)",
            chooses=True, int_range=lambda condition, x, y: (min(x[0], y[0]), max(x[1], y[1])),
            gpu="{m}.where({0}, {1}, {2})", tile="torch.where({0}, {1}, {2})", number="({1} if {0} else {2})",
        ),
        Operator(
            "minimum", _TWO, "number", "same", min, "minimum", STRUCTURAL,
            doc="The smaller of two numbers; at a tie the derivative is shared half and half, as torch.minimum does.",
            commutative=True, exact=True, chooses=True, int_range=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
            gpu="{m}.minimum({0}, {1})", tile="torch.minimum({0}, {1})", tile_and_number="torch.clamp({0}, max={1})",
            number="min({0}, {1})",
        ),
        Operator(
            "maximum", _TWO, "number", "same", max, "maximum", STRUCTURAL,
            doc="The larger of two numbers; at a tie the derivative is shared half and half, as torch.maximum does.",
            commutative=True, exact=True, chooses=True, int_range=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
            gpu="{m}.maximum({0}, {1})", tile="torch.maximum({0}, {1})", tile_and_number="torch.clamp({0}, min={1})",
            number="max({0}, {1})",
        ),
        # functions
        Operator(
            "abs", _ONE, "number", "same", abs, "abs", STRUCTURAL,
            doc="Absolute value; the derivative at 0 is 0, as in torch.",
            exact=True, int_range=lambda x: (max(x[0], -x[1], 0), max(-x[0], x[1])),
            gpu="{m}.abs({0})", tile="abs({0})", number="abs({0})",
        ),
        Operator(
            "floor", _ONE, "number", "int", lambda x: math.floor(min(max(x, -LARGEST_FLOOR), LARGEST_FLOOR)), "floor",
            doc="The largest int not above x: an int, so that it can index a tensor; within 2**30 of 0.",
            gpu=f"{{m}}.floor({{m}}.minimum({{m}}.maximum({{0}}, -{LARGEST_FLOOR}.0), {LARGEST_FLOOR}.0))"
                ".to({m}.int32)",
            tile=f"torch.floor(torch.clamp({{0}}, -{LARGEST_FLOOR}, {LARGEST_FLOOR})).long()",
            number=f"math.floor(min(max({{0}}, -{LARGEST_FLOOR}), {LARGEST_FLOOR}))",
        ),
        Operator(
            "exp", _ONE, "number", "float", math.exp, "exp", ("result",), doc="e to the power x.",
            gpu="{m}.exp({0})", tile="torch.exp({0})", number="math.exp({0})",
        ),
        Operator(
            "exp2", _ONE, "number", "float", lambda x: 2.0**x, "exp2", ("0.6931471805599453 * result",),
            doc="2 to the power x.",
            gpu="{m}.exp2({0})", tile="torch.exp2({0})", number="(2.0 ** ({0}))",
        ),
        Operator(
            "log", _ONE, "number", "float", math.log, "log", ("1.0 / x",), doc="Natural logarithm.",
            gpu="{m}.log({0})", tile="torch.log({0})", number="math.log({0})",
        ),
        Operator(
            "log2", _ONE, "number", "float", math.log2, "log2", ("1.0 / 0.6931471805599453 / x",),
            doc="Logarithm to base 2.",
            gpu="{m}.log2({0})", tile="torch.log2({0})", number="math.log2({0})",
        ),
        Operator(
            "tanh", _ONE, "number", "float", math.tanh, "tanh", ("1.0 - result * result",),
            doc="Hyperbolic tangent; scores of 16-bit calls on NVIDIA GPUs take the hardware's (error to 2**-11).",
            gpu="tanh({0})", tile="torch.tanh({0})", number="math.tanh({0})",
            helper=_TANH, fast_helper=_TANH_APPROXIMATE,
        ),
        Operator(
            "sigmoid", _ONE, "number", "float", lambda x: 1.0 / (1.0 + math.exp(-x)), "sigmoid",
            ("result * (1.0 - result)",), doc="1 / (1 + exp(-x)).",
            gpu="(1.0 / (1.0 + {m}.exp(-({0}))))", tile="torch.sigmoid({0})", number="(1.0 / (1.0 + math.exp(-({0}))))",
        ),
        Operator(
            "softplus", _ONE, "number", "float", lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
            "softplus", ("sigmoid(x)",),
            doc="log(1 + exp(x)), for x of any size, as its derivative sigmoid(x).",
            gpu="softplus({0})", tile="-torch.nn.functional.logsigmoid(-({0}))",
            number="(max({0}, 0.0) + math.log1p(math.exp(-abs({0}))))", helper=_SOFTPLUS,
        ),
        Operator(
            "logsigmoid", _ONE, "number", "float", lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))),
            "nn.functional.logsigmoid", ("sigmoid(-x)",),
            doc="log(sigmoid(x)), for x of any size, as its derivative sigmoid(-x).",
            gpu="(-softplus(-({0})))", tile="torch.nn.functional.logsigmoid({0})",
            number="(min({0}, 0.0) - math.log1p(math.exp(-abs({0}))))", helper=_SOFTPLUS,
        ),
        Operator(
            "sqrt", _ONE, "number", "float", math.sqrt, "sqrt", ("0.5 / result",), doc="Square root.",
            gpu="{m}.sqrt({0})", tile="torch.sqrt({0})", number="math.sqrt({0})",
        ),
        Operator(
            "rsqrt", _ONE, "number", "float", lambda x: 1.0 / math.sqrt(x), "rsqrt",
            ("-0.5 * result * result * result",), doc="1 / sqrt(x).",
            gpu="{m}.rsqrt({0})", tile="torch.rsqrt({0})", number="(1.0 / math.sqrt({0}))",
        ),
        Operator(
            "sin", _ONE, "number", "float", math.sin, "sin", ("cos(x)",),
            doc="Sine of an angle in radians; GPU kernels of 16-bit operands use the hardware's (error about 2**-20).",
            gpu="sine({0}, 0)", tile="torch.sin({0})", number="math.sin({0})",
            helper=_SINE, fast_helper=_SINE_APPROXIMATE,
        ),
        Operator(
            "cos", _ONE, "number", "float", math.cos, "cos", ("-sin(x)",),
            doc="Cosine of an angle in radians, as precise as `sin`.",
            gpu="sine({0}, 1)", tile="torch.cos({0})", number="math.cos({0})",
            helper=_SINE, fast_helper=_SINE_APPROXIMATE,
        ),
    )
}  # fmt: skip


def function_names() -> list[str]:
    """Names of the public functions, in order of the alphabet."""
    return sorted(name for name, op in OPERATORS.items() if op.is_function)
