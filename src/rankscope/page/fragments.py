"""A trace or a report as a piece of HTML for a notebook: the verdict, the first finding, which
ranks and steps there are and whether all of them arrived. No script, no network, no colour of its
own for text: it reads in a light and in a dark notebook, and where styles are taken out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.page.verdicthtml import job_html, table_html, text, verdict_html
from rankscope.record.finding import Report
from rankscope.record.ranklists import ranks_text
from rankscope.tree.summary import counted
from rankscope.tree.views import Trace

_MOST_JUDGED: Final = 200_000
"""Values of a trace that is judged to be shown: `check` takes a few seconds for so many."""
_MOST_ROWS: Final = 12
_STYLE: Final = """
.rankscope-piece { border-left: 4px solid #8888; padding-left: 0.8em; max-width: 60em }
.rankscope-piece:has(.verdict.fault) { border-color: #d33 }
.rankscope-piece:has(.verdict.incomplete) { border-color: #c80 }
.rankscope-piece:has(.verdict.clean) { border-color: #3a5 }
.rankscope-piece p, .rankscope-piece dl { margin: 0.3em 0 }
.rankscope-piece dt { float: left; clear: left; width: 5em; opacity: 0.7 }
.rankscope-piece dd { margin: 0 0 0 5.5em; overflow-wrap: anywhere }
.rankscope-piece table { border-collapse: collapse; margin: 0.3em 0 }
.rankscope-piece caption { text-align: left; opacity: 0.7 }
.rankscope-piece :is(td, th) { text-align: left; padding: 0.1em 1em 0.1em 0 }
"""


def trace_fragment(trace: Trace) -> str:
    """Return a trace as HTML, with its verdict where that takes a few seconds at most; TraceError:
    the trace is damaged."""
    parts = [job_html("", trace), _table(("ranks", "host", "ended", "records"), _rank_rows(trace))]
    if trace.steps:
        parts.append(_table(("steps", "numbers"), _step_rows(trace)))
    return _framed([_verdict_of(trace), *parts])


def report_fragment(report: Report) -> str:
    """Return a report as HTML: its verdict, its first finding, and its findings by kind."""
    parts = [verdict_html(report)]
    kinds = Counter((f.kind.value, "origin" if f.is_origin else "follows") for f in report.findings)
    if len(report.findings) > 1:
        rows = [(kind, place, f"{number:,}") for (kind, place), number in kinds.most_common()]
        parts.append(_table(("finding", "place", "count"), rows))
    parts += [f"<p>{text(note)}</p>" for note in report.notes[:_MOST_ROWS]]
    return _framed(parts)


def _verdict_of(trace: Trace) -> str:
    values = sum(len(s.columns()["values.rank"]) for s in (*trace.setup, *trace.steps))
    if values > _MOST_JUDGED:
        return f"<p>not judged here ({values:,} values): rankscope.check(trace)</p>"
    try:
        return verdict_html(check(trace))
    except RankscopeError as error:
        return f"<p>not judged: {text(error)}</p>"


def _rank_rows(trace: Trace) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for ranks that share host, life and end."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in trace.completeness["ranks"]:
        missing = rank["committed"] - rank["received"]
        lost = [f"{missing:,} bytes missing"] if missing else []
        lost += [f"{rank['dropped']:,} dropped"] if rank["dropped"] else []
        life = f", life {rank['incarnation']}" if rank["incarnation"] else ""
        state = "all here" if rank["complete"] else ", ".join(lost) or "not complete"
        groups.setdefault((rank["host"] + life, rank["end"], state), []).append(rank["rank"])
    for (host, end, state), ranks in groups.items():
        yield ranks_text(ranks), host, end, state
    if trace.completeness["missing"]:
        yield str(trace.completeness["missing"]), "", "", "nothing arrived"


def _step_rows(trace: Trace) -> Iterator[tuple[str, str]]:
    for mode in dict.fromkeys(step.mode for step in trace.steps):
        numbers = sorted({step.step for step in trace.steps if step.mode is mode})
        yield counted(len(numbers), f"{mode.word} step"), ranks_text(numbers)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    listed = list(rows)
    lines = ["".join(f"<td>{text(cell)}</td>" for cell in row) for row in listed[:_MOST_ROWS]]
    if len(listed) > _MOST_ROWS:
        lines.append(f'<td colspan="{len(head)}">and {len(listed) - _MOST_ROWS} more</td>')
    return table_html(head, lines)


def _framed(parts: Sequence[str]) -> str:
    return f'<div class="rankscope-piece"><style>{_STYLE}</style>{"".join(parts)}</div>'
