"""The runs of the benchmark: which there are, and one of them from start to score."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rankscope.errors import RankscopeError
from tests.distributed.pool import RankFailure, RankPool
from tests.faults import hang, ranks
from tests.faults.checking import report_on
from tests.faults.expected import Score, score
from tests.faults.rows import BY_NAME, ROWS
from tests.faults.setup import Setup, Shape
from tests.waiting import wait_until

HANG = "branch-skipped"
TIMEOUT_S = 120.0
AHEAD = 2
"""Runs that may have begun while another one's tree is written."""
ABOUT = {row.name: row.about for row in ROWS} | {
    HANG: "one rank skips a branch and its collective: asked about while the job hangs"
}
"""All rows by name, in order, and what is wrong, or special, in each."""
HAS_FAULT = {row.name: row.has_fault for row in ROWS} | {HANG: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program, in one setup."""

    name: str
    setup: Setup

    @property
    def label(self) -> str:
        """What tells it from all others, in one line."""
        setup = self.setup
        state = "faulty" if setup.is_faulty else "off"
        return f"{self.name} {state}, {setup.ranks} ranks, {setup.dtype}, seed {setup.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and what became of it."""

    run: Run
    score: Score
    seconds: float


def every_run(
    *,
    shape: Shape,
    seeds: int,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    first_seed: int = 0,
) -> Iterator[Run]:
    """Yield all runs: rows with a fault on, and with one seed off; the others as they are; the hang
    last."""
    for row in ROWS:
        for world in row.ranks:
            for dtype in row.dtypes:
                if (only and row.name not in only) or (dtypes and dtype not in dtypes):
                    continue
                if ranks and world not in ranks:
                    continue
                setup = Setup(shape=shape, ranks=world, dtype=dtype)
                for is_faulty in (True, False) if row.has_fault else (False,):
                    count = seeds if is_faulty or not row.has_fault else min(seeds, 1)
                    for seed in range(first_seed, first_seed + count):
                        yield Run(
                            name=row.name, setup=replace(setup, is_faulty=is_faulty, seed=seed)
                        )
    if not only or HANG in only:
        for dtype in dtypes or ("float32", "bfloat16"):
            for is_faulty in (True, False):
                for seed in range(first_seed, first_seed + (seeds if is_faulty else min(seeds, 1))):
                    setup = Setup(shape=shape, dtype=dtype, seed=seed, is_faulty=is_faulty)
                    yield Run(name=HANG, setup=setup)


def proved(pool: RankPool, run: Run, folder: Path) -> str:
    """Return what the oracle says is wrong in a run, without rankscope (the hang's job is traced:
    it is started as a user would); "" where all is right."""
    if run.name == HANG:
        with hang.running(run.setup, folder):
            return hang.is_stuck(run.setup, folder)
    said = pool.run(
        ranks.prove, run.name, run.setup, world_size=run.setup.ranks, timeout_s=TIMEOUT_S
    )
    return "; ".join(sorted(set(filter(None, said))))


def begun(pool: RankPool, run: Run, folder: Path) -> Callable[[], Mapping[str, Any]]:
    """Trace a run, and return what waits for its tree and reports on it: relay and collector are
    other processes, so that the next run may begin meanwhile."""
    if run.name == HANG:
        with hang.running(run.setup, folder) as job:
            if not hang.is_stuck(run.setup, folder):
                job.process.wait(TIMEOUT_S)  # for the tree
            answer = hang.check_elsewhere(job.trace)
        return lambda: answer
    row, out = BY_NAME[run.name], folder / "trace"
    folder.mkdir(parents=True)
    layout = row.layout_of(run.setup)
    layout_file = folder / "layout.toml" if layout else None
    if layout_file is not None:
        layout_file.write_text(layout)
    settings = {
        "steps": "all",
        "spool": str(folder / "spool"),
        "drain_seconds": 1,
        "finish_seconds": 0,
    }
    pool.run(
        ranks.traced,
        run.name,
        run.setup,
        str(out),
        settings,
        world_size=run.setup.ranks,
        timeout_s=TIMEOUT_S,
    )
    return lambda: _tree_reported(out, layout_file)


def _tree_reported(out: Path, layout_file: Path | None) -> Mapping[str, Any]:
    if not wait_until((out / "trace.json").exists, TIMEOUT_S):
        raise TimeoutError(f"no tree was written in {TIMEOUT_S} s")
    return report_on(out, layout_file)


def scored(
    pool: RankPool, runs: Sequence[Run], folder: Path, *, is_kept: bool = False
) -> Iterator[Outcome]:
    """Trace, check and score runs, some under way while others end; what fails on the way scores
    nothing and says why. Traces lie in numbered folders."""
    waiting: deque[tuple[Run, Path, float, Callable[[], Mapping[str, Any]]]] = deque()
    for number, run in enumerate(runs):
        place, start = folder / f"{number:04d}", time.monotonic()
        try:
            waiting.append((run, place, start, begun(pool, run, place)))
        except (RankFailure, RuntimeError, TimeoutError) as error:
            waiting.append((run, place, start, partial(_raise, error)))
        if len(waiting) > AHEAD:
            yield _judged(*waiting.popleft(), is_kept)
    for one in waiting:
        yield _judged(*one, is_kept)


def _raise(error: Exception) -> Mapping[str, Any]:
    raise error


def _judged(
    run: Run, place: Path, start: float, reported: Callable[[], Mapping[str, Any]], is_kept: bool
) -> Outcome:
    expected = (hang.expected if run.name == HANG else BY_NAME[run.name].expected)(run.setup)
    try:
        found = score(reported(), expected if run.setup.is_faulty else None)
    except (AssertionError, RuntimeError, TimeoutError, RankscopeError) as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        found = Score(
            detected=False, module=False, ranks=False, kind=False, false_alarms=0, said=last
        )
    if not is_kept:
        shutil.rmtree(place, ignore_errors=True)
    return Outcome(run=run, score=found, seconds=time.monotonic() - start)
