"""Slices of any calls whatever nest on every lane."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rankscope.export.perfetto import Span, edges

times = st.integers(0, 30)
spans = st.lists(st.tuples(times, st.one_of(times, st.just(None))), max_size=12).map(
    lambda pairs: [
        Span(start, math.inf if length is None else start + length, number)
        for number, (start, length) in enumerate(pairs)
    ]
)


def play(found):
    """Open and close slices as a viewer does; return {span: (begin, end, lane, what it is in)}."""
    open_slices, slices, now = {}, {}, {}
    for lane, time, begins in found:
        stack = open_slices.setdefault(lane, [])
        assert time >= now.get(lane, 0), "edges of a lane come in order of time"
        now[lane] = time
        if begins is None:
            what = stack.pop()
            slices[what] = (slices[what][0], time, *slices[what][2:])
        else:
            slices[begins] = (time, math.inf, lane, stack[-1] if stack else None)
            stack.append(begins)
    return slices


@given(spans)
def test_every_call_has_its_own_times_and_lies_inside_the_slice_around_it(calls):
    slices = play(edges(calls))
    assert slices.keys() == {call.content for call in calls}
    for call in calls:
        begin, end, _, around = slices[call.content]
        assert begin == call.start
        if call.end != math.inf:
            assert end == call.end
        elif around is None:
            assert end == math.inf
        if around is not None:
            assert slices[around][0] <= begin
            assert end <= slices[around][1]


@given(spans)
def test_calls_that_nest_share_one_lane(calls):
    lanes = {slices[2] for slices in play(edges(calls)).values()}
    crossing = any(a.start < b.start < a.end < b.end < math.inf for a in calls for b in calls)
    assert crossing or lanes <= {0}


def test_a_parent_given_first_holds_a_child_of_the_same_times():
    slices = play(edges([Span(5, 9, "parent"), Span(5, 9, "child"), Span(9, 9, "next")]))
    assert slices["child"][3] == "parent"
    assert slices["next"][3] is None
