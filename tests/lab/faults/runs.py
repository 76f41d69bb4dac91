"""The runs of the benchmark: which there are, and one of them from start to score."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankscope.errors import RankscopeError
from tests.diagnosis.traced import traced_with_answers
from tests.distributed.pool import RankFailure, RankPool
from tests.lab.faults import hang, ranks
from tests.lab.faults.checking import report_on
from tests.lab.faults.expected import Score, score
from tests.lab.faults.rows import Row
from tests.lab.faults.setup import Setup, Shape

FAULTS = "tests.lab.faults.rows"
HANG = "branch-skipped"
TIMEOUT_S = 120.0
LAYOUT_NAME = "layout.toml"
ABOUT_HANG = "one rank skips a branch and its collective: asked about while the job hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program, in one setup."""

    name: str
    setup: Setup
    table: str = FAULTS
    """The module with the table the program stands in."""

    @property
    def row(self) -> Row | None:
        """The program; None for the job that hangs."""
        return ranks.row_of(self.table, self.name)

    @property
    def about(self) -> str:
        """What is wrong in it, or special."""
        return self.row.about if self.row else ABOUT_HANG

    @property
    def has_fault(self) -> bool:
        """Whether there is a fault to switch on."""
        return self.row.has_fault if self.row else True

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
    proof: str | None = None
    """What the oracle said of the traced run, "" where all is right; None if it was not asked, or
    the run failed."""


def every_run(
    *,
    shape: Shape,
    seeds: int,
    only: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    ranks: Sequence[int] = (),
    first_seed: int = 0,
    table: str = FAULTS,
) -> Iterator[Run]:
    """Yield all runs, seed by seed; then, with the first seed, those of faults switched off."""
    chosen = [
        (name, Setup(shape=shape, ranks=world, dtype=dtype), has_fault)
        for name, worlds, its_dtypes, has_fault in _rows(table)
        for world in worlds
        for dtype in its_dtypes
        if (not only or name in only)
        and (not dtypes or dtype in dtypes)
        and (not ranks or world in ranks)
    ]
    for seed in range(first_seed, first_seed + seeds):
        for name, setup, has_fault in chosen:
            faulty = replace(setup, seed=seed, is_faulty=has_fault)
            yield Run(name=name, setup=faulty, table=table)
    for name, setup, has_fault in chosen if seeds else ():
        if has_fault:
            yield Run(name=name, setup=replace(setup, seed=first_seed), table=table)


def about(table: str = FAULTS) -> dict[str, str]:
    """Return all rows of a table by name, in order, and what is wrong, or special, in each."""
    return {name: Run(name=name, setup=Setup(), table=table).about for name, *_ in _rows(table)}


def _rows(table: str) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], bool]]:
    """Yield name, ranks, dtypes, and whether there is a fault to switch on."""
    for row in importlib.import_module(table).ROWS:
        yield row.name, row.ranks, row.dtypes, row.has_fault
    if table == FAULTS:
        yield HANG, (2,), ("float32", "bfloat16"), True


def proved(pool: RankPool, run: Run, folder: Path) -> str:
    """Return what the oracle says is wrong in a run, without rankscope (the hang's job is traced:
    it is started as a user would); "" where all is right."""
    if run.row is None:
        with hang.running(run.setup, folder):
            return hang.is_stuck(run.setup, folder)
    asked = (run.table, run.name, run.setup)
    said = pool.run(ranks.prove, *asked, world_size=run.setup.ranks, timeout_s=TIMEOUT_S)
    return _joined(said)


def _joined(said: Sequence[str]) -> str:
    """Return what the oracle says on all ranks together."""
    return "; ".join(sorted(set(filter(None, said))))


def report_of(pool: RankPool, run: Run, folder: Path) -> Mapping[str, Any]:
    """Trace a run and return the report on it; the hang's job is started as a user would."""
    return _report_and_proof(pool, run, folder, proves=False)[0]


def _report_and_proof(
    pool: RankPool, run: Run, folder: Path, *, proves: bool
) -> tuple[Mapping[str, Any], str | None]:
    if run.row is None:
        with hang.running(run.setup, folder) as job:
            if not hang.is_stuck(run.setup, folder):
                job.process.wait(TIMEOUT_S)  # for the tree
            return hang.asked_until_told(job.trace), None
    out, said = _traced(pool, run, folder, proves=proves)
    reference = reference_of(pool, run, folder.parent / "references")
    layout_file = folder / LAYOUT_NAME
    report = report_on(out, layout_file if layout_file.exists() else None, reference, run.row.paths)
    return report, _joined(said) if proves else None


def trace_of(pool: RankPool, run: Run, folder: Path) -> Path:
    """Trace a run; its layout file stands beside the trace, if it has one."""
    return _traced(pool, run, folder, proves=False)[0]


def _traced(pool: RankPool, run: Run, folder: Path, *, proves: bool) -> tuple[Path, list[str]]:
    folder.mkdir(parents=True)
    layout = run.row.layout_of(run.setup)
    if layout:
        (folder / LAYOUT_NAME).write_text(layout)
    return traced_with_answers(
        pool,
        ranks.traced,
        run.table,
        run.name,
        run.setup,
        proves,
        folder=folder,
        world=run.setup.ranks,
        timeout_s=TIMEOUT_S,
    )


def reference_of(pool: RankPool, run: Run, folder: Path) -> Path | None:
    """Return the trace of one process that a run is held to, made where no run before has made it;
    None for what `check` judges."""
    program = run.row.reference if run.row else None
    if program is None:
        return None
    setup = replace(run.setup, ranks=1, is_faulty=False)
    key = f"{program.__module__}.{program.__qualname__} {setup}"
    out = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not (out / "trace" / "trace.json").exists():
        asked = (run.table, run.name, setup)
        traced_with_answers(
            pool, ranks.traced_alone, *asked, folder=out, world=1, timeout_s=TIMEOUT_S
        )
    return out / "trace"


def scored(
    pool: RankPool, run: Run, folder: Path, *, is_kept: bool = False, proves: bool = False
) -> Outcome:
    """Trace, check and score one run; what fails on the way scores nothing and says why.

    `proves`: ask the oracle too, once the trace has ended.
    """
    begun, proof = time.monotonic(), None
    expected = (run.row.expected if run.row else hang.expected)(run.setup)
    try:
        report, proof = _report_and_proof(pool, run, folder, proves=proves)
        found = score(report, expected if run.setup.is_faulty else None)
    except (RankFailure, RuntimeError, TimeoutError, RankscopeError) as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        found = Score(
            detected=False, module=False, ranks=False, kind=False, false_alarms=0, said=last
        )
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(run=run, score=found, seconds=time.monotonic() - begun, proof=proof)
