"""What models of transformers get for a mask: to them a tensor of all pairs, to Weft the rule that it follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codegen.torch_private import constant_while_tracing
from ..ir.caller import warn
from ..ir.errors import UnavailableError

if TYPE_CHECKING:
    from .over_ranks import Sharded

NAME = "weft"
UNKNOWN = -2  # in place of a count of writes, which it never equals


@dataclass(eq=False)
class Rule:
    """Which pairs [batch, 1, queries, keys] see each other, as an expression.

    text: bool expression of `q_idx`, `kv_idx`, `batch` and the tensors `t0`, `t1`, ... q_first: index of the first
    query, an int or a tensor on the device. kv_first: index of the first key; 0 for a rule that a shift of both leaves
    as it is. seen: bool [batch, keys], keys that are no padding, or None. over: how its sequence is divided over ranks
    (`over_ranks.Sharded`), where the shape is that of the rows of one.
    """

    shape: tuple[int, int, int, int]
    text: str = "True"
    tensors: tuple[Tensor, ...] = ()
    q_first: int | Tensor = 0
    kv_first: int = 0
    seen: Tensor | None = None
    over: Sharded | None = None

    def __repr__(self) -> str:
        return f"Rule({list(self.shape)}, {self.text}{'' if self.seen is None else ', padding'})"

    @property
    def hides_nothing(self) -> bool:
        """Whether it holds for any queries and keys."""
        return self.text == "True" and self.seen is None and self.over is None

    def to(self, device: torch.device) -> Rule:
        """On another device: layers of a model may lie on several."""
        q_first = self.q_first.to(device) if isinstance(self.q_first, Tensor) else self.q_first
        seen = None if self.seen is None else self.seen.to(device)
        return replace(self, tensors=tuple([t.to(device) for t in self.tensors]), q_first=q_first, seen=seen)

    def of_first_keys(self, count: int) -> Rule:
        """For fewer keys: layers cut a mask to the keys that they have."""
        seen = None if self.seen is None else self.seen[:, :count]
        return replace(self, shape=(*self.shape[:3], count), seen=seen)


class Mask(Tensor):
    """A bool tensor [batch, 1, queries, keys], True where a query sees a key, that is made when a model computes with
    it. `attention` takes the rule, and needs no tensor.

    It lies on torch's meta device, so that nothing can read numbers past `__torch_function__`.

    rule: what it follows. pairs: makes the tensor. place: the device that the tensor is made on. made: the tensor, once
    a model has computed with it. version: how often it had been written to then. base: the mask that this is cut from.
    """

    rule: Rule
    pairs: Callable[[], Tensor]
    place: torch.device
    made: Tensor | None
    version: int
    base: Mask | None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.place.type == "cpu"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Mask({self.rule!r})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _OF_THE_SHAPE:
            return super().__torch_function__(function, types, args, kwargs)
        if function in _SUBTRACTS:
            raise UnavailableError(
                f"{NAME}: the model subtracts its mask, which is of bools, as under sdpa; load the model with "
                'attn_implementation="eager"'
            )
        as_rule = _KEEP_THE_RULE.get(function)
        if as_rule is not None and isinstance(args[0], Mask) and not written(args[0]):
            found = as_rule(*args, **kwargs)
            if found is not None:
                return found
        warn_that_it_is_made(getattr(function, "__name__", str(function)))
        if function in _ADDS and not kwargs and len(args) == 2:
            return function(*added(*args))
        found = function(*with_tensors(args), **with_tensors(kwargs))
        if function in _SHARE_UNCOUNTED:
            written_from_now_on(args[0])
        return found

    def set_(self, *_: Any, **__: Any) -> Tensor:
        raise UnavailableError(
            f"{NAME}: the model gives its mask other memory (Tensor.set_): clone the mask before, or load the model "
            'with attn_implementation="sdpa"'
        )


def handed(rule: Rule, pairs: Callable[[], Tensor], device: torch.device | str, base: Mask | None = None) -> Mask:
    """A mask that follows `rule`, and becomes what `pairs` gives where a model computes with it."""
    found = torch.empty(rule.shape, dtype=torch.bool, device="meta").as_subclass(Mask)
    found.rule = rule
    found.pairs = pairs
    found.place = torch.device(device)
    found.made = None
    found.version = 0
    found.base = base
    return found


def tensor_of(mask: Mask) -> Tensor:
    """The tensor that stands for a mask, made once: what a model writes into it stays."""
    if mask.made is None:
        mask.made = mask.pairs()
        mask.version = writes(mask.made)
    return mask.made


def written(mask: Mask) -> bool:
    """Whether the tensor of a mask may differ from its rule by now."""
    if mask.base is not None and written(mask.base):
        return True
    made = mask.made
    return made is not None and (writes(made) < 0 or writes(made) != mask.version)


def written_from_now_on(mask: Any) -> None:
    """The memory of its tensor is shared with what torch counts no writes of, as a numpy array or `.data`."""
    while isinstance(mask, Mask):
        mask.version = UNKNOWN
        mask = mask.base


def writes(made: Tensor) -> int:
    """How often a tensor and its views were written to; -1 where torch does not say."""
    return -1 if torch.compiler.is_compiling() or made.is_inference() else made._version


def with_tensors(given: Any) -> Any:
    """Arguments of a function of torch, with tensors in place of masks."""
    if isinstance(given, Mask):
        return tensor_of(given)
    if isinstance(given, dict):
        return {name: with_tensors(part) for name, part in given.items()}
    if type(given) in (list, tuple):
        return type(given)([with_tensors(part) for part in given])
    return given


def added(a: Any, b: Any) -> tuple[Any, Any]:
    """The two terms of a sum. A mask that is added to floats is 0 where a key is seen, else their lowest number.

    Models that compute attention themselves expect that of a mask.
    """
    floats = next((given for given in (a, b) if isinstance(given, Tensor) and given.is_floating_point()), None)
    if floats is None:
        return with_tensors(a), with_tensors(b)
    hidden = torch.finfo(floats.dtype).min
    one, other = (
        torch.where(tensor_of(given), 0.0, hidden).to(floats.dtype) if isinstance(given, Mask) else given
        for given in (a, b)
    )
    return one, other


# -- what leaves a mask a rule: each gives a mask, or None where it does not
def _itself(mask: Mask, *_: Any, **__: Any) -> Mask:
    return mask


def _copied(mask: Mask, *_: Any, **__: Any) -> Mask | None:
    return handed(mask.rule, mask.pairs, mask.place) if mask.base is None else None


def _moved(mask: Mask, *given: Any, device: Any = None, dtype: Any = None, **_: Any) -> Mask | None:
    """`mask.to(...)`, where that asks for another device alone."""
    for each in given:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            device, dtype = each.device, each.dtype
        elif isinstance(each, (str, torch.device)):
            device = each
        elif not isinstance(each, bool) and each is not None:
            return None
    if dtype is not None and dtype is not torch.bool:
        return None
    place = mask.place if device is None else torch.device(device)
    if place == mask.place:
        return mask
    if mask.base is not None:
        return None
    return handed(mask.rule.to(place), lambda: mask.pairs().to(place), place)


def _cut(mask: Mask, at: Any) -> Mask | None:
    """`mask[:, :, :, :keys]`, however it is written."""
    at = at if isinstance(at, tuple) else (at,)
    if len(at) > 1 and at[0] is Ellipsis:
        at = (slice(None),) * (5 - len(at)) + at[1:]
    if len(at) != 4 or not all(isinstance(part, slice) for part in at):
        return None
    if not all(part.start is None and part.stop is None and part.step is None for part in at[:3]):
        return None
    start, stop, step = at[3].start, at[3].stop, at[3].step
    if not (start is None or (isinstance(start, int) and start == 0)) or step is not None:
        return None
    if stop is None:
        return mask
    if not isinstance(stop, int) or stop < 0:
        return None
    if stop >= mask.rule.shape[3]:
        return mask
    return handed(mask.rule.of_first_keys(stop), lambda: tensor_of(mask)[..., :stop], mask.place, mask)


_KEEP_THE_RULE: dict[Any, Callable[..., Mask | None]] = {
    Tensor.contiguous: _itself, Tensor.detach: _itself, Tensor.bool: _itself, Tensor.requires_grad_: _itself,
    Tensor.clone: _copied, torch.clone: _copied, Tensor.to: _moved, Tensor.__getitem__: _cut,
}  # fmt: skip
_SUBTRACTS = frozenset({
    torch.sub, torch.subtract, torch.rsub, torch.neg, Tensor.sub, Tensor.sub_, Tensor.subtract, Tensor.__sub__,
    Tensor.__rsub__, Tensor.__isub__, Tensor.neg, Tensor.__neg__,
})  # fmt: skip
# these share memory with the tensor, and torch counts no writes through them
_SHARE_UNCOUNTED = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]
)
_ADDS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__})
_QUESTIONS = [name for name in dir(Tensor) if name.startswith("is_") and name != "is_nonzero"]
_METHODS = "size dim stride numel nelement element_size storage_offset untyped_storage _is_view".split() + _QUESTIONS
_ATTRIBUTES = "shape ndim dtype layout requires_grad grad grad_fn itemsize nbytes retains_grad _base _version".split()
_ATTRIBUTES += _QUESTIONS
# what is said of a tensor without its numbers; a version of torch may have less
_OF_THE_SHAPE = frozenset(
    [getattr(Tensor, name) for name in _METHODS if callable(getattr(Tensor, name, None))]
    + [getattr(Tensor, name).__get__ for name in _ATTRIBUTES if not callable(getattr(Tensor, name, len))]
    + [Tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel]  # type: ignore[attr-defined]
)


@constant_while_tracing
def warn_that_it_is_made(function: str) -> None:
    """Once for each function."""
    _warn_that_it_is_made(function)


@cache
def _warn_that_it_is_made(function: str) -> None:
    warn(
        f"{NAME}: the model computes with its mask itself ({function}): the mask is made as a tensor [batch, 1, "
        "queries, keys], in as much memory as under sdpa"
    )
