"""The functions of the language, as users call them: `weft.tanh(score / 50.0)`."""

from .expr import Expr, Operand, call


def where(condition: Operand, a: Operand, b: Operand) -> Expr:
    """`a` where the condition holds, else `b`. The derivative flows into the branch taken.

    >>> from .expr import symbol
    >>> where(symbol("kv_pos") < 4, 0.0, symbol("score"))
    where(kv_pos < 4, 0.0, score)
    """
    return call("where", condition, a, b)


def minimum(a: Operand, b: Operand) -> Expr:
    """The smaller of two numbers; at a tie the derivative is shared half and half, as torch.minimum does."""
    return call("minimum", a, b)


def maximum(a: Operand, b: Operand) -> Expr:
    """The larger of two numbers; at a tie the derivative is shared half and half, as torch.maximum does."""
    return call("maximum", a, b)


def exp(x: Operand) -> Expr:
    """e to the power x."""
    return call("exp", x)


def exp2(x: Operand) -> Expr:
    """2 to the power x."""
    return call("exp2", x)


def log(x: Operand) -> Expr:
    """Natural logarithm."""
    return call("log", x)


def log2(x: Operand) -> Expr:
    """Logarithm to base 2."""
    return call("log2", x)


def tanh(x: Operand) -> Expr:
    """Hyperbolic tangent; GPU kernels use the hardware's approximation (relative error about 2**-11)."""
    return call("tanh", x)


def sigmoid(x: Operand) -> Expr:
    """1 / (1 + exp(-x))."""
    return call("sigmoid", x)


def sqrt(x: Operand) -> Expr:
    """Square root."""
    return call("sqrt", x)


def rsqrt(x: Operand) -> Expr:
    """1 / sqrt(x)."""
    return call("rsqrt", x)


def sin(x: Operand) -> Expr:
    """Sine of an angle in radians."""
    return call("sin", x)


def cos(x: Operand) -> Expr:
    """Cosine of an angle in radians."""
    return call("cos", x)


def abs(x: Operand) -> Expr:
    """Absolute value; the derivative at 0 is 0, as in torch."""
    return call("abs", x)


def floor(x: Operand) -> Expr:
    """The largest int not above x: an int, so that it can index a tensor."""
    return call("floor", x)
