"""What a report must say of a run, as data, and how a report is held to it."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Finding = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One thing that went wrong first. Globs are fnmatch; any of several words will do."""

    kinds: tuple[str, ...]
    phases: tuple[str, ...]
    places: tuple[tuple[str, str], ...]
    """(path glob, slot glob): where it may be charged to."""
    ranks: tuple[int, ...]
    or_ranks: tuple[tuple[int, ...], ...] = ()
    """Answers that are as right, where ranks differ and a reader could blame either side."""
    step: int | None = None
    severity: str = "fault"
    """Or "warning", for what leaves a verdict clean."""
    evidence: tuple[str, ...] = ()
    """Texts that must stand in the evidence or the message."""
    all_of: tuple[tuple[str, str], ...] = ()
    """(path, slot): every one of these must be named, by an origin each or in one's evidence."""

    def has_kind(self, finding: Finding) -> bool:
        return finding["kind"] in self.kinds

    def has_place(self, finding: Finding) -> bool:
        is_there = any(
            fnmatch.fnmatchcase(finding["path"], path)
            and fnmatch.fnmatchcase(finding["slot"] or "", slot)
            for path, slot in self.places
        )
        is_then = self.step is None or finding["step"] == self.step
        return is_there and is_then and finding["phase"] in self.phases

    def has_ranks(self, finding: Finding) -> bool:
        return tuple(finding["ranks"]) in (self.ranks, *self.or_ranks)

    def is_told(self, finding: Finding) -> bool:
        """Whether every text that must be there is there."""
        told = json.dumps([finding.get("evidence"), finding.get("message")])
        return all(text in told for text in self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One run, scored."""

    detected: bool
    """The verdict is that of the run: fault, or clean for a program that is right."""
    module: bool
    ranks: bool
    kind: bool
    false_alarms: int
    """Faults that are neither what is expected nor a consequence of it."""
    said: str = ""
    """The first origin, or the first false alarm, in one line."""


def score(report: Mapping[str, Any], expected: Expected | None) -> Score:
    """Hold a report (docs of `check`) to what is expected; None is a
    program that is right, of which nothing may be said that is a fault."""
    faults = [f for f in report["findings"] if f["severity"] == "fault"]
    if expected is None:
        is_clean = report["verdict"] == "clean" and not faults
        said = line(faults[0]) if faults else "" if is_clean else f"verdict {report['verdict']}"
        return Score(
            detected=is_clean,
            module=is_clean,
            ranks=is_clean,
            kind=is_clean,
            false_alarms=len(faults),
            said=said,
        )
    origins = [f for f in faults if f["origin"]]
    if expected.severity == "warning":
        placed = [f for f in report["findings"] if f["severity"] == "warning"]
        placed = [f for f in placed if expected.has_place(f)]
        is_detected, alarms = bool(placed), origins
    else:
        placed = [f for f in origins if expected.has_place(f)]
        is_detected = report["verdict"] == "fault"
        alarms = [f for f in origins if not expected.has_place(f)]
    first = next(iter(alarms or placed or faults), None)
    return Score(
        detected=is_detected,
        module=bool(placed) and _all_named(expected, placed),
        ranks=bool(placed) and all(expected.has_ranks(f) for f in placed),
        kind=bool(placed)
        and all(expected.has_kind(f) for f in placed)
        and any(expected.is_told(f) for f in placed),
        false_alarms=len(alarms),
        said=line(first) if first else f"verdict {report['verdict']}, no fault",
    )


def _all_named(expected: Expected, placed: Sequence[Finding]) -> bool:
    """Whether every place that must be named is, by a finding of its own or inside one."""
    own = {(f["path"], f["slot"]) for f in placed}
    told = json.dumps([[f.get("evidence"), f.get("message")] for f in placed])
    return all(
        (path, slot) in own or f'"{path}.{slot.partition(":")[2]}"' in told
        for path, slot in expected.all_of
    )


def line(finding: Finding) -> str:
    """Return a finding in one line."""
    ranks = ",".join(str(rank) for rank in finding["ranks"])
    where = f"{finding['path'] or '(root)'} {finding['slot']}"
    return f"{finding['kind']} {finding['phase']} {finding['step']}: {where}, ranks {ranks}"
