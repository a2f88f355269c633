"""Plans and choices for any machine without tensors or a GPU: the driver is asked, as calls ask it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.cost import CountTiles
from weft.compiler.planning.machines.hardware import H200, Hardware
from weft.compiler.planning.plan import Plan, make_plan
from weft.compiler.planning.records import Shape
from weft.compiler.planning.schedule import Schedule
from weft.compiler.planning.signature import Direction, Dtypes, Signature, Widths, class_of
from weft.ir.attention import Attention
from weft.runtime.driver import Resolved, resolve

DENSE = Attention(name="dense")
WANTED = frozenset({"query", "key", "value"})


def widths_of(attention: Attention, shape: Shape) -> Widths:
    """Of a latent variant with one key head: the absorbed form; with several: the expanded one."""
    latent = attention.latent
    if latent is None:
        return Widths(shape.head_dim, shape.value_dim)
    absorbed = shape.kv_heads == 1
    return Widths(shape.head_dim, shape.value_dim, 0 if absorbed else latent.rope, value_is_key=absorbed)


def signature(shape: Shape, arch: str, direction: Direction = "forward", attention: Attention = DENSE) -> Signature:
    """Of calls of these widths and dtype; a backward has the gradients of all main tensors."""
    widths = widths_of(attention, shape)
    wanted = WANTED | ({"rope"} if widths.rope_dim else set()) if direction == "backward" else frozenset()
    lengths = class_of(shape.q_len, shape.kv_len)
    return Signature(direction, arch, Dtypes.all(shape.dtype), widths, wanted=wanted, lengths=lengths)


def resolved(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE, direction: Direction = "forward",
) -> Resolved:  # fmt: skip
    """What the driver chooses for one direction."""
    return resolve(attention, signature(shape, hardware.arch, direction, attention), hardware, target, schedule)


def both(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE,
) -> list[Resolved]:  # fmt: skip
    """Of the forward, and of the backward where there is one."""
    directions: Sequence[Direction] = ("forward", "backward")
    if widths_of(attention, shape).value_is_key:
        directions = ("forward",)
    return [resolved(shape, hardware, target, schedule, attention=attention, direction=d) for d in directions]


def chosen(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE,
) -> Schedule:  # fmt: skip
    """The schedule of all kernels of both directions."""
    first, *rest = (found.code.schedule for found in both(shape, hardware, target, schedule, attention=attention))
    return first.joined(rest[0]) if rest else first


def planned(
    shape: Shape, hardware: Hardware = H200, target: str | None = None, schedule: str | Schedule | None = None,
    *, attention: Attention = DENSE, count: CountTiles | None = None, notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of both directions. count, notes: as of make_plan."""
    codes = [found.code for found in both(shape, hardware, target, schedule, attention=attention)]
    traits = facts_of(attention).traits
    return make_plan(str(attention.name), shape, hardware, codes, traits, count=count, notes=notes)
