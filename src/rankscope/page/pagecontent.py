"""What a page is made of, whether it is written into a file or served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope.page.calldetails import ROWS_PER_BLOCK, DetailBlocks, packed_json
from rankscope.page.cellplanes import CellClass, CellPlanes, DistanceClass, slot_kind
from rankscope.page.modulerows import ModuleRows
from rankscope.page.pagesteps import PageSteps
from rankscope.page.slotdetails import NUMBER_NAMES
from rankscope.page.valuechoice import ValueChoice
from rankscope.record.finding import Finding
from rankscope.record.ranklists import ranks_text
from rankscope.record.visibletext import visible
from rankscope.tree.views import Trace

__all__ = ["DATA_BYTES", "PageContent", "data_of", "fitting"]

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

    def with_values(self, details: DetailBlocks, left_out: str) -> PageContent:
        """Return the page with the values behind its cells, and what is said of those that are not
        there."""
        blocks = details.packed()
        return replace(
            self,
            data={**self.data, "blocks": sorted(blocks), "left_out": left_out},
            packed={**self.packed, **{f"d{number}": block for number, block in blocks.items()}},
        )


def fitting(
    page: PageContent,
    choose: Callable[[float], ValueChoice],
    details: Callable[[ValueChoice], DetailBlocks],
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


def data_of(
    *,
    command: str,
    trace: Trace,
    rows: ModuleRows,
    steps: PageSteps,
    planes: CellPlanes,
    classes: type[CellClass] | type[DistanceClass],
    findings: Iterable[Finding],
    charts: Any,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what a page needs at once, and the packed data; both without values behind cells."""
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
        "command": command,
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
        "classes": [each.word for each in classes],
        "class_names": [each.name.lower().replace("_", "-") for each in classes],
        "modules": rows.as_json(),
        "planes": listed,
        "findings": _marks(findings, rows, steps),
        "numbers": NUMBER_NAMES,
        "rows_per_block": ROWS_PER_BLOCK,
    }
    return data, packed


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
