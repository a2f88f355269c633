"""`make prove`: the masks of the library and random ones, and the record of what is proven.

python -m tests.prove                      the library
python -m tests.prove --random 500         and random masks of the grammar of test_bounds, from seed 0 on
python -m tests.prove --reads 200          and of that of test_survey, which read more tensors
python -m tests.prove --only causal        masks whose name holds a text
python -m tests.prove --record             write compiler/analysis/tiles/proven.json, from the library
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from weft.compiler.analysis.tiles import proven

from . import gallery
from .proving import Proof, Tiles, prove_named, summary
from .solving import SECONDS


def main() -> int:
    options = _options().parse_args()
    refuted = 0
    for title, names in _wanted(options):
        print(f"== {title}", flush=True)
        proofs = list(_proofs(names, options))
        print("\n".join(summary(proofs)), flush=True)
        refuted += sum(p.status == "refuted" for p in proofs)
        if title == "library" and options.record and not options.only:
            _record([p for p in proofs if p.status == "proven"])
    return 1 if refuted else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--random", type=int, default=0, help="random masks of positions")
    parser.add_argument("--reads", type=int, default=0, help="random masks that read tensors by position")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each question")
    parser.add_argument("--without-library", action="store_true", help="random masks alone")
    parser.add_argument("--only", default="", help="masks of the library whose name holds this")
    parser.add_argument("--record", action="store_true", help="write what is proven where explain reads it")
    return parser


def _wanted(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    if not options.without_library:
        yield "library", [name for name in gallery.library() if options.only in name]
    for kind, number in (("random", options.random), ("reads", options.reads)):
        if number:
            yield f"{kind} masks", [f"{kind} {n}" for n in range(options.seed, options.seed + number)]


def _proofs(names: list[str], options: argparse.Namespace) -> Iterator[Proof]:
    work = partial(prove_named, seconds=options.seconds)
    if options.jobs == 1:
        for name in names:
            yield _said(work(name))
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for proof in pool.map(work, names):
            yield _said(proof)


def _said(proof: Proof) -> Proof:
    if proof.status != "proven" or not proof.name.startswith(("random", "reads")):
        print(proof.text, flush=True)
    return proof


def _record(proofs: list[Proof]) -> None:
    """Names by digest of all that is proven."""
    found = {}
    for proof in proofs:
        tiles = Tiles.of(gallery.named(proof.name))
        found[proven.digest(tiles.mask, tiles.kv, tiles.q, tiles.survey)] = proof.name
    proven.write(found)
    print(f"{len(found)} variants recorded in {proven.FILE.name}")


if __name__ == "__main__":
    sys.exit(main())
