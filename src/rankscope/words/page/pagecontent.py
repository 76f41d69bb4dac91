"""What a page is made of, served, or written into one file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import FolderError, os_errors_as
from rankscope.record.finding import Finding, Report
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.texts import counted, visible
from rankscope.run.files import replacing
from rankscope.tree.step import StepHead
from rankscope.tree.views import Trace
from rankscope.words.page.calldetails import (
    NUMBER_NAMES,
    ROWS_PER_BLOCK,
    packed_blocks,
    packed_json,
)
from rankscope.words.page.cellplanes import CellPlanes, MapClass, ModuleRows, PageSteps, slot_kind
from rankscope.words.page.verdicthtml import coverage_lines, findings_html, text, verdict_html
from rankscope.words.reports import verdict_word

Array = NDArray[Any]
DATA_BYTES: Final = 10_000_000
"""A page holds no more data than that."""
_BYTES_PER_ENTRY: Final = 60
"""Of a packed value, about."""
_MOST_TRIES: Final = 5
_STRIDES: Final = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Every k-th step has its values where not all fit."""
_MOST_MARKS: Final = 5_000
"""Findings that are marked on the map; the classes of its cells tell all."""
_LONGEST: Final = 600
_LONGEST_NAME: Final = 200
"""Characters of a name that a line of the map as text shows."""
_MOST_TEXT: Final = 1_500_000
"""Characters of all its lines."""
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
        return sum(4 * ((len(block) + 2) // 3) for block in self.packed.values())


def fitting(
    page: PageContent,
    choose: Callable[[float], ValueChoice],
    details: Callable[[ValueChoice], Iterable[dict[str, Any]]],
    most_bytes: int,
) -> PageContent:
    """Return a page, which has all but the values, with as many values as fit into `most_bytes` of
    packed data. `choose` says which, where so many entries fit; `details` reads them."""
    limit = most_bytes / _BYTES_PER_ENTRY
    before = None
    for _ in range(_MOST_TRIES):
        choice = choose(limit)
        if choice == before:  # --path and --step choose, whatever the limit
            break
        before = choice
        blocks = packed_blocks(details(choice))
        filled = replace(
            page,
            data={**page.data, "blocks": sorted(blocks), "left_out": choice.left_out},
            packed={**page.packed, **{f"d{number}": block for number, block in blocks.items()}},
        )
        if filled.size <= most_bytes:
            break
        # how well values pack is known only after packing: aim below, so that the next try fits
        limit *= 0.8 * most_bytes / filled.size
    return filled


class PageMap:
    """The map of a page: modules, steps and the classes of cells, filled step by step."""

    def __init__(self, trace: Trace, classes: type[MapClass]) -> None:
        self._trace, self._classes = trace, classes
        self.rows, self.steps = ModuleRows(), PageSteps()
        self.planes = CellPlanes(self.rows, int(trace.run["world_size"]))
        self.entries: list[Counter[int]] = []
        """Of each step how much there is to show of each row."""

    def begin(self, step: StepHead) -> int:
        """Begin a step; return its number."""
        self.entries.append(Counter())
        return self.steps.add(step)

    def chosen(self, report: Report, limit: float) -> ValueChoice:
        """Return whose values the page holds, where so many entries fit."""
        rows = {self.rows.known(finding.path) for finding in report.findings}
        steps = {self.steps.of_finding(finding) for finding in report.findings}
        marked = {row for row in rows if row is not None}
        entries = [
            np.array([counts[row] for row in range(len(self.rows))]) for counts in self.entries
        ]
        near = self.rows.around(marked)
        return chosen_values(entries, marked, near, {s for s in steps if s is not None}, limit)

    def content(
        self, report: Report, charts: Any, *, title: str, job: str, ranks: str
    ) -> PageContent:
        """Return the page without the values behind its cells. `title` stands behind the word of
        the verdict; `job` and `ranks` are HTML."""
        trace, rows, steps, planes = self._trace, self.rows, self.steps, self.planes
        words = [cell.word for cell in self._classes]
        packed: dict[str, bytes] = {}
        listed = []
        for number, ((step, phase, kind), plane) in enumerate(planes.deflated().items()):
            packed[f"p{number}"] = plane
            listed.append([step, phase.word, kind, f"p{number}"])
        packed["charts"] = packed_json(charts)
        data = {
            "format": _FORMAT,
            "command": report.command,
            "trace": visible(str(trace.path)),
            "live": trace.is_live,
            "world": planes.world,
            "alike": [ranks_text(ranks) for ranks in planes.alike_ranks()],
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
            "class_names": [cell.name.lower().replace("_", "-") for cell in self._classes],
            "modules": rows.as_json(),
            "planes": listed,
            "findings": _marks(report.findings, rows, steps),
            "numbers": NUMBER_NAMES,
            "rows_per_block": ROWS_PER_BLOCK,
        }
        sections = {
            "job": job,
            "verdict": verdict_html(report, steps),
            "findings": findings_html(report, steps),
            "ranks": ranks,
            "coverage": "".join(coverage_lines(report)),
            "text": _map_text(planes, rows, steps, words),
        }
        title = f"{verdict_word(report)}: {title}"
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


def _map_text(planes: CellPlanes, rows: ModuleRows, steps: PageSteps, words: Sequence[str]) -> str:
    """Return the map as HTML text, until there are too many lines; says how many are left out."""
    shown_lines: list[str] = []
    size = left_out = 0
    for line in _lines(planes, rows, steps, words):
        size += len(line)
        if size <= _MOST_TEXT:
            shown_lines.append(text(line, _MOST_TEXT))
        else:
            left_out += 1
    if left_out:
        shown_lines.append(f"and {counted(left_out, 'more module')}: rankscope show lists them")
    return "\n".join(shown_lines)


def _lines(
    planes: CellPlanes, rows: ModuleRows, steps: PageSteps, words: Sequence[str]
) -> Iterator[str]:
    """Yield `path  phase: as the others (ranks 0-3, steps 0-9); differs …` for each called
    module."""
    keys = list(dict.fromkeys((step, phase) for step, phase, _ in planes.made()))
    phases = sorted({phase for _, phase in keys})
    by_phase = {p: {step: planes.merged(step, p) for step, of in keys if of is p} for p in phases}
    for row, path in enumerate(rows.paths):
        parts = []
        for phase, merged in by_phase.items():
            words_here = _of_phase(
                {step: plane[row] for step, plane in merged.items()}, steps, words
            )
            if words_here:
                parts.append(f"{phase.word}: {words_here}")
        if parts:
            name = visible(path)[:_LONGEST_NAME] or "(root)"
            yield f"{name}  {'  '.join(parts)}"


def _of_phase(lines: dict[int, Array], steps: PageSteps, words: Sequence[str]) -> str:
    """Return which classes the cells of one module have in one phase, with ranks and steps."""
    by_cell: dict[int, dict[bytes, list[int]]] = {}
    for step, line in lines.items():
        for cell in np.unique(line).tolist():
            if cell:
                ranks = np.flatnonzero(line == cell).tobytes()
                by_cell.setdefault(cell, {}).setdefault(ranks, []).append(step)
    parts = []
    for cell, by_ranks in sorted(by_cell.items()):
        places = [
            f"{ranks_named(np.frombuffer(ranks, np.int64).tolist())}, "
            f"{_steps_named(in_steps, steps)}"
            for ranks, in_steps in by_ranks.items()
        ]
        parts.append(f"{words[cell]} ({'; '.join(places)})")
    return "; ".join(parts)


def _steps_named(numbers_listed: Sequence[int], steps: PageSteps) -> str:
    """Return `steps 0-9`, `eval steps 1,2 and setup`."""
    plain: dict[tuple[str, int], list[int]] = {}
    setups = []
    for number in numbers_listed:
        step = steps.all[number]
        if step.is_setup:
            setups.append(step.label)
        else:
            plain.setdefault((step.mode.word, step.incarnation), []).append(step.step)
    parts = []
    for (mode, life), numbers in plain.items():
        noun = "step" if len(numbers) == 1 else "steps"
        parts.append(f"{mode} {noun} {ranks_text(numbers)}" + (f" (life {life})" if life else ""))
    return " and ".join([*setups, *parts])


@dataclass(frozen=True, slots=True)
class ValueChoice:
    """What of a trace has its values on the page."""

    rows_of: dict[int, frozenset[int] | None]
    """By step: which modules, None for all; a step that is not here has none."""
    left_out: str
    """What is not there and how to get it, in words; "" where all is."""


def chosen_values(
    entries: Sequence[Array],
    marked: Collection[int],
    near: Collection[int],
    steps_of_findings: Collection[int],
    limit: float,
) -> ValueChoice:
    """Return what fits into `limit` entries. `entries`: of every step [modules or more] values by
    row; `marked`: rows of findings; `near`: the same, with those around and beside them."""
    numbers = range(len(entries))
    totals = [int(counts.sum()) for counts in entries]
    strides = [stride for stride in _STRIDES if stride < 2 * len(entries)]
    if sum(totals) <= limit:
        return ValueChoice(dict.fromkeys(numbers), "")
    rows_of: dict[int, frozenset[int] | None] = {}
    near_list: list[int] = []
    room = limit
    for near_list, stride in itertools.product(
        (sorted(near), sorted(marked)), (1, *strides, len(numbers))
    ):
        costs = [
            int(counts[[row for row in near_list if row < len(counts)]].sum()) for counts in entries
        ]
        around = [s for s in numbers if costs[s] and (s % stride == 0 or s in steps_of_findings)]
        if sum(costs[step] for step in around) <= limit / 2:
            rows_of = {step: frozenset(near_list) for step in around}
            room = limit - sum(costs[step] for step in around)
            break
    for stride in strides:
        full = [step for step in numbers if step % stride == 0]
        if sum(totals[step] for step in full) <= room:
            rows_of.update(dict.fromkeys(full))
            return ValueChoice(rows_of, _words(rows_of, len(entries), len(near_list), stride))
    first = np.flatnonzero(np.cumsum(entries[0]) <= room)
    rows_of[0] = frozenset(first.tolist()) | (rows_of.get(0) or frozenset())
    return ValueChoice(rows_of, _words(rows_of, len(entries), len(near_list), 0))


def _words(rows_of: dict[int, frozenset[int] | None], steps: int, near: int, stride: int) -> str:
    parts = []
    if stride:
        parts.append(f"of all modules in one step of {stride}")
    else:
        parts.append("of the first modules of the first step")
    around = sum(1 for rows in rows_of.values() if rows is not None)
    if near and around:
        parts.append(
            f"of {counted(near, 'module')} around the findings in {counted(around, 'step')} more"
        )
    return (
        f"The map shows everything. The values behind its cells would not fit: those "
        f"{' and '.join(parts)} are here, of {counted(steps, 'step')} (setup is one). For others "
        "write a narrower page: rankscope report TRACE --path 'layers.3*' --step 10-12"
    )


_OURS: Final = b"<title>rankscope - "
_HEAD_BYTES: Final = 4096
_STATIC: Final = Path(__file__).parent / "static"
_SCRIPTS: Final = (
    "elements.js",
    "store.js",
    "modules.js",
    "columns.js",
    "view.js",
    "map.js",
    "charts.js",
    "meshes.js",
    "detail.js",
    "live.js",
    "main.js",
)
"""In the order in which they need each other."""


def write_file(content: PageContent, out: Path, *, is_forced: bool = False) -> Path:
    """Write a page by rename, so that all readers see a whole one; its owner alone may read it. A
    page that is there is replaced, with `is_forced` any file. FolderError: the file cannot be
    written, or is something else than a page; says why."""
    place = Path(os.path.realpath(out))
    with os_errors_as(FolderError, f"{out}: the page cannot be written"):
        if not out.name or not _may_be_replaced(place, is_forced):
            raise FolderError(
                f"{out}: is not a page of rankscope, and stays as it is; name another file, or "
                "give --force to replace it"
            )
        with replacing(place, is_synced=False) as file:
            file.write(page_html(content).encode("utf-8", "xmlcharrefreplace"))
    return out


def _may_be_replaced(place: Path, is_forced: bool) -> bool:
    """True where nothing is there, an empty file, or a page; OSError: it cannot be looked at."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(status.st_mode):
        return False
    if is_forced or not status.st_size:
        return True
    with place.open("rb") as file:
        return _OURS in file.read(_HEAD_BYTES)


def page_html(content: PageContent, connect: str = "'none'") -> str:
    """Return the whole page. Its program runs because the page names its hash: nothing else that a
    name from a trace might smuggle in does, and nothing may be fetched but from `connect`, as a
    Content-Security-Policy says it."""
    style, script = _static("page.css"), _program()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    packed = "\n".join(
        f'<script type="application/octet-stream" id="packed-{name}">{_base64(data)}</script>'
        for name, data in content.packed.items()
    )
    parts = {
        "policy": policy,
        "title": html.escape(visible(content.title)),
        "style": style,
        "script": script,
        "data": _safe_json(content.data),
        "packed": packed,
        **content.sections,
    }
    pieces = _static("page.html").split("<!--{")
    parts_of_page = [pieces[0]]
    for piece in pieces[1:]:
        name, _, tail = piece.partition("}-->")
        parts_of_page += (parts[name], tail)
    return "".join(parts_of_page)


def served_data(content: PageContent) -> bytes:
    """Return what the page asks for beside a running job: the same in JSON."""
    content_json = {
        "title": visible(content.title),
        "sections": content.sections,
        "data": content.data,
        "packed": {name: _base64(data) for name, data in content.packed.items()},
    }
    return json.dumps(content_json, separators=(",", ":")).encode("ascii")


@cache
def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


@cache
def _program() -> str:
    parts = "\n".join(_static(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _digest(inline: str) -> str:
    return f"sha256-{_base64(hashlib.sha256(inline.encode()).digest())}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _safe_json(data: Any) -> str:
    """Return JSON in which no text can end the element that holds it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
