"""The verdict as HTML: what a page says before anything is drawn, and what stands in a notebook.

Everything that comes from a trace is made visible and escaped here, at one place (`text`).
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final
from urllib.parse import quote

from rankscope.diagnosis.verdictwords import infected_line, verdict_rest, where_line
from rankscope.page.cellplanes import PageSteps
from rankscope.record.finding import Finding, Report, Severity
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.visibletext import visible
from rankscope.tree.summary import counted, extent
from rankscope.tree.views import Trace

_LONGEST: Final = 2_000
_LONGEST_COMMAND: Final = 300
_MOST_LISTED: Final = 50
"""Findings of one sort; the map shows all."""
_FEW: Final = 4
"""So many origins are listed unfolded."""
_MOST_ROWS: Final = 16
_RANK_LISTS: Final = ("missing", "ranks", "members")


def text(value: object, longest: int = _LONGEST) -> str:
    """Return a value as text of HTML, or of an attribute in quotes."""
    found = visible(str(value))
    if len(found) > longest:
        found = f"{found[:longest]}…"
    return html.escape(found, quote=True)


def verdict_html(
    report: Report, steps: PageSteps | None = None, *, layout: str = "", is_live: bool = False
) -> str:
    """Return the first lines: the word, what is wrong or lacks; of a fault what, where, how many
    values follow, what to look at. `steps`: those of the page, for links to its cells; `layout`:
    the layout file the verdict rests on; `is_live`: the job goes on."""
    word, rest = report.verdict.value, verdict_rest(report, layout, is_live=is_live)
    lines = [f'<p class="verdict {word}"><strong>{word}</strong>{text(rest)}</p>']
    if other := [told for _, is_same, told in report.preflight if is_same is False]:
        lines.append(f'<p class="before">Before any number: {text("; ".join(other))}</p>')
    for first in (*report.origins, *report.warnings)[:1]:
        lines.append(_first(first, steps))
    return "\n".join(lines)


def _first(first: Finding, steps: PageSteps | None) -> str:
    title = "warning" if first.severity is Severity.WARNING else "first"
    parts = [
        (title, f"<strong>{text(first.message)}</strong>"),
        ("where", text(where_line(first)) + _to_map(first, steps)),
        ("infected", text(infected_line(first))),
        ("look at", text(first.advice)),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{said}</dd>" for name, said in parts)
    seen, *more = _evidence(first.evidence) or [""]
    return f'<dl class="first {title}">{listed}</dl>{seen}{_folded(more)}'


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
        evidence = _folded(_evidence(finding.evidence)) if finding.is_origin else ""
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


def _evidence(evidence: Mapping[str, Any]) -> list[str]:
    """Return what a finding rests on, numbers side by side first."""
    tables, parts = [], []
    pairs = [{"": name, **value} for name, value in evidence.items() if isinstance(value, Mapping)]
    if pairs:
        tables.append(_table("side by side", pairs))
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append(_table(name, value))
        elif value not in (None, [], ""):
            is_list = isinstance(value, list) and all(type(each) is int for each in value)
            said = ranks_named(value) if is_list and name in _RANK_LISTS else _cell(value)
            parts.append(
                f'<p class="evidence"><span>{text(name.replace("_", " "))}</span> {text(said)}</p>'
            )
    return [*tables, *parts]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["".join(_cell_html(row.get(key, "")) for key in columns) for row in rows[:_MOST_ROWS]]
    told = f" (the first {_MOST_ROWS} of {len(rows):,})" if len(rows) > len(lines) else ""
    head = [key.replace("_", " ") for key in columns]
    return wide(name, table_html(head, lines, f"{text(name.replace('_', ' '))}{told}"))


def _cell_html(value: Any) -> str:
    kind = "" if isinstance(value, (int, float)) else ' class="text"'
    return f"<td{kind}>{text(_cell(value))}</td>"


def table_html(head: Iterable[str], rows: Iterable[str], caption: str = "") -> str:
    """Return a table: titles as text, the cells of each row and the caption as HTML."""
    titles = "".join(f'<th scope="col">{text(title)}</th>' for title in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    named = f"<caption>{caption}</caption>" if caption else ""
    return f"<table>{named}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def wide(name: str, table: str) -> str:
    """Return a table that scrolls where it is wider than the page."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{text(name)}">{table}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return ranks_text(value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(each or "(root)" for each in value)
    if isinstance(value, list) and all(isinstance(each, float) for each in value):
        return " to ".join(f"{each:.6g}" for each in value)
    return value if isinstance(value, str) else json.dumps(value)


def job_html(name: str, trace: Trace) -> str:
    """Return a line that says which trace it is, how big the job was and how complete it is."""
    steps = counted(len(trace.steps), "step")
    state = "" if trace.is_complete else ' class="not-complete"'
    happened = "".join(f"<p>{text(told)}</p>" for told in trace.happened[:_FEW])
    return (
        f"<p{state}>{text(name)}<strong>{text(trace.path)}</strong>: {text(extent(trace.run))}, "
        f"{steps}; {text(trace.state)}</p>{happened}<p>{'; '.join(_facts(trace))}</p>"
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
    """Yield how many parameters the model has, or the lowest rank where more is not known: slices
    that nobody declared differ like experts, of which each rank has its own."""
    settings = trace.run.get("settings", {})
    if not trace.setup or settings.get("paths", "*") != "*" or settings.get("slots", "*") != "*":
        return
    whole = own = 0
    is_known = True
    for node in trace.setup[0].passing():
        named = [slot for slot in node.slots if slot.slot.startswith("param:")]
        is_known &= len({slot.slot for slot in named}) == len(named)
        for slot in named:
            shapes = slot.shapes()
            lowest = min(shapes, default=0)
            held = prod(shapes.get(lowest, (0,)))
            own += held if lowest == trace.run["ranks"][0]["rank"] else 0
            whole += held if slot.global_shape is None else prod(slot.global_shape)
            is_one = len(shapes) == 1 or (slot.distinct == 1 and any(slot.per_rank().values()))
            is_known &= slot.global_shape is not None or is_one
    if whole:
        yield f"{whole:,} parameters" if is_known else f"{own:,} parameters on the lowest rank"


def coverage_lines(report: Report) -> Iterator[str]:
    """Yield how much was judged, and why the rest was not, as bars and words in HTML."""
    held = report.compared - report.alone
    judged = "held to others" if report.command == "check" else "compared with the reference"
    parts = [
        (judged, held, "alike"),
        ("searched for NaN and infinity alone", report.alone - report.undeclared, "not-judged"),
        ("searched alone, because nobody declared their layout", report.undeclared, "not-judged"),
        ("in one run alone", report.unpaired, "not-judged"),
        ("not looked at", report.recorded - report.compared - report.unpaired, "not-judged"),
    ]
    yield f"<p>{report.recorded:,} values were recorded. Of these</p>"
    for label, count, kind in parts:
        if count > 0:
            yield _bar(label, count, report.recorded, kind)
    if report.skipped:
        yield "<p>Why values were not held to others:</p>"
    for skipped in report.skipped:
        yield _bar(skipped.reason, skipped.count, report.recorded, "not-judged")
    yield from (f"<p>{text(note)}</p>" for note in report.notes)


def _bar(label: str, count: int, whole: int, kind: str) -> str:
    share = 100 * min(count / max(whole, 1), 1.0)
    return (
        f'<div class="bar"><span>{text(label)}</span>'
        f'<svg class="{kind}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{share:.2f}" height="8"></rect></svg><span>{count:,}</span></div>'
    )
