"""Where the ranks are, or how they ended: those of which the same is to be said in one line."""

from __future__ import annotations

import time
from typing import Final

from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.endings import ends_of
from rankscope.diagnosis.lastcalls import LastCall, last_calls
from rankscope.diagnosis.stepview import step_view_of
from rankscope.page.pagesteps import PageStep
from rankscope.page.verdicthtml import text
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.streams import EndReason
from rankscope.tree.views import Trace

__all__ = ["ranks_html"]

_LAST_STEPS: Final = 3
_MOST_LINES: Final = 40
_ENDS: Final = {
    EndReason.EXIT.value: "ended",
    EndReason.CLOSED.value: "closed by the program",
    EndReason.RAISED.value: "raised",
    EndReason.LOST.value: "lost",
    EndReason.SWITCHED_OFF.value: "rankscope switched off",
    EndReason.RUNNING.value: "running",
}


def ranks_html(trace: Trace, context: CheckContext | None) -> str:
    """Return a table: state, last step, last call, in which collective, how long ago.

    Args:
        trace: the trace.
        context: what `check` knows at its end, None where it saw no step.
    """
    last: dict[int, LastCall] = {}
    steps = [*trace.setup, *trace.steps][-_LAST_STEPS:]
    if context is not None:
        last = last_calls([step_view_of(step, context.columns) for step in steps], context)
    ends = ends_of(trace)
    lines: dict[tuple[str, ...], list[int]] = {}
    for rank, end in sorted(ends.items()):
        lines.setdefault((_ENDS.get(end, end), *_place(last.get(rank))), []).append(rank)
    missing = str(trace.completeness["missing"])
    head = ["ranks", "state", "last step", "last in", "waits in"]
    now_ns = time.time_ns()
    rows = []
    for said, ranks in list(lines.items())[:_MOST_LINES]:
        cells = [ranks_named(ranks), *said]
        if trace.is_live:
            ages = [(now_ns - last[rank].time_ns) / 1e9 for rank in ranks if rank in last]
            cells.append(_age(min(ages), max(ages)) if ages else "-")
        rows.append("".join(f"<td>{text(cell, 200)}</td>" for cell in cells))
    if trace.is_live:
        head.append("last call began")
    if missing:
        rows.append(f"<td>{text(ranks_named(missing))}</td><td>nothing came from them</td>")
    if len(lines) > _MOST_LINES:
        rows.append(f"<td>and {len(lines) - _MOST_LINES} groups of ranks more</td>")
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        '<div class="wide" tabindex="0" role="group" aria-label="ranks"><table>'
        f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _place(last: LastCall | None) -> tuple[str, str, str]:
    """Return step, call and collective in words."""
    if last is None:
        return "-", "-", "-"
    view = last.step_view
    step = PageStep(view.mode, view.step, view.incarnation, is_setup=view.is_setup).label
    waits = "-"
    if last.waiting is not None:
        node = last.waiting.call.node
        facts = node.collectives[0][1] if node.collectives else {}
        members = ranks_text(facts.get("members", ()))
        waits = f"{facts.get('op', 'collective')} of {ranks_named(members)}"
    return step, f"{last.call.phase.word} of {last.call.path or '(root)'}", waits


def _age(least: float, most: float) -> str:
    if most - least < 1:
        return f"{most:.0f} s ago"
    return f"{least:.0f} to {most:.0f} s ago"
