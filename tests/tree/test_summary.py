"""What is said of a trace before any number of it: extent, ends, the exception that ended a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.record.call import CallStatus, Mode
from rankscope.record.ranks import EndReason
from rankscope.record.texts import endings, extent
from rankscope.tree.build import build
from rankscope.tree.crashes import crashes
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank

RAISED = CallStatus.RAISED
BOOM = "ValueError: boom\n  at the second line"


def raising(rank: PaperRank, paths: tuple[str, ...], error: str, *, step: int = 0) -> None:
    """A call of every path, each inside the one before, left by an exception."""
    calls: list[int] = []
    for path in paths:
        calls.append(rank.enter(path, step=step, parent=calls[-1] if calls else None))
    for call in reversed(calls):
        rank.exit(call, RAISED, error)


def finished(out: Path, *ranks: PaperRank) -> Trace:
    for rank in ranks:
        rank.ship(out)
    build(out)
    return open_trace(out)


def test_the_exception_is_told_with_the_innermost_call_it_left(tmp_path: Path) -> None:
    """Of two ranks, the first in time first; a rank whose collective failed later comes behind."""
    early, late = (
        PaperRank(tmp_path / "s", 1, 2),
        PaperRank(tmp_path / "s", 0, 2, clock=9_000_000),
    )
    raising(early, ("", "layers.0", "layers.0.fc"), BOOM)
    raising(late, ("",), "RuntimeError: connection closed by peer")
    for rank in (early, late):
        rank.end(EndReason.RAISED)
    for rank in (early, late):
        rank.ship(tmp_path / "t", end="raised")
    build(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    first, second = crashes(trace)
    assert (first.rank, first.path, first.mode, first.step) == (1, "layers.0.fc", Mode.TRAIN, 0)
    assert first.error == "ValueError: boom at the second line", "on one line"
    assert (second.rank, second.path) == (0, "")
    assert endings(trace.completeness) == ["ranks 0-1 raised"]
    assert trace.is_complete, "all of it is there all the same"


def test_an_exception_that_the_program_caught_is_not_what_ended_it(tmp_path: Path) -> None:
    rank = PaperRank(tmp_path / "s")
    raising(rank, ("", "head"), "ValueError: tried")
    with rank.call(step=0, micro_batch=1):
        pass
    rank.end(EndReason.RAISED)
    rank.ship(tmp_path / "t", end="raised")
    build(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    assert crashes(trace) == []
    assert endings(trace.completeness) == ["rank 0 raised"]


def test_an_exception_caught_inside_a_call_gives_way_to_the_one_that_left_it(
    tmp_path: Path,
) -> None:
    rank = PaperRank(tmp_path / "s")
    root = rank.enter()
    rank.exit(rank.enter("tried", parent=root), RAISED, "KeyError: caught")
    rank.exit(rank.enter("last", parent=root), RAISED, BOOM)
    rank.exit(root, RAISED, BOOM)
    rank.end(EndReason.RAISED)
    rank.ship(tmp_path / "t", end="raised")
    build(tmp_path / "t")
    assert [crash.path for crash in crashes(open_trace(tmp_path / "t"))] == ["last"]


def test_an_exception_outside_of_every_module_is_told_with_its_line(tmp_path: Path) -> None:
    """A call left by an exception that the program caught is not where a later one was raised."""
    rank = PaperRank(tmp_path / "s")
    raising(rank, ("", "head"), "ValueError: tried")
    rank.define("raised", error="KeyError: 'loss'", causes=["OSError: a\n b"], where="t.py:3 main")
    rank.end(EndReason.RAISED)
    (crash,) = crashes(finished(tmp_path / "t", rank))
    assert (crash.path, crash.phase, crash.where) == (None, None, "t.py:3 main")
    assert str(crash) == (
        "KeyError: 'loss', after OSError: a b, outside of any module's call, at t.py:3 main  "
        "last traced: train step 0"
    )


def test_an_exception_that_a_program_raised_anew_is_the_modules(tmp_path: Path) -> None:
    rank = PaperRank(tmp_path / "s")
    raising(rank, ("", "head"), BOOM)
    rank.define("raised", error="RuntimeError: step failed", causes=[BOOM], where="m.py:9 forward")
    rank.end(EndReason.RAISED)
    (crash,) = crashes(finished(tmp_path / "t", rank))
    assert (crash.path, crash.error) == ("head", "ValueError: boom at the second line")


def test_lives_of_a_restarted_job_are_counted_and_the_last_one_is_judged(tmp_path: Path) -> None:
    lives = [PaperRank(tmp_path / "s", incarnation=life) for life in range(3)]
    for rank in lives[:2]:
        raising(rank, ("",), BOOM)
        rank.end(EndReason.RAISED)
        rank.ship(tmp_path / "t", end="raised")
    with lives[2].call():
        pass
    lives[2].end()
    trace = finished(tmp_path / "t", lives[2])
    assert extent(trace.run) == "1 rank on 1 host, 3 lives"
    assert endings(trace.completeness) == []
    assert [crash.incarnation for crash in crashes(trace)] == [0, 1]


@pytest.mark.parametrize("what", ["lost", "missing", "empty"])
def test_a_rank_that_is_gone_or_traced_nothing_is_named(tmp_path: Path, what: str) -> None:
    world = 2 if what == "missing" else 1
    rank = PaperRank(tmp_path / "s", 0, world)
    if what != "empty":
        with rank.call():
            pass
    if what != "lost":
        rank.end()
    trace = finished(tmp_path / "t", rank)
    said = {
        "lost": "incomplete; rank 0 lost",
        "missing": "incomplete; nothing from rank 1",
        "empty": "complete; no step was traced",
    }
    assert trace.state == said[what]


def test_a_trace_a_value_and_a_layout_print_as_one_readable_line(tmp_path: Path) -> None:
    grid_job(tmp_path / "s", tmp_path / "t")
    build(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    value = trace.value("fc", "output")
    assert repr(trace) == f"Trace({trace.path}: 4 ranks on 2 hosts, mesh dp=2,tp=2, complete)"
    assert str(value.layout) == "dp=Replicate() tp=Shard(1)"
    assert str(value) == "output float32[4, 6], dp=Replicate() tp=Shard(1), ranks 0-3, 2 values"
    plain = trace.value("", "input.0")
    assert str(plain.layout) == "unknown"
    for each in (value, value.layout, plain, plain.layout):
        assert "\n" not in repr(each) and len(repr(each)) < 100
