"""Ends of ranks whose spool was full: a record that found no room is no sign of what a rank did."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.record.finding import Report
from rankscope.record.ranks import EndReason
from rankscope.spool.recordformat import TO_ITS_END, StepEvent
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.diagnosis.paper import collective, judged, numbers, origins
from tests.tree.ranks_on_paper import PaperRank

MADE = numbers(0, 6)


def step(rank: PaperRank, number: int, *, is_in: bool = True, hangs: bool = False) -> None:
    """Record a step with a collective of all ranks, in which the rank is, or hangs, or is not."""
    rank.step(StepEvent.BEGIN, number)
    top = rank.enter(class_name="Model", step=number)
    if is_in:
        made = None if hangs else MADE
        collective(rank, "a", 0, MADE, made, parent=top, step=number, reduce="max")
    if is_in and not hangs:
        rank.exit(top)
        rank.step(StepEvent.END, number)


def ended(out: Path) -> Report:
    build(out)
    return check(open_trace(out))


@pytest.mark.parametrize("is_full", [False, True])
def test_what_a_full_spool_had_no_room_for_is_no_sign_of_who_stopped_first(tmp_path, is_full):
    """Rank 1 was last recorded in `a`, and is gone; rank 0 raised later, outside of any call."""

    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        first = rank.enter("a", parent=top)
        if rank.rank:
            if is_full:
                rank.gap(0, 0, TO_ITS_END)
            return
        rank.exit(first)
        with rank.call("b", parent=top):
            pass
        rank.exit(top)

    report = judged(tmp_path, 2, write, ends={0: EndReason.RAISED, 1: EndReason.LOST})
    assert [(f[0], f[4]) for f in origins(report)] == [("crash", (0,) if is_full else (1,))]


def test_of_a_rank_that_is_gone_it_is_said_where_its_records_stop(tmp_path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            pass
        if rank.rank:
            rank.gap(0, 0, TO_ITS_END)

    report = judged(tmp_path, 2, write, ends={1: EndReason.LOST})
    assert [(f[0], f[4]) for f in origins(report)] == [("crash", (1,))]
    assert "nothing is recorded of it from train step 0 on" in report.findings[0].message


def hang_of(report: Report) -> list[tuple[int, ...]]:
    """Return the ranks that each hang names."""
    return [finding.ranks for finding in report.findings if finding.kind.value == "hang"]


def test_a_gap_behind_which_was_recorded_again_hides_no_hang(tmp_path):
    """However long ago, and whoever was recorded last."""

    def write(rank: PaperRank) -> None:
        for number in range(12):
            if rank.rank and number == 2:
                rank.gap(0, 2, TO_ITS_END)
                rank.gap(9, 2, 2)
            elif not rank.rank or number < 6:
                step(rank, number, hangs=number == 11)

    ends = dict.fromkeys(range(2), EndReason.LOST)
    assert hang_of(judged(tmp_path, 2, write, ends=ends)) == [(1,)]


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_gap_of_an_earlier_life_hides_no_hang(tmp_path, is_settled):
    out = tmp_path / "trace"
    for life in range(2):
        for number in range(2):
            rank = PaperRank(tmp_path, number, 2, incarnation=life, clock=life * 10**9)
            for each in range(3):
                step(rank, each)
            if not life and number:
                rank.gap(0, 3, TO_ITS_END)
                if is_settled:
                    rank.gap(50, 3, 7)
            if life:
                step(rank, 3, is_in=not number, hangs=True)
            rank.ship(out, end="lost")
    assert hang_of(ended(out)) == [(1,)]


def test_a_single_record_that_was_dropped_elsewhere_hides_no_hang(tmp_path):
    """As one whose write a signal handler's cut in half."""

    def write(rank: PaperRank) -> None:
        step(rank, 0, is_in=not rank.rank, hangs=True)
        if not rank.rank:
            rank.gap(1, 0, 0)

    ends = {0: EndReason.RAISED, 1: EndReason.LOST}
    report = judged(tmp_path, 2, write, ends=ends)
    assert hang_of(report) == [(1,)]
    assert [finding.kind.value for finding in report.findings] == ["hang"]


def test_a_rank_that_dropped_train_and_eval_steps_to_its_end_is_not_said_to_be_missing(tmp_path):
    def write(rank: PaperRank) -> None:
        step(rank, 0)
        step(rank, 1)
        if rank.rank == 1:  # it waits in step 2 as rank 0 does
            rank.gap(0, 2, TO_ITS_END)
            rank.gap(20, 2, 2)
            rank.gap(20, 0, 0, "eval")
        else:
            step(rank, 2, is_in=rank.rank == 0, hangs=True)

    ends = {0: EndReason.LOST, 1: EndReason.RAISED, 2: EndReason.LOST}
    report = judged(tmp_path, 3, write, ends=ends)
    assert not any(1 in finding.ranks for finding in report.findings)
