"""`python -m tests.lab.faults`: run the benchmark and print its scoreboard.

python -m tests.lab.faults --only ddp-bypassed --seeds 1     # one row
python -m tests.lab.faults --reference                       # `diff` beside a run of one process
python -m tests.lab.faults --oracles                         # the proofs alone, without rankscope
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

FAULTS, REFERENCE = "tests.lab.faults.rows", "tests.lab.faults.referencerows"
"""The modules with the rows that `check` is held to, and with those that `diff` is."""
REPOSITORY = Path(__file__).resolve().parents[3]


def for_children() -> None:
    """Give every process that is started one thread, and the sources on its path."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = [str(REPOSITORY / part) for part in ("src", "launcher", ".")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = parts


def parser(prog: str = "python -m tests.lab.faults", seeds: int = 5) -> argparse.ArgumentParser:
    """Return the command line of docs/lab/fault-benchmark.md; `seeds` if none is said."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a row; may be repeated")
    parser.add_argument("--seeds", type=int, default=seeds, help="how many, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--dtype", action="append", default=[], help="float32 or bfloat16")
    parser.add_argument("--ranks", action="append", default=[], type=int, help="2 or 4")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--reference", action="store_true", help="what `diff` is held to")
    parser.add_argument("--oracles", action="store_true", help="the proofs alone")
    parser.add_argument("--json", action="store_true", help="print JSON, not the table")
    parser.add_argument("--keep", type=Path, help="keep every trace in this folder")
    return parser


def main(
    options: argparse.Namespace, table: str, summary: Callable[..., str] = lambda outcomes: ""
) -> int:
    """Run what was asked for of a table, the module with its rows. Return 0 where every fault is
    named, nothing else is, and every proof holds. `summary`: what stands below the scoreboard."""
    for_children()
    from tests.distributed.pool import RankPool
    from tests.lab.faults.runs import about, every_run
    from tests.lab.faults.setup import Shape

    names = about(table)
    unknown = sorted(set(options.only) - set(names))
    if unknown:
        print(f"no row is called {unknown[0]!r}: choose from {', '.join(names)}", file=sys.stderr)
        return 2
    runs = [
        *every_run(
            shape=Shape(layers=options.layers, hidden=options.hidden),
            seeds=options.seeds,
            first_seed=options.first_seed,
            only=options.only,
            dtypes=options.dtype,
            ranks=options.ranks,
            table=table,
        )
    ]
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            place = options.keep or Path(folder)
            if options.oracles:
                return prove(pool, runs, place, options)
            return score(pool, runs, place, options, summary)
    finally:
        pool.close()


def folder_of(place: Path, number: int) -> Path:
    return place / f"{number:04d}"


def show(text: str) -> None:
    """Put a text in the place of the last line, where that is on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def prove(pool: object, runs: Sequence[object], place: Path, options: argparse.Namespace) -> int:
    """Run every oracle; a fault must be proved, and its absence too."""
    from tests.lab.faults.runs import proved

    wrong = 0
    for number, run in enumerate(runs):
        show(f"{number + 1} of {len(runs)}: {run.label}")
        begun = time.monotonic()
        try:
            said = proved(pool, run, folder_of(place, number))
        except (AssertionError, TimeoutError) as error:
            said, is_right = str(error), False
        else:
            is_right = bool(said) == run.setup.is_faulty
        wrong += not is_right
        show("")
        mark = "proved" if is_right else "NOT PROVED"
        print(f"{mark:10} {run.label} ({time.monotonic() - begun:.1f} s): {said}", flush=True)
    print(f"{len(runs) - wrong} of {len(runs)} proofs hold")
    return int(wrong > 0)


def score(
    pool: object,
    runs: Sequence[object],
    place: Path,
    options: argparse.Namespace,
    summary: Callable[..., str],
) -> int:
    """Score every run, each on stderr as it comes, the table on stdout at the end: after an
    interrupt of what was run until then."""
    from tests.lab.faults import board
    from tests.lab.faults.runs import scored

    outcomes = []
    with contextlib.suppress(KeyboardInterrupt):
        for number, run in enumerate(runs):
            show(f"{number + 1} of {len(runs)}: {run.label}")
            folder = folder_of(place, number)
            outcome = scored(pool, run, folder, is_kept=options.keep is not None)
            outcomes.append(outcome)
            show("")
            mark = "as expected" if board.is_perfect(outcome) else "WRONG"
            kept = f" [{folder}]" if options.keep else ""
            print(
                f"{mark:11} {outcome.seconds:5.1f} s  {run.label}: {outcome.score.said}{kept}",
                file=sys.stderr,
                flush=True,
            )
    show("")
    found = board.lines(outcomes)
    if options.json:
        print(json.dumps(board.as_json(found, outcomes), indent=1))
    else:
        print("\n\n".join(filter(None, [board.table(found), summary(outcomes)])))
    is_perfect = all(board.is_perfect(outcome) for outcome in outcomes)
    return int(not is_perfect or len(outcomes) < len(runs))


if __name__ == "__main__":
    asked = parser().parse_args()
    sys.exit(main(asked, REFERENCE if asked.reference else FAULTS))
