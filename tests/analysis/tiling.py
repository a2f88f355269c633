"""Brute force for tile bounds: the mask on every pair of positions, and the class of every tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from weft.compiler.analysis.tiles.bounds import kv_bounds, q_bounds
from weft.compiler.analysis.tiles.programs import tile_program, tile_ranges
from weft.compiler.analysis.tiles.results import TileProgram
from weft.ir.canonical import canonical
from weft.ir.expr import Const, Expr, Load, Scalar, Symbol, expression
from weft.ir.operators import OPERATORS
from weft.ir.walk import fold


def _divided(divide: Callable[..., np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division by zero gives 0, as the program's own evaluator has it."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where(b == 0, 0, divide(a, np.where(b == 0, 1, b)))


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and,
    "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not, "abs": np.abs, "minimum": np.minimum,
    "maximum": np.maximum, "where": np.where, "div": np.true_divide, "floor": lambda x: np.floor(x).astype(np.int64),
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0.0), "logsigmoid": lambda x: -np.logaddexp(-x, 0.0),
    "floordiv": lambda a, b: _divided(np.floor_divide, a, b), "mod": lambda a, b: _divided(np.mod, a, b),
}  # fmt: skip


def evaluate(root: Expr, env: Mapping[str, object]) -> np.ndarray:
    """Value of an expression over numpy arrays; a tensor operand is an array, read at indices wrapped into it."""

    def leaf(node: Expr) -> np.ndarray:
        match node:
            case Const(value):
                return np.asarray(value)
            case Symbol(name) | Scalar(name):
                return np.asarray(env[name])
            case Load(tensor, index):
                array = np.asarray(env[tensor.name])
                places = np.broadcast_arrays(*(evaluate(i, env) for i in index))
                return array[tuple(p % n for p, n in zip(places, array.shape))]
            case _:
                raise AssertionError(node)

    return fold(root, leaf, lambda op, values: (_NUMPY.get(op) or np.vectorize(OPERATORS[op].python))(*values))


@dataclass(frozen=True)
class Case:
    """A mask with everything that a call would give it."""

    mask: Expr
    q_len: int
    kv_len: int
    block_q: int = 16
    block_kv: int = 16
    q_offset: int | None = None
    operands: Mapping[str, object] = field(default_factory=dict)
    past_end: bool = False  # whether the last tile's last position lies past the length, as in a kernel

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len if self.q_offset is None else self.q_offset

    @property
    def env(self) -> dict[str, object]:
        return {
            "head": 0, "kv_head": 0, "group": 1, "batch": 0, "head_dim": 64, **self.operands,
            "q_len": self.q_len, "kv_len": self.kv_len, "q_offset": self.offset,
        }  # fmt: skip

    def visible(self) -> np.ndarray:
        """The mask on all pairs, [q_len, kv_len]."""
        q_pos = self.offset + np.arange(self.q_len)[:, None]
        env = {**self.env, "q_pos": q_pos, "kv_pos": np.arange(self.kv_len)[None, :]}
        return np.broadcast_to(evaluate(canonical(expression(self.mask)), env), (self.q_len, self.kv_len))


def classes(case: Case) -> np.ndarray:
    """0 empty, 1 edge, 2 full for each tile, by looking at every pair; an incomplete kv or q tile is never full."""
    visible, bq, bk = case.visible(), case.block_q, case.block_kv
    rows, columns = -(-case.q_len // bq), -(-case.kv_len // bk)
    some, every = np.zeros((rows * bq, columns * bk), bool), np.zeros((rows * bq, columns * bk), bool)
    some[: case.q_len, : case.kv_len] = visible
    every[:] = True
    every[: case.q_len, : case.kv_len] = visible
    tiled = lambda x: x.reshape(rows, bq, columns, bk)  # noqa: E731
    return np.where(tiled(every).all((1, 3)), 2, np.where(tiled(some).any((1, 3)), 1, 0))


_PROGRAMS: dict[tuple[str, str], TileProgram] = {}


def program_of(mask: Expr, axis: str) -> TileProgram:
    """The tile program of a mask, made once."""
    key = (str(mask), axis)
    if key not in _PROGRAMS:
        simple = canonical(expression(mask))
        _PROGRAMS[key] = tile_program(kv_bounds(simple) if axis == "kv" else q_bounds(simple))
    return _PROGRAMS[key]


def predicted(case: Case, axis: str) -> np.ndarray:
    """The same table by the tile program; checks that each tile is visited at most once and lies in range."""
    program = program_of(case.mask, axis)
    over_q = axis == "kv"
    rows, step = (case.q_len, case.block_q) if over_q else (case.kv_len, case.block_kv)
    length, block = (case.kv_len, case.block_kv) if over_q else (case.q_len, case.block_q)
    count = -(-length // block)
    found = np.zeros((-(-rows // step), count), int)
    for tile in range(found.shape[0]):
        first = tile * step + (case.offset if over_q else 0)
        size = step if case.past_end else min(step, rows - tile * step)
        ends = ("q_first", "q_last") if over_q else ("kv_first", "kv_last")
        env = {**case.env, ends[0]: first, ends[1]: first + size - 1}
        edge, full = tile_ranges(program, _readable(env), block=block, length=length)
        _visit(edge, full, found[tile], length // block)
    return found if over_q else found.T


def _visit(edge: list[int], full: list[int], row: np.ndarray, complete: int) -> None:
    assert len({*edge, *full}) == len(edge) + len(full), "a tile is visited twice"
    assert all(0 <= t < len(row) for t in edge + full), "a tile lies out of range"
    assert all(t < complete for t in full), "an incomplete tile is called full"
    row[edge] = 1
    row[full] = 2


def _readable(env: dict[str, object]) -> dict[str, object]:
    """Arrays as the callables that the program's evaluator reads tensors by."""

    def reader(array: np.ndarray) -> Callable[..., object]:
        return lambda *index: array[tuple(i % n for i, n in zip(index, array.shape))].item()

    return {k: reader(v) if isinstance(v, np.ndarray) else v for k, v in env.items()}


def assert_sound(case: Case) -> None:
    """Nothing visible is skipped and nothing hidden is called full, for tiles of both axes."""
    truth = classes(case)
    for axis in ("kv", "q"):
        found = predicted(case, axis)
        assert not ((found == 0) & (truth > 0)).any(), f"{axis}: a visible tile is skipped: {case}"
        assert not ((found == 2) & (truth < 2)).any(), f"{axis}: a tile with hidden pairs is called full: {case}"


def assert_exact(case: Case) -> None:
    """Every tile has its true class; a tile cut off by the end of the axis counts as edge."""
    truth = classes(case)
    for axis in ("kv", "q"):
        expected = truth.copy()
        if axis == "kv" and case.kv_len % case.block_kv:
            expected[:, -1] = np.minimum(expected[:, -1], 1)
        if axis == "q" and case.q_len % case.block_q:
            expected[-1] = np.minimum(expected[-1], 1)
        found = predicted(case, axis)
        wrong = np.argwhere(found != expected)
        assert not len(wrong), f"{axis}: tiles {wrong[:4].tolist()} of {case}\nfound\n{found}\nexpected\n{expected}"
