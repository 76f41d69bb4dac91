"""The verdict as HTML: what a page says before anything is drawn, and what stands in a notebook.

Everything that comes from a trace is made visible and escaped here, at one place (`text`).
"""

from __future__ import annotations

import html
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final
from urllib.parse import quote

from rankscope.diagnosis.evidence.lastcalls import LastCall, ends_of, last_calls
from rankscope.diagnosis.evidence.stepview import step_view_of
from rankscope.record.finding import Finding, Report
from rankscope.record.ranks import NOTHING, RankPlace, alike_places, ranks_named, step_label
from rankscope.record.texts import counted, visible
from rankscope.tree.views import Trace
from rankscope.words.page.cellplanes import PageSteps
from rankscope.words.reports import (
    answer_parts,
    cell_text,
    different_before,
    evidence_parts,
    verdict_rest,
    verdict_word,
    where_line,
)

_LONGEST: Final = 2_000
_LONGEST_COMMAND: Final = 300
_MOST_LISTED: Final = 50
"""Findings of one sort; the map shows all."""
_FEW: Final = 4
"""So many origins are listed unfolded."""
_MOST_ROWS: Final = 16


def text(value: object, longest: int = _LONGEST) -> str:
    """Return a value as text of HTML, or of an attribute in quotes."""
    shown_text = visible(str(value))
    if len(shown_text) > longest:
        shown_text = f"{shown_text[:longest]}…"
    return html.escape(shown_text, quote=True)


def verdict_html(report: Report, steps: PageSteps | None = None) -> str:
    """Return the first lines: the word, what is wrong or lacks; of a fault what, where, how many
    values follow, what to look at. `steps`: those of the page, for links to its cells."""
    word, rest = verdict_word(report), text(verdict_rest(report))
    lines = [f'<p class="verdict {report.verdict.value}"><strong>{word}</strong>{rest}</p>']
    if before := different_before(report):
        lines.append(f'<p class="before">Before any number: {text(before)}</p>')
    for first in (*report.origins, *report.warnings)[:1]:
        lines.append(_first(first, steps))
    return "\n".join(lines)


def _first(first: Finding, steps: PageSteps | None) -> str:
    parts = {name: text(words) for name, words in answer_parts(first).items()}
    title = next(iter(parts))
    parts[title] = f"<strong>{parts[title]}</strong>"
    parts["where"] += _to_map(first, steps)
    listed = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in parts.items())
    summary, *more = _evidence(first) or [""]
    return f'<dl class="first {title}">{listed}</dl>{summary}{_folded(more)}'


def _to_map(finding: Finding, steps: PageSteps | None) -> str:
    """Return the link within the page to the cell of a finding; "" where it has none."""
    step = None if steps is None else steps.of_finding(finding)
    if steps is None or step is None:
        return ""
    rank = f"&rank={finding.ranks[0]}" if finding.ranks else ""
    path = quote(visible(finding.path), safe=".")
    link = f"#path={path}&step={steps.key(step)}&phase={finding.phase.word}{rank}"
    return f' <a class="to-map" href="{text(link)}">show on the map</a>'


def findings_html(report: Report, steps: PageSteps) -> str:
    """Return all findings, by what they are: origins, warnings, what follows."""
    is_few = len(report.origins) <= _FEW
    warnings = report.warnings if report.origins else report.warnings[1:]
    return (
        _listed("More origins", report.origins[1:], steps, is_open=is_few)
        + _listed("Warnings", warnings, steps, is_open=False)
        + _listed("What follows", report.victims, steps, is_open=False)
    )


def _listed(title: str, findings: Sequence[Finding], steps: PageSteps, *, is_open: bool) -> str:
    if not findings:
        return ""
    items = []
    for finding in findings[:_MOST_LISTED]:
        place = text(where_line(finding)) + _to_map(finding, steps)
        evidence = _folded(_evidence(finding)) if finding.is_origin else ""
        items.append(
            f'<li><span class="kind">{finding.kind.value}</span> {place}'
            f"<br>{text(finding.message)}{evidence}</li>"
        )
    more = len(findings) - len(items)
    if more > 0:
        items.append(f"<li>and {more:,} more: the map shows them, rankscope check --all lists</li>")
    state = " open" if is_open else ""
    return (
        f"<details{state}><summary>{title} ({len(findings):,})</summary>"
        f'<ul class="findings">{"".join(items)}</ul></details>'
    )


def _folded(evidence: Sequence[str]) -> str:
    if not evidence:
        return ""
    return f"<details><summary>evidence</summary>{''.join(evidence)}</details>"


def _evidence(finding: Finding) -> list[str]:
    """Return what a finding rests on, tables first."""
    tables, parts = [], []
    for name, part in evidence_parts(finding.evidence):
        if isinstance(part, str):
            parts.append(f'<p class="evidence"><span>{text(name)}</span> {text(part)}</p>')
        else:
            tables.append(_table(name, part))
    return [*tables, *parts]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(key, "") for key in columns] for row in rows[:_MOST_ROWS]]
    note = f" (the first {_MOST_ROWS} of {len(rows):,})" if len(rows) > len(cells) else ""
    return table_html([key.replace("_", " ") for key in columns], cells, name, f"{name}{note}")


def table_html(
    head: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "", caption: str = ""
) -> str:
    """Return a table; one with a name, which is read to who does not see it, scrolls where it is
    wider than the page. A row may be shorter than the head: its last cell is the rest of it."""
    lines = "".join(f"<tr>{_cells_html(row, len(head))}</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{text(title)}</th>' for title in head)
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    table = f"<table>{above}<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
    if not name:
        return table
    return f'<div class="wide" tabindex="0" role="group" aria-label="{text(name)}">{table}</div>'


def _cells_html(row: Sequence[Any], width: int) -> str:
    kinds = ["" if isinstance(value, (int, float)) else ' class="text"' for value in row]
    if len(row) < width:
        kinds[-1] += f' colspan="{width - len(row) + 1}"'
    return "".join(f"<td{kind}>{text(cell_text(value))}</td>" for kind, value in zip(kinds, row))


def job_html(name: str, trace: Trace) -> str:
    """Return a line that says which trace it is, how big the job was and how complete it is."""
    state = "" if trace.is_complete else ' class="not-complete"'
    happened = "".join(f"<p>{text(line)}</p>" for line in trace.happened[:_FEW])
    return (
        f"<p{state}>{text(name)}<strong>{text(trace.path)}</strong>: {text(trace.about)}</p>"
        f"{happened}<p>{'; '.join(_facts(trace))}</p>"
    )


def _facts(trace: Trace) -> Iterator[str]:
    """Yield how the job was started, where, when, how long it ran, how large it was, with what."""
    run = trace.run
    if argv := run.get("argv"):  # a golden file has none of these
        yield f"<code>{text(shlex.join(argv), _LONGEST_COMMAND)}</code>"
    hosts = [host["name"] for host in run["hosts"]]
    more = f" and {len(hosts) - _FEW} more" if len(hosts) > _FEW else ""
    yield text(f"on {', '.join(hosts[:_FEW])}{more}")
    if created := run.get("created"):
        yield text(f"{created[:19].replace('T', ' ')} UTC")
    last = {step.mode: step for step in trace.steps}.values()
    if times := [node.time for step in last for node in step.fresh()]:
        end_s = max(time.start_us + (time.max_us or 0.0) for time in times) / 1e6
        took = f"{end_s:.1f} s" if end_s < 600 else f"{end_s / 60:,.0f} min"
        yield f"{took} from the first traced call to the last"
    yield from _model_size(trace)
    if versions := run.get("versions"):
        yield text(", ".join(f"{name} {version}" for name, version in versions.items()))


def _model_size(trace: Trace) -> Iterator[str]:
    """Yield how many parameters the model has, or the lowest rank has: undeclared slices look like
    experts, and each rank has its own experts."""
    settings = trace.run.get("settings", {})
    if not trace.setup or settings.get("paths", "*") != "*" or settings.get("slots", "*") != "*":
        return
    total = lowest_sum = 0
    is_known = True
    for node in trace.setup[0].passing():
        named = [slot for slot in node.slots if slot.slot.startswith("param:")]
        is_known &= len({slot.slot for slot in named}) == len(named)
        for slot in named:
            shapes = slot.shapes()
            lowest = min(shapes, default=0)
            size = prod(shapes.get(lowest, (0,)))
            lowest_sum += size if lowest == trace.run["ranks"][0]["rank"] else 0
            total += size if slot.global_shape is None else prod(slot.global_shape)
            is_one = len(shapes) == 1 or (slot.distinct == 1 and any(slot.per_rank().values()))
            is_known &= slot.global_shape is not None or is_one
    if total:
        yield (
            f"{total:,} parameters" if is_known else f"{lowest_sum:,} parameters on the lowest rank"
        )


def coverage_lines(report: Report) -> Iterator[str]:
    """Yield how much was judged, and why the rest was not, as bars and words in HTML."""
    yield f"<p>{counted(report.recorded, 'value was', 'values were')} recorded. Of these</p>"
    is_difference = report.command == "diff"
    reason = f"{report.layout} does not describe" if report.layout else "nobody declared"
    parts = {
        "compared with the reference" if is_difference else "held to another rank or run": (
            report.held_to_others
        ),
        "held only to NaN and infinity": report.held_to_finite_only - report.undeclared,
        f"held only to NaN and infinity, because {reason} their layout": report.undeclared,
        "in one trace alone": report.unpaired,
        "not looked at": report.recorded - report.compared - report.unpaired,
    }
    for number, (label, count) in enumerate(parts.items()):
        if count > 0:
            yield _bar(label, count, report.recorded, "not-judged" if number else "alike")
    if report.skipped:
        yield "<p>Why values were not compared with others:</p>"
    for skipped in report.skipped:
        yield _bar(skipped.reason, skipped.count, report.recorded, "not-judged")
    yield from (f"<p>{text(note)}</p>" for note in report.notes)


def _bar(label: str, count: int, total: int, kind: str) -> str:
    share = 100 * min(count / max(total, 1), 1.0)
    return (
        f'<div class="bar"><span>{text(label)}</span>'
        f'<svg class="{kind}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{share:.2f}" height="8"></rect></svg><span>{count:,}</span></div>'
    )


_LAST_STEPS: Final = 3
_MOST_LINES: Final = 40


def places_in(
    trace: Trace, *, reads_calls: bool = True
) -> tuple[dict[int, RankPlace], dict[int, int]]:
    """Return where each rank is, and when the call it entered last began there (wall-clock ns);
    without `reads_calls` nothing of its last calls."""
    steps = [*trace.setup, *trace.steps][-_LAST_STEPS:] if reads_calls else []
    last = last_calls([step_view_of(step) for step in steps])
    places = {rank: _place(end, last.get(rank)) for rank, end in ends_of(trace).items()}
    return places, {rank: call.time_ns for rank, call in last.items()}


def ranks_html(trace: Trace, *, reads_calls: bool = True) -> str:
    """Return a table of state, last step, last call, collective, age; `reads_calls` as of
    `places_in`."""
    places, began = places_in(trace, reads_calls=reads_calls)
    lines = alike_places(places)
    missing = str(trace.completeness["missing"])
    head = ["ranks", "state", "last step", "last in", "waits in"]
    now_ns = time.time_ns()
    rows = []
    for place, ranks in lines[:_MOST_LINES]:
        cells = [ranks_named(ranks), place.state, place.step or NOTHING]
        cells += [place.where, place.waits_in]
        if trace.is_live:
            ages = [(now_ns - began[rank]) / 1e9 for rank in ranks if rank in began]
            cells.append(_age(min(ages), max(ages)) if ages else NOTHING)
        rows.append(cells)
    if trace.is_live:
        head.append("last call began")
    if missing:
        rows.append([ranks_named(missing), "nothing came from them"])
    if len(lines) > _MOST_LINES:
        rows.append([f"and {counted(len(lines) - _MOST_LINES, 'more group')} of ranks"])
    return table_html(head, rows, "ranks")


def _place(end: str, last: LastCall | None) -> RankPlace:
    if last is None:
        return RankPlace(end=end)
    view, call = last.step_view, last.innermost or last.call
    return RankPlace(
        end=end,
        step=step_label(view.mode, view.step, view.incarnation, is_setup=view.is_setup),
        phase=call.phase,
        path=call.path,
        op="" if last.waiting is None else last.waiting.op or "collective",
        members=() if last.waiting is None else last.waiting.members,
    )


def _age(least: float, greatest: float) -> str:
    if greatest - least < 1:
        return f"{greatest:.0f} s ago"
    return f"{least:.0f} to {greatest:.0f} s ago"
