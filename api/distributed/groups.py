"""Process groups along the dimensions of a mesh."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..codegen.torch_private import group_named, timeout_of
from ..ir.errors import WeftError, shown
from ..ir.numbers import is_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Dim = str | int


class Groups(NamedTuple):
    """Of this process."""

    every: Any  # along all dimensions that are named
    outer: Any = None  # along each of two
    inner: Any = None


def groups_of(mesh: DeviceMesh | dist.ProcessGroup | None, dim: Dim | tuple[Dim, Dim] | None) -> Groups:
    """Groups along one dimension of a mesh, or two.

    mesh: a group is one already; all ranks where not given. Raises WeftError for dimensions that are none.
    """
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        if dim is not None:
            are = "are dimensions" if isinstance(dim, tuple) else "is a dimension"
            raise WeftError(f"ContextParallel: dim={shown(dim)} {are} of a mesh; pass a DeviceMesh")
        return Groups(mesh or dist.group.WORLD)
    if not hasattr(mesh, "mesh_dim_names"):  # what new_group gives to ranks that it leaves out is a number
        raise WeftError(
            "ContextParallel: expected a DeviceMesh, or a process group that this rank belongs to, got "
            f"{type(mesh).__name__}; ranks outside of a group leave the call to others"
        )
    names: tuple[Dim, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    if isinstance(dim, tuple):
        return _of_two(mesh, names, dim)
    if dim is None and mesh.ndim != 1:
        raise WeftError(
            f"ContextParallel: the mesh has {mesh.ndim} dimensions; pass dim=, one of {', '.join(map(str, names))}, or "
            "two of them, (outer, inner)"
        )
    if dim is not None and dim not in names and not (is_int(dim) and 0 <= dim < mesh.ndim):
        raise WeftError(f"ContextParallel: dim: expected one of {', '.join(map(str, names))}, got {shown(dim)}")
    return Groups(mesh.get_group(0 if dim is None else dim))


def _of_two(mesh: DeviceMesh, names: tuple[Dim, ...], dims: tuple[Dim, ...]) -> Groups:
    numbers = [names.index(d) if d in names else d for d in dims]
    known = all(isinstance(n, int) and 0 <= n < mesh.ndim for n in numbers)
    if len(numbers) != 2 or not known or numbers[0] >= numbers[1]:  # type: ignore[operator]
        raise WeftError(
            f"ContextParallel: dim: expected two of {', '.join(map(str, names))}, in this order, (outer, inner), got "
            f"{shown(dims)}"
        )
    here = mesh.get_coordinate()
    assert here is not None, "a process of the mesh"
    members = mesh.mesh[tuple(slice(None) if n in numbers else at for n, at in enumerate(here))].flatten().tolist()
    if members != sorted(members):  # groups number their ranks so
        raise WeftError(f"ContextParallel: expected a mesh whose ranks ascend along both dimensions, got {members}")
    is_all = members == list(range(dist.get_world_size()))
    every = dist.group.WORLD if is_all else _group_of(members)
    return Groups(every, *(mesh.get_group(n) for n in numbers))


_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # how often, by the group of all ranks


def _group_of(members: list[int]) -> Any:
    """A new group of these ranks, which all of them ask for; other ranks need not know of it."""
    ranks = "_".join(map(str, members))
    times = _made.setdefault(dist.group.WORLD, Counter())
    times[ranks] += 1
    name = hashlib.sha256(f"weft_{ranks}_{times[ranks]}".encode()).hexdigest()  # short, of a thousand ranks too
    with group_named(name):
        return dist.new_group(members, timeout=timeout_of(dist.group.WORLD), use_local_synchronization=True)
