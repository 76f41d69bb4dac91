"""`python -m tests.lab.claims`: recompute from full tensors what reports say.

python -m tests.lab.claims --only gossip           # one program of any board
python -m tests.lab.claims --board unusual         # one board; may be repeated
python -m tests.lab.claims --keep FOLDER           # keep the traces; those that are there are used

Every program of the boards is traced with all its tensors, judged, and each claim of the report is
held to them: the data of its findings (`evidence`) and what its sentences say of values. Diff is
asked twice, with the tensors and by digests alone. 1 where a claim is false.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.lab.faults.__main__ import for_children

BOARDS = {
    "faults": "tests.lab.faults.rows",
    "reference": "tests.lab.faults.referencerows",
    "real": "tests.lab.real.rows",
    "unusual": "tests.lab.unusual.rows",
    "unusual-reference": "tests.lab.unusual.referencerows",
}


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--board", action="append", choices=[*BOARDS], help="all by default")
    parser.add_argument("--only", action="append", default=[], help="a program; may be repeated")
    parser.add_argument("--dtype", action="append", default=[], help="float32 or bfloat16")
    parser.add_argument("--half", choices=("seen", "unseen"), help="of `unusual`; both by default")
    parser.add_argument("--keep", type=Path, help="keep the traces in this folder")
    parser.add_argument("--all", action="store_true", help="print every claim, not the false alone")
    return parser.parse_args()


def main() -> int:
    """Trace, judge and recompute; print what is false, and how much was checked."""
    given = options()
    for_children()
    with tempfile.TemporaryDirectory(prefix="claims-") as name:
        return _held_to_tensors(given, given.keep or Path(name))


def _held_to_tensors(given: argparse.Namespace, folder: Path) -> int:
    from tests.distributed.pool import RankPool
    from tests.lab.claims.recomputed import claims_of

    true: Counter[str] = Counter()
    untold: Counter[tuple[str, str]] = Counter()
    false = runs = 0
    pool = RankPool()
    try:
        for board in given.board or BOARDS:
            for run in _runs(BOARDS[board], given):
                for command, label, claim in claims_of(pool, run, folder / board):
                    runs += claim is None
                    if claim is None:
                        continue
                    if claim.is_true is None:
                        untold[command, _general(claim.why)] += 1
                    elif claim.is_true:
                        true[command] += 1
                    if claim.is_true is False or given.all:
                        false += claim.is_true is False
                        word = {True: "true", False: "FALSE", None: "untold"}[claim.is_true]
                        why = f" ({claim.why})" if claim.why and not claim.is_true else ""
                        print(f"{word}: {label}: {claim.text}{why}", flush=True)
    finally:
        pool.close()
    print(f"{runs} reports; claims that are true: {dict(true)}; false: {false}")
    for (command, why), count in untold.most_common():
        print(f"  not checkable, {command}: {count}: {why}")
    return int(false > 0)


def _general(why: str) -> str:
    return re.sub(r"[\d.,e+-]*\d", "N", why)[:80]


def _runs(table: str, given: argparse.Namespace) -> Iterator[object]:
    from tests.lab.faults.runs import HANG, every_run
    from tests.lab.faults.setup import Shape

    rows = importlib.import_module(table).BY_NAME
    names = [
        name
        for name, row in rows.items()
        if (not given.only or name in given.only)
        and getattr(row, "is_installed", True)
        and given.half in (None, getattr(row, "half", given.half))
    ]
    shape = Shape(layers=3, hidden=16, context=4)
    if names:
        for run in every_run(shape=shape, seeds=1, table=table, only=names, dtypes=given.dtype):
            if run.name != HANG:
                yield replace(run, setup=replace(run.setup, keeps_tensors=True))


if __name__ == "__main__":
    sys.exit(main())
