"""Defects planted on purpose, one at a time: each must be caught, or the fuzzer has a gap.

    python -m tests.fuzz.mutants                 all of them, three seeds each: calls until each is caught
    python -m tests.fuzz.mutants delta_forgotten 1

Every trial is a process of its own with an empty cache. A mutant changes a function of Weft, or text that it generates;
one that changes nothing any more, because that text was rewritten, is reported as such and not as caught; a unit test
(tests/fuzz/test_fuzz_mutants.py) says so without running one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from weft.codegen import generate
from weft.compiler.analysis.tiles import programs
from weft.compiler.analysis.values.affine import plus
from weft.ir.operators import OPERATORS

from .calls import ON_A_GPU
from .run import Plan, fuzz, variant_calls

MOST = {"cpu": 2000, "interpret": 300, "triton": 600, "hopper": 600}  # calls before a mutant counts as missed
SEEDS = (1, 2, 3)
_changed = 0  # how often generated text was changed in this process


# -- ways to plant -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class InText:
    """Every match in a generated module is replaced."""

    pattern: str
    replacement: str

    def plant(self) -> None:
        finished = generate._tidy

        def tidy(text: str) -> str:
            global _changed
            text, count = re.subn(self.pattern, self.replacement, finished(text))
            _changed += count
            return text

        generate._tidy = tidy


@dataclass(frozen=True)
class Instead:
    """An attribute of a module, `name` with dots for one of a class, is replaced by make(attribute)."""

    module: str
    name: str
    make: Callable[[Any], Any]

    def owner(self) -> tuple[Any, str]:
        """What holds the attribute, and its name there."""
        owner: Any = import_module(f"weft.{self.module}")
        *path, last = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, last

    def plant(self) -> None:
        global _changed
        owner, last = self.owner()
        setattr(owner, last, self.make(owner.__dict__[last]))
        _changed += 1


@dataclass(frozen=True)
class OfOperator:
    """Texts of an operator's record are replaced: that of tiles, that of numbers, or both."""

    name: str
    texts: tuple[tuple[str, str], ...]

    def plant(self) -> None:
        global _changed
        OPERATORS[self.name] = dataclasses.replace(OPERATORS[self.name], **dict(self.texts))  # type: ignore[arg-type]
        _changed += 1


Defect = InText | Instead | OfOperator


@dataclass(frozen=True)
class Mutant:
    name: str
    target: str
    defect: Defect


# -- what is planted in Python -----------------------------------------------------------------------------------------
def _full_too_early(rows: Any) -> Any:
    """One more row counts as full than is."""

    def wrong(*arguments: Any) -> Any:
        found = rows(*arguments)
        return dataclasses.replace(found, full_hi=plus(found.full_hi, 1))

    return wrong


def _names_twice(fresh: Any) -> Any:
    """Two shared parts get one name."""

    def wrong(prefix: str, exprs: Any) -> Iterator[str]:
        for name in fresh(prefix, exprs):
            yield from [name] * (2 if prefix == "t" else 1)  # those of shared parts

    return wrong


def _swapped_slopes(rule: Any) -> Any:
    def wrong(self: Any, variable: Any) -> Any:
        condition, a, b = self.args
        return type(self)(condition, b.diff(variable), a.diff(variable))

    return wrong


def _slope_of_abs(rule: Any) -> Any:
    return lambda self, variable: self.args[0].diff(variable)


def _truncating(division: Any) -> Any:
    """Tiles are divided as C divides."""

    def wrong(self: Any, op: Any, args: Any, written: str) -> Any:
        tiles = op.name == "floordiv" and not (
            self.dialect.is_gpu or self.scalar_code or all(map(self.is_number, args))
        )
        return _TRUNCATED if tiles else division(self, op, args, written)

    return wrong


def _to_the_next_head(scatter: Any) -> Any:
    return lambda gradient, total, call, result: scatter(gradient, total.roll(1, 1), call, result)


def _whatever_the_keys(place: Any) -> Any:
    """Sequences with as many queries count as equal, however many keys they have."""

    def wrong(i: int, r: Any, packed: bool) -> tuple[int, ...]:
        return (r.q_len, r.number - i, r.row - i * (not packed), r.q_first - i * r.q_len * packed)

    return wrong


def _whosever(rows_of: Any) -> Any:
    """Gradients of reads are added up for the first sequence."""

    def wrong(*arguments: Any) -> Any:
        own, exists = rows_of(*arguments)
        return own | {"batch": own["batch"] * 0}, exists

    return wrong


def _downward(upward: Any) -> Any:
    """Tiles are rounded down at both ends."""
    return programs._downward


def _numbers(behind_rows: Any) -> Any:
    return lambda facts, tables=(): "numbers"


def _never(unknown: Any) -> Any:
    return property(lambda facts: False)


def _always_aligned(make: Any) -> Any:
    def wrong(tensors: Any) -> Any:
        found = make(tensors)
        return lambda given: (True, found(given)[1])

    return wrong


def _pages_of_the_first(runs_of: Any) -> Any:
    """All sequences have the row of the table that is the first one's."""

    def wrong(rows: Any, packed: bool, sink: bool, table: Any) -> Any:
        return runs_of(rows, packed, sink, None if table is None else table[:1].expand_as(table))

    return wrong


_TILES, _SYMBOLIC = "compiler.analysis.tiles.programs", "compiler.analysis.values.symbolic"
_TRUNCATED = "torch.div(torch.as_tensor({0}), torch.as_tensor({1}), rounding_mode='trunc')"
_ON_CPU: dict[str, Defect] = {
    "tile_bound_rounded_down": Instead(_TILES, "_upward", _downward),
    "full_tile_too_early": Instead(_TILES, "_rows", _full_too_early),
    "kv_head_of_another_group": InText(r"all_heads // group,", "(all_heads // group + 1) % kv_heads,"),
    "floor_div_truncates": Instead("codegen.dialects", "Printer._division", _truncating),
    "lse_in_base_2": InText(r"(mantissa\.log2\(\)\)) \* LN_2", r"\1"),
    "dlse_added": InText(r"minus_delta \+ dlse", "minus_delta - dlse"),
    "delta_forgotten": InText(r"product\(values, douts, minus_delta\)", "product(values, douts)"),
    "shared_names_collide": Instead("compiler.analysis.values.cse", "_unused", _names_twice),
    "le_printed_as_lt": OfOperator("le", (("tile", "({0} < {1})"), ("number", "({0} < {1})"))),
    "offset_of_the_first_row": InText(r"q_offset\.tolist\(\)", "[int(q_offset[0])] * len(q_offset)"),
    "slopes_of_where_swapped": Instead(_SYMBOLIC, "_Where._eval_derivative", _swapped_slopes),
    "slope_of_abs_always_1": Instead(_SYMBOLIC, "_Abs._eval_derivative", _slope_of_abs),
    "scale_missing_in_dquery": InText(r"return found \* self\.scale", "return found"),
    "read_gradient_to_next_head": Instead("runtime.run.gradients", "scatter", _to_the_next_head),
    "hidden_nan_kept": InText(r"if math\.isnan\(scores\.sum\(\)\):", "if False:"),
    "hidden_gradient_kept": InText(r"if math\.isnan\(gradients\.sum\(\)\):", "if False:"),
    "key_gradient_of_last_tile": InText(
        r"add_product\(total, dscore, queries\.mT\)", "total.copy_(product(dscore, queries.mT))"
    ),
    "small_ints_wrap": InText(r"(arg_\w+\[[^\n\]]*\])\.long\(\)", r"\1"),
    "heads_of_a_long_call": InText(r"slice\(first, end \* group,", "slice(kv * group, end * group,"),
    "one_hidden_key_overlooked": InText(r"if n_seen < kv_len:", "if n_seen + 1 < kv_len:"),
    "equal_queries_equal_keys": Instead("codegen.launch.runs", "_place", _whatever_the_keys),
    "read_gradient_to_first_sequence": Instead("runtime.run.gradients", "rows_of", _whosever),
    "sink_beside_the_output": InText(r"return keys / total", "return torch.ones_like(total)"),
    "sink_of_another_head": InText(r"x\.squeeze\(2\) if", "x.squeeze(2).flip(1) if"),
    "sink_gradient_without_dlse": InText(
        r"dsink = \(sink_weights \* minus_delta\)", "dsink = (sink_weights * -(douts * out[:, :, :, here]).sum(-1))"
    ),
    "sigmoid_in_base_2": InText(r"\.mul_\(LN_2\)\.sigmoid_\(\)", ".sigmoid_()"),
    "one_of_the_heads_that_share": InText(r"dread\.sum\(dim, keepdim=True\)", "dread.narrow(dim, 0, 1)"),
    "gradient_of_values_not_dropped": InText(r"weights \* kept", "weights * 1.0"),
    "all_heads_drop_the_same": InText(
        r"kept_pairs\(seed, batch, head, q_pos", "kept_pairs(seed, batch, head * 0, q_pos"
    ),
    "pages_of_the_first_sequence": Instead("codegen.targets.cpu.launcher", "runs_of", _pages_of_the_first),
    "division_by_a_reciprocal": OfOperator("div", (("tile", "({0} * (1.0 / {1}))"),)),
    "rsqrt_of_one_more": OfOperator("rsqrt", (("number", "(1.0 / math.sqrt({0} + 1))"),)),
}
_IN_THE_INTERPRETER: dict[str, Defect] = {
    "stride_of_another_dimension": InText(r"\* s1_(\w+)", r"* s0_\1"),
    "last_partial_tile_unmasked": InText(r"kv_rows\[None, :\] < kv_len", "kv_rows[None, :] <= kv_len"),
    "sign_of_scale_trusted": Instead("compiler.analysis.tiles.facts", "Facts.scale_sign_unknown", _never),
    "offsets_not_by_batch": InText(r"tl\.load\(q_offset_ptr \+ batch\)", "tl.load(q_offset_ptr)"),
    "rows_behind_a_length_kept": InText(r"tl\.where\(\(q_rows < q_len\)\[:, None\], (.*), 0\.0\)", r"\1"),
    "first_sequence_bottom_right": InText(r"q_offset = kv_len - q_len", "q_offset = 0"),
    "packed_keys_of_the_queries": InText(r"rows_of\(cu_kv, batch, n_sequences", "rows_of(cu_q, batch, n_sequences"),
    "sink_left_out_of_lse": InText(r"return top \+ tl\.log2\(total\) \* LN_2,", "return row_lse,"),
    "sink_gradient_of_the_other_sign": InText(r"dsink = -tl\.sum", "dsink = tl.sum"),
    "slope_of_sigmoid_not_falling": InText(r"p \* \(1\.0 - p\) \* dp", "p * dp"),
    "diagonals_below_dropped": InText(r"tl\.where\(i \+ k >= BLOCK_KV, turned, 0\.0\)", "0.0 * turned"),
    "shared_by_one_batch_row": InText(r"n_steps = (\w+) \* batches", r"n_steps = \1"),
    "gradient_of_weights_not_dropped": InText(r"dp = tl\.where\(kept, dp \* ", "dp = tl.where(kept | True, dp * "),
    "halves_of_words_swapped": InText(r"words << 17, words << 1\)", "words << 1, words << 17)"),
    "table_of_the_first_sequence": InText(
        r"tl\.cast\(batch, tl\.int64\) \* table_row", "tl.cast(batch * 0, tl.int64) * table_row"
    ),
    "first_rows_of_a_page": InText(
        r"at_row\(start, kv_first % PAGE, row_stride\)", "at_row(start, kv_first * 0, row_stride)"
    ),
    "parts_weigh_alike": InText(
        r"part = tl\.exp2\(\(own - reference\) \* LOG2_E\)", "part = tl.where(has_tiles, 1.0, 0.0)"
    ),
    "long_sequences_left_out": InText(r"is_long = \(room > 64\)", "is_long = (room > 96)"),
    "floor_div_truncates_on_gpu": InText(r"quotient - 1, quotient\)", "quotient, quotient)"),
    "hidden_times_0": InText(r"= tl\.where\(allowed, (\w+), 0\.0\)", r"= \1 * allowed.to(tl.float32)"),
}
_ON_A_GPU: dict[str, Defect] = {
    "mixed_alignment_ignored": Instead("codegen.launch.launcher", "alignment", _always_aligned),
}
_ON_HOPPER: dict[str, Defect] = {
    "scores_defined_everywhere": Instead("compiler.analysis.tiles.facts", "Facts.behind_rows", _numbers),
}
_BY_TARGET = {"cpu": _ON_CPU, "interpret": _IN_THE_INTERPRETER, "triton": _ON_A_GPU, "hopper": _ON_HOPPER}
MUTANTS = tuple(
    Mutant(name, target, defect) for target, planted in _BY_TARGET.items() for name, defect in planted.items()
)


# -- one trial, in this process ----------------------------------------------------------------------------------------
def trial(mutant: Mutant, seed: int) -> str:
    """`caught <calls> <variant> wrong` (or raised), `missed <calls>`, or `stale` where it changed nothing."""
    calls = 0
    with tempfile.TemporaryDirectory() as folder, _sound_process(folder, mutant.target) as sound:
        mutant.defect.plant()
        for event in fuzz(seed, MOST[mutant.target], [mutant.target], Plan(shrink=False)):
            calls += event.kind != "unused"
            if event.failure is not None and not _fails(sound, event.failure.seed):
                return f"caught {calls} {event.failure.seed} {event.kind}"
    return f"missed {calls}" if _changed else "stale"


@contextmanager
def _sound_process(folder: str, target: str) -> Iterator[subprocess.Popen[str]]:
    """A process without the mutant, which says of variants whether they fail there too."""
    command = [sys.executable, "-m", "tests.fuzz.mutants", target, "--sound"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=_environment(folder), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _fails(sound: subprocess.Popen[str], variant: str) -> bool:
    assert sound.stdin is not None and sound.stdout is not None
    print(variant, file=sound.stdin, flush=True)
    return sound.stdout.readline().strip() == "fails"


def answer(target: str) -> None:
    """What the sound process does: a line for each variant that it is asked of."""
    for line in sys.stdin:
        found = any(e.failure is not None for e in variant_calls(line.strip(), target, Plan(shrink=False)))
        print("fails" if found else "right", flush=True)


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "WEFT_CACHE_DIR": folder}


# -- all of them -------------------------------------------------------------------------------------------------------
def report(mutants: tuple[Mutant, ...], seeds: tuple[int, ...]) -> bool:
    """Print how many calls it takes to catch each; whether all were caught."""
    good = True
    for mutant in mutants:
        found = [_in_a_process(mutant, seed) for seed in seeds]
        caught = [int(f.split()[1]) for f in found if f.startswith("caught")]
        good &= len(caught) == len(found)
        median = f"{statistics.median(caught):6g}" if len(caught) * 2 > len(found) else "     -"
        print(f"{mutant.name:32} {mutant.target:10} {median}   {'; '.join(found)}", flush=True)
    return good


def _in_a_process(mutant: Mutant, seed: int) -> str:
    command = [sys.executable, "-m", "tests.fuzz.mutants", mutant.name, str(seed), "--here"]
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)
    lines = found.stdout.strip().splitlines()
    return lines[-1] if lines else f"failed: {found.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutants")
    parser.add_argument("name", nargs="?", default="", help="one mutant; a target's name: those of that target")
    parser.add_argument("seed", nargs="?", type=int, default=0, help="one seed")
    parser.add_argument("--here", action="store_true", help="plant it in this process")
    parser.add_argument("--sound", action="store_true", help="say of variants on stdin whether they fail without one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = tuple(m for m in MUTANTS if options.name in (m.name, m.target))
    if not options.name:
        chosen = tuple(m for m in MUTANTS if m.target not in ON_A_GPU)
    if options.sound:
        answer(options.name)
        return 0
    if options.here:
        print(trial(chosen[0], options.seed))
        return 0
    print(f"{'mutant':32} {'target':10} median calls, and each seed's")
    return 0 if report(chosen, (options.seed,) if options.seed else SEEDS) else 1


if __name__ == "__main__":
    sys.exit(main())
