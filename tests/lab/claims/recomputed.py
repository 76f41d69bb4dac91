"""One run: its reports, and each claim of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import rankscope
from rankscope.errors import RankscopeError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.words.reports import report_json
from tests.distributed.pool import RankFailure, RankPool
from tests.lab.claims import ofcheck, ofdiff
from tests.lab.claims.claim import Case, Claim, Finding
from tests.lab.claims.held import Held
from tests.lab.faults.runs import Run, reference_of, trace_of

Told = tuple[str, str, Claim | None]
"""Command, label and a claim; None begins a report."""


def claims_of(pool: RankPool, run: Run, folder: Path) -> Iterator[Told]:
    """Yield every claim of the reports on a run, traced into `folder` unless it is there."""
    name = re.sub(r"[ ,]+", "-", run.label)
    try:
        trace = folder / name / "trace"
        if not (trace / "trace.json").exists():
            shutil.rmtree(folder / name, ignore_errors=True)  # of a run that was cut off
            trace_of(pool, run, folder / name)
        reference = reference_of(pool, run, folder / "references")
    except (RankFailure, RankscopeError) as error:
        yield "none", run.label, None
        yield "none", run.label, Claim("traced", None, str(error).splitlines()[-1])
        return
    layout = folder / name / "layout.toml"
    layouts = LayoutFile.load(layout) if layout.exists() else None
    ref = Held(rankscope.open_trace(reference)) if reference else None
    test = Held(rankscope.open_trace(trace), layouts)
    rules = [(rule.rpartition("=")[0], rule.rpartition("=")[2]) for rule in run.row.paths]
    asked = [("check", lambda: rankscope.check(trace, layouts))]
    if reference is not None:
        asked = [
            (f"diff {how}", lambda tensors=tensors: rankscope.diff(
                reference, trace, paths=run.row.paths, layouts=layouts, tensors=tensors))
            for how, tensors in (("with tensors", True), ("by digests", False))
        ]  # fmt: skip
    for command, ask in asked:
        yield command, run.label, None
        case = Case(label=run.label, report=report_json(ask()), test=test, ref=ref, rules=rules)
        for place, claim in claims_in(case):
            yield command, f"{command}, {run.label}: {place}", claim


def claims_in(case: Case) -> Iterator[tuple[str, Claim]]:
    """Yield each claim of a report, and of which finding it is."""
    told = ofcheck if case.ref is None else ofdiff
    for claim in told.of_report(case):
        yield "report", claim
    for finding in case.report["findings"]:
        place = f"{finding['path'] or '(root)'}:{finding['slot']} {finding['phase']}"
        for claim in _claims(case, finding):
            yield f"{finding['kind']} {place} {finding['step']}", claim


def _claims(case: Case, finding: Finding) -> Iterator[Claim]:
    """Yield what a finding's evidence and sentences say."""
    told = ofcheck if case.ref is None else ofdiff
    for name, value in finding["evidence"].items():
        if name in told.EVIDENCE:
            yield from told.EVIDENCE[name](case, finding, value)
        elif name not in told.NO_CLAIM:
            yield Claim(f"{name} {value}", None, f"no recomputation of {name!r}")
    is_any = False
    for text in (finding["message"], finding["advice"]):
        for pattern, recompute in told.SENTENCES:
            for match in re.finditer(pattern, text):
                is_any = True
                yield from recompute(case, finding, match)
    if not is_any and not finding["evidence"]:
        yield Claim(finding["message"], None, "no value in it")
