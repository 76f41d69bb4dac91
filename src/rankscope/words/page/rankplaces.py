"""Where the ranks are, or how they ended: those of which the same is to be said in one line."""

from __future__ import annotations

import time
from typing import Final

from rankscope.diagnosis.evidence.lastcalls import LastCall, last_calls
from rankscope.diagnosis.evidence.stepview import step_view_of
from rankscope.diagnosis.rules.endings import ends_of
from rankscope.record.ranks import NOTHING, RankPlace, alike_places, ranks_named, step_label
from rankscope.tree.summary import counted
from rankscope.tree.views import Trace
from rankscope.words.page.verdicthtml import table_html

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
    return places, {rank: each.time_ns for rank, each in last.items()}


def ranks_html(trace: Trace, *, reads_calls: bool = True) -> str:
    """Return a table: state, last step, last call, in which collective, how long ago; `reads_calls`
    as of `places_in`."""
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


def _age(least: float, most: float) -> str:
    if most - least < 1:
        return f"{most:.0f} s ago"
    return f"{least:.0f} to {most:.0f} s ago"
