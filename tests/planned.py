"""Plans and choices for any machine without tensors or a GPU: the driver is asked, as calls ask it."""

from __future__ import annotations

from weft.compiler.analysis.facts import facts_of
from weft.compiler.planning.cost import CountTiles
from weft.compiler.planning.hardware import H200, Hardware
from weft.compiler.planning.plan import Plan, make_plan
from weft.compiler.planning.records import Shape
from weft.compiler.planning.schedule import Schedule
from weft.compiler.planning.signature import Direction, Dtypes, Signature, Widths
from weft.ir.attention import Attention
from weft.runtime.driver import Resolved, resolve

DENSE = Attention(name="dense")
WANTED = frozenset({"query", "key", "value"})


def signature(shape: Shape, direction: Direction = "forward", arch: str = "sm_90", rope: int = 0) -> Signature:
    """Of calls of these widths and dtype. A key of one head that is wider than the value is a latent cache."""
    widths = Widths(shape.head_dim, shape.value_dim, rope)
    wanted = WANTED if direction == "backward" else frozenset()
    return Signature(direction, arch, Dtypes.all(shape.dtype), widths, wanted=wanted | ({"rope"} if rope else set()))


def absorbed(shape: Shape, arch: str = "sm_90") -> Signature:
    """Of a forward whose value is the first columns of the key."""
    widths = Widths(shape.head_dim, shape.value_dim, value_is_key=True)
    return Signature("forward", arch, Dtypes.all(shape.dtype), widths)


def resolved(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE, direction: Direction = "forward",
) -> Resolved:  # fmt: skip
    """What the driver chooses for one direction."""
    return resolve(attention, signature(shape, direction, hardware.arch), hardware, target, schedule)


def chosen(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE,
) -> Schedule:  # fmt: skip
    """The schedule of a forward and of the backward behind it."""
    forward, backward = (
        resolved(shape, hardware, target, schedule, attention=attention, direction=direction).code.schedule
        for direction in ("forward", "backward")
    )
    return forward.joined(backward)


def planned(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE, count: CountTiles | None = None, notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a forward and of the backward behind it."""
    found = [
        resolved(shape, hardware, target, schedule, attention=attention, direction=direction)
        for direction in ("forward", "backward")
    ]
    said = tuple(dict.fromkeys(note for resolved in found for note in resolved.notes))
    codes, traits = [resolved.code for resolved in found], facts_of(attention).traits
    return make_plan(str(attention.name), shape, hardware, codes, traits, count=count, notes=(*said, *notes))
