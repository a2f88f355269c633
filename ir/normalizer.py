"""What turns the scores that a query sees into the weights of their values: records, found by name."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import NoneType
from typing import Literal

from .errors import Problem, WeftError, shown


@dataclass(frozen=True)
class Normalizer:
    """One way from scores to weights. Hidden pairs weigh 0, and a row that sees nothing gives 0, under each.

    What it is, and no more: the texts that compute it stand in codegen/normalizers.py.
    """

    name: str  # an identifier, as in Attention(normalizer="softmax")
    saves: Literal["lse", "nothing"]  # what a forward keeps of each row, from which the backward finds the weights
    # of a visible pair where it depends on that pair alone: an expression of `score`, which is 0 where the score is
    # -inf; None where it depends on the row, by a rule in ir/reference.py
    weight: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise WeftError(f"Normalizer: expected name to be an identifier, got {shown(self.name)}")
        if not isinstance(self.saves, str) or self.saves not in ("lse", "nothing"):
            raise WeftError(f"Normalizer {self.name}: expected saves to be 'lse' or 'nothing', got {shown(self.saves)}")
        if not isinstance(self.weight, (str, NoneType)) or self.saves_lse != (self.weight is None):
            raise WeftError(
                f"Normalizer {self.name}: expected weight=, an expression of `score`, where nothing is saved and there "
                f"alone, got saves={self.saves!r} and weight={shown(self.weight)}"
            )

    @property
    def saves_lse(self) -> bool:
        return self.saves == "lse"


SOFTMAX = Normalizer("softmax", saves="lse")  # exp(score - lse)
# Ramapuram et al. 2024, arXiv 2409.04431; with their bias -log(n): score=score - weft.log(1.0 * kv_len)
SIGMOID = Normalizer("sigmoid", saves="nothing", weight="sigmoid(score)")
# Wortsman et al. 2023, arXiv 2309.08586; with their 1 / n: scale=weft.rsqrt(1.0 * head_dim) / kv_len. At a score of 0
# the derivative is 0, as that of torch.relu; `maximum` has a half there.
RELU = Normalizer("relu", saves="nothing", weight="where(score <= 0.0, 0.0, score)")
_registered = {normalizer.name: normalizer for normalizer in (SOFTMAX, SIGMOID, RELU)}


def _names(text: str) -> set[str]:
    """What an expression reads, by its syntax alone: the language is not known here. Nothing of what is none."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return set()
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}


def register(normalizer: Normalizer) -> None:
    """Make a normalizer known by its name.

    Raises WeftError where another one has the name already, and for a weight that is no expression of `score` alone.
    """
    if normalizer.weight is not None and (read := _names(normalizer.weight)) != {"score"}:
        raise WeftError(
            f"Normalizer {normalizer.name}: expected weight to be an expression of `score` alone, got "
            f"{normalizer.weight!r}" + (f", which reads {', '.join(sorted(read))}" if read else "")
        )
    if _registered.setdefault(normalizer.name, normalizer) != normalizer:
        raise WeftError(f"normalizer: {normalizer.name!r} is another one already; choose a name that is free")


def unregister(name: str) -> None:
    """Take a normalizer away again."""
    del _registered[name]


def normalizers() -> tuple[str, ...]:
    """Names of all normalizers."""
    return tuple(_registered)


def normalizer_named(name: str) -> Normalizer:
    """The normalizer of that name. Raises WeftError that lists the known ones where there is none."""
    if not isinstance(name, str) or name not in _registered:
        problem = Problem(option="normalizer", expected=f"one of {', '.join(_registered)}", got=shown(name))
        raise WeftError.of("", problem)
    return _registered[name]
