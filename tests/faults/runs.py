"""The runs of the benchmark: which there are, and one of them from start to score."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankscope.errors import RankscopeError
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankFailure, RankPool
from tests.faults import hang, ranks
from tests.faults.checking import report_on
from tests.faults.expected import Score, score
from tests.faults.rows import BY_NAME, ROWS
from tests.faults.setup import Setup, Shape

HANG = "branch-skipped"
TIMEOUT_S = 120.0
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
    """Yield all runs, seed by seed; then, with the first seed, those of faults switched off."""
    chosen = [
        (name, Setup(shape=shape, ranks=world, dtype=dtype), has_fault)
        for name, worlds, its_dtypes, has_fault in _rows()
        for world in worlds
        for dtype in its_dtypes
        if (not only or name in only)
        and (not dtypes or dtype in dtypes)
        and (not ranks or world in ranks)
    ]
    for seed in range(first_seed, first_seed + seeds):
        for name, setup, has_fault in chosen:
            yield Run(name=name, setup=replace(setup, seed=seed, is_faulty=has_fault))
    for name, setup, has_fault in chosen if seeds else ():
        if has_fault:
            yield Run(name=name, setup=replace(setup, seed=first_seed))


def _rows() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], bool]]:
    """Yield name, ranks, dtypes, and whether there is a fault to switch on."""
    for row in ROWS:
        yield row.name, row.ranks, row.dtypes, row.has_fault
    yield HANG, (2,), ("float32", "bfloat16"), True


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


def report_of(pool: RankPool, run: Run, folder: Path) -> Mapping[str, Any]:
    """Trace a run and return the report on it; the hang's job is started as a user would."""
    if run.name == HANG:
        with hang.running(run.setup, folder) as job:
            if not hang.is_stuck(run.setup, folder):
                job.process.wait(TIMEOUT_S)  # for the tree
            return hang.asked_until_told(job.trace)
    row, out = BY_NAME[run.name], folder / "trace"
    folder.mkdir(parents=True)
    layout = row.layout_of(run.setup)
    layout_file = folder / "layout.toml" if layout else None
    if layout_file is not None:
        layout_file.write_text(layout)
    traced(
        pool,
        ranks.traced,
        run.name,
        run.setup,
        folder=folder,
        world=run.setup.ranks,
        timeout_s=TIMEOUT_S,
    )
    return report_on(out, layout_file)


def scored(pool: RankPool, run: Run, folder: Path, *, is_kept: bool = False) -> Outcome:
    """Trace, check and score one run; what fails on the way scores nothing and says why."""
    begun = time.monotonic()
    expected = (hang.expected if run.name == HANG else BY_NAME[run.name].expected)(run.setup)
    try:
        report = report_of(pool, run, folder)
        found = score(report, expected if run.setup.is_faulty else None)
    except (RankFailure, RuntimeError, TimeoutError, RankscopeError) as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        found = Score(
            detected=False, module=False, ranks=False, kind=False, false_alarms=0, said=last
        )
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(run=run, score=found, seconds=time.monotonic() - begun)
