"""What a page is made of, whether it is written into a file or served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rankscope.page.calldetails import ROWS_PER_BLOCK, packed_blocks, packed_json
from rankscope.page.cellplanes import CellPlanes, MapClass, slot_kind
from rankscope.page.celltext import map_text
from rankscope.page.modulerows import ModuleRows
from rankscope.page.pagesteps import PageStep, PageSteps
from rankscope.page.slotdetails import NUMBER_NAMES
from rankscope.page.valuechoice import ValueChoice, chosen_values
from rankscope.page.verdicthtml import coverage_html, findings_html, verdict_html
from rankscope.record.finding import Finding, Report
from rankscope.record.ranklists import ranks_text
from rankscope.record.visibletext import visible
from rankscope.tree.views import Trace

__all__ = ["DATA_BYTES", "PageContent", "PageMap", "fitting"]

DATA_BYTES: Final = 10_000_000
"""A page holds no more data than that."""
_BYTES_PER_ENTRY: Final = 60
"""Of a packed value, about."""
_MOST_TRIES: Final = 5
_MOST_MARKS: Final = 5_000
"""Findings that are marked on the map; the classes of its cells tell all."""
_LONGEST: Final = 600
_FORMAT: Final = "rankscope.page/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """Texts, data and packed data of one page."""

    title: str
    sections: dict[str, str]
    """HTML by section: job, verdict, findings, ranks, coverage, text."""
    data: dict[str, Any]
    """JSON data that the page needs at once."""
    packed: dict[str, bytes]
    """Deflated data by id: planes (`p0`), blocks of details (`d0`), `charts`; inflated when it is
    looked at."""

    @property
    def size(self) -> int:
        """Bytes of the packed data in a page."""
        return sum(4 * ((len(each) + 2) // 3) for each in self.packed.values())

    def with_values(self, calls: Iterable[dict[str, Any]], left_out: str) -> PageContent:
        """Return the page with the calls behind its cells, and what is said of those that are not
        there."""
        blocks = packed_blocks(calls)
        return replace(
            self,
            data={**self.data, "blocks": sorted(blocks), "left_out": left_out},
            packed={**self.packed, **{f"d{number}": block for number, block in blocks.items()}},
        )


def fitting(
    page: PageContent,
    choose: Callable[[float], ValueChoice],
    details: Callable[[ValueChoice], Iterable[dict[str, Any]]],
    most_bytes: int,
) -> PageContent:
    """Return a page with as many values as it can hold.

    Args:
        page: all but the values.
        choose: returns which values, where so many entries fit.
        details: reads what was chosen.
        most_bytes: how large the packed data may be.
    """
    limit = most_bytes / _BYTES_PER_ENTRY
    before = None
    for _ in range(_MOST_TRIES):
        choice = choose(limit)
        if choice == before:  # it takes no limit
            break
        before = choice
        found = page.with_values(details(choice), choice.left_out)
        if found.size <= most_bytes:
            break
        limit *= 0.8 * most_bytes / found.size
    return found


class PageMap:
    """The map of a page: modules, steps and the classes of cells, filled step by step."""

    def __init__(self, trace: Trace, classes: type[MapClass]) -> None:
        """Begin without any cell."""
        self._trace, self._classes = trace, classes
        self.rows, self.steps = ModuleRows(), PageSteps()
        self.planes = CellPlanes(self.rows, int(trace.run["world_size"]))
        self.entries: list[Counter[int]] = []
        """Of each step how much there is to show of each row."""

    def begin(self, step: PageStep) -> int:
        """Begin a step; return its number."""
        self.entries.append(Counter())
        return self.steps.add(step)

    def chosen(self, report: Report, limit: float) -> ValueChoice:
        """Return whose values the page holds, where so many entries fit."""
        rows = {self.rows.known(finding.path) for finding in report.findings}
        steps = {self.steps.of_finding(finding) for finding in report.findings}
        found = {row for row in rows if row is not None}
        entries = [np.array([own[row] for row in range(len(self.rows))]) for own in self.entries]
        near = self.rows.around(found)
        return chosen_values(entries, found, near, {s for s in steps if s is not None}, limit)

    def content(
        self, report: Report, charts: Any, *, title: str, job: str, ranks: str, layout: str = ""
    ) -> PageContent:
        """Return the page without the values behind its cells.

        Args:
            report: the verdict, as of `verdict_html`.
            charts: of each step.
            title: behind the word of the verdict.
            job, ranks: HTML of these sections.
            layout: the layout file that the verdict rests on.
        """
        trace, rows, steps, planes = self._trace, self.rows, self.steps, self.planes
        words = [each.word for each in self._classes]
        packed: dict[str, bytes] = {}
        listed = []
        for number, ((step, phase, kind), plane) in enumerate(planes.deflated().items()):
            packed[f"p{number}"] = plane
            listed.append([step, phase.word, kind, f"p{number}"])
        packed["charts"] = packed_json(charts)
        hosts: dict[str, list[int]] = {}
        for rank in trace.completeness["ranks"]:
            hosts.setdefault(visible(str(rank.get("host", ""))), []).append(rank["rank"])
        data = {
            "format": _FORMAT,
            "command": report.command,
            "trace": visible(str(trace.path)),
            "live": trace.is_live,
            "world": planes.world,
            "alike": [ranks_text(ranks) for ranks in planes.alike_ranks()],
            "hosts": {host: ranks_text(ranks) for host, ranks in hosts.items()},
            "meshes": {
                visible(mesh["name"]): {
                    "axes": [visible(axis) for axis in mesh["axes"]],
                    "shape": mesh["shape"],
                    "over": mesh["over"],
                }
                for mesh in trace.run["meshes"]
            },
            "steps": steps.as_json(),
            "classes": words,
            "class_names": [each.name.lower().replace("_", "-") for each in self._classes],
            "modules": rows.as_json(),
            "planes": listed,
            "findings": _marks(report.findings, rows, steps),
            "numbers": NUMBER_NAMES,
            "rows_per_block": ROWS_PER_BLOCK,
        }
        sections = {
            "job": job,
            "verdict": verdict_html(report, steps, layout=layout, is_live=trace.is_live),
            "findings": findings_html(report, steps),
            "ranks": ranks,
            "coverage": coverage_html(report),
            "text": map_text(planes, rows, steps.all, words),
        }
        title = f"{report.verdict.value}: {title}"
        return PageContent(title=title, sections=sections, data=data, packed=packed)


def _marks(
    findings: Iterable[Finding], rows: ModuleRows, steps: PageSteps
) -> Sequence[dict[str, Any]]:
    marks = []
    for finding in findings:
        row, step = rows.known(finding.path), steps.of_finding(finding)
        if row is None or step is None:
            continue
        marks.append(
            {
                "kind": finding.kind.value,
                "m": row,
                "t": step,
                "p": finding.phase.word,
                "slot": visible(finding.slot),
                "sort": slot_kind(finding.slot) if finding.slot else "call",
                "r": ranks_text(finding.ranks),
                "origin": finding.is_origin,
                "severity": finding.severity.value,
                "text": visible(finding.message)[:_LONGEST],
            }
        )
        if len(marks) == _MOST_MARKS:
            break
    return marks
