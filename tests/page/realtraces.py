"""Traces of real jobs to look at in pages: the demo, faults of the benchmarks, comparisons, a hang.

    python -m tests.page.realtraces FOLDER [NAME ...]

Leaves FOLDER/NAME/trace for each, beside it the layout file that goes with it (`layout.toml`) and,
where it is held to another trace, that one (`reference`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.diagnosis.traced import traced_with_answers
from tests.distributed.pool import RankPool
from tests.lab.faults import hang, ranks
from tests.lab.faults.setup import Setup, Shape

__all__ = ["REAL", "Made"]

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS, REFERENCE = "tests.lab.faults.rows", "tests.lab.faults.referencerows"
Made = Callable[[RankPool, Path], None]


def demo(_: RankPool, folder: Path) -> None:
    """Trace the job of launcher/demo: FSDP2 x tensor parallelism on four ranks."""
    command = [str(Path(sys.executable).with_name("rankscope")), "run", "--rs-steps", "all"]
    command += ["--rs-out", str(folder / "trace"), "--nproc-per-node", "4"]
    with (folder / "log").open("wb") as log:
        command.append(str(REPOSITORY / "examples" / "fsdp2_tp.py"))
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=300)


def faulty(name: str, world: int) -> Made:
    """Return what traces one row of the fault benchmark."""

    def make(pool: RankPool, folder: Path) -> None:
        setup = Setup(shape=Shape(layers=3, hidden=24), ranks=world, is_faulty=True)
        row = ranks.row_of(FAULTS, name)
        if layout := row.layout_of(setup):
            (folder / "layout.toml").write_text(layout)
        asked = (FAULTS, name, setup, False)
        traced_with_answers(pool, ranks.traced, *asked, folder=folder, world=world, timeout_s=120)

    return make


def compared(name: str, world: int, *, is_faulty: bool = True) -> Made:
    """Return what traces a row that is held to one process, and that process."""

    def make(pool: RankPool, folder: Path) -> None:
        shape = Shape(layers=3, hidden=24)
        setup = Setup(shape=shape, ranks=world, is_faulty=is_faulty)
        asked = (REFERENCE, name, setup, False)
        traced_with_answers(pool, ranks.traced, *asked, folder=folder, world=world, timeout_s=120)
        alone = Setup(shape=shape, ranks=1)
        asked_alone, place = (REFERENCE, name, alone), folder / "alone"
        job = ranks.traced_alone
        traced_with_answers(pool, job, *asked_alone, folder=place, world=1, timeout_s=120)
        (place / "trace").rename(folder / "reference")
        shutil.rmtree(place)

    return make


def hanging(_: RankPool, folder: Path) -> None:
    """Trace a job of which one rank skips a collective, until it stands; then end it."""
    setup = Setup(shape=Shape(layers=3, hidden=24), is_faulty=True)
    with hang.running(setup, folder) as job:
        if not hang.is_stuck(setup, folder):
            raise RuntimeError("the job came to its end")
        hang.asked_until_told(job.trace)


REAL: dict[str, Made] = {
    "demo": demo,
    "clean": faulty("fsdp2-tp", 4),
    "dtype-mismatch": faulty("dtype-left-behind", 4),
    "placement-mismatch": faulty("from-local-lie", 4),
    "replica-mismatch": faulty("shard-order-at-load", 4),
    "gradient-not-reduced": faulty("ddp-bypassed", 2),
    "nonfinite-origin": faulty("infinity", 4),
    "collective-mismatch": faulty("collectives-swapped", 2),
    "group-mismatch": faulty("group-order", 4),
    "recompute-mismatch": faulty("recompute-random-state", 2),
    "parameter-not-updated": faulty("optimizer-too-early", 2),
    "duplicate-data": faulty("same-rows-everywhere", 2),
    "pipeline": faulty("pipeline", 4),
    "diff-divergence": compared("wrong-eps", 1),
    "diff-permutation": compared("transposed-weight", 1),
    "diff-scale": compared("unscaled-embedding", 1),
    "diff-tp": compared("tp-by-hand", 4),
    "diff-topologies": compared("fsdp2-tp", 4, is_faulty=False),
    "hang": hanging,
}
"""Name -> what makes its trace. Those named as a kind of finding have one of that kind."""


def main() -> None:
    place, *names = sys.argv[1:] or sys.exit(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = [str(REPOSITORY / part) for part in ("src", "launcher", ".")]
    os.environ["PYTHONPATH"] = os.pathsep.join(parts)
    pool = RankPool()
    try:
        for name in names or REAL:
            folder = Path(place, name)
            folder.mkdir(parents=True)
            begin = time.monotonic()
            REAL[name](pool, folder)
            print(f"{name:24} {time.monotonic() - begin:5.1f} s", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
