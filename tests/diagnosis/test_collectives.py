"""Collectives: members, order, arguments, sums; and who waits for whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.call import CallStatus
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.spool.recordformat import NO_SEQUENCE
from tests.diagnosis.paper import collective, judged, module, numbers, origins, setup
from tests.tree.ranks_on_paper import PaperRank

SUM = numbers(0, 6) + numbers(1, 6)


def summed(rank: PaperRank, path: str, number: int, parent: int, made: np.ndarray, **more) -> int:
    return collective(rank, path, number, numbers(rank.rank, 6), made, parent=parent, **more)


def test_a_sum_that_is_the_sum_is_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            summed(rank, "fc", 0, top, SUM)

    report = judged(tmp_path, 2, write)
    assert report.verdict is Verdict.CLEAN
    assert report.compared == 2


@pytest.mark.parametrize("reduce", ["sum", "avg", "max"])
def test_an_output_that_its_inputs_do_not_give_is_told(tmp_path: Path, reduce: str):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            summed(rank, "fc", 0, top, SUM * 3, reduce=reduce)

    found = origins(judged(tmp_path, 2, write))
    assert found == [("collective-mismatch", "collective", "fc", "collective.0", (0, 1))]


def test_other_reduce_ops_are_told_with_both_sides(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            summed(rank, "fc", 0, top, SUM, reduce="max" if rank.rank else "sum")

    report = judged(tmp_path, 2, write)
    assert origins(report)[0][:4] == ("collective-mismatch", "collective", "fc", "collective.0")
    assert {side["call"].split()[1] for side in report.findings[0].evidence["sides"]} == {
        "reduce=sum",
        "reduce=max",
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dtype_is_another_only_where_it_is_that_of_the_same_collective(
    tmp_path: Path, dtype: str
):
    """Rank 1 has one more group: its sum there stands in the place of the one that both make."""

    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            if rank.rank:
                own = collective(rank, "fc", 0, None, None, parent=top, group="1", members=[1])
                rank.value(own, "input.0", SUM, phase=Phase.COLLECTIVE, dtype="int64")
                rank.exit(own)
            both = collective(rank, "fc", 0, None, None, parent=top, ordinal=rank.rank)
            given = {"phase": Phase.COLLECTIVE, "ordinal": rank.rank}
            rank.value(both, "input.0", SUM, **given, dtype=dtype if rank.rank else "float32")
            rank.exit(both)

    found = judged(tmp_path, 2, write).findings
    sides = [side["call"].split()[2] for each in found for side in each.evidence["sides"]]
    assert sorted(sides) == ([] if dtype == "float32" else ["dtype=float32", "dtype=float64"])


def test_a_group_that_means_other_members_on_some_ranks_is_told(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        members = [0, 2] if rank.rank in (0, 2) else [1, 3]
        group = "1" if rank.rank in (0, 3) else "2"
        with rank.call(class_name="Model") as top:
            collective(rank, "fc", 0, None, numbers(5, 6), parent=top, group=group,
                       members=members)  # fmt: skip

    report = judged(tmp_path, 4, write)
    assert origins(report) == [("group-mismatch", "collective", "fc", "collective.0", (0, 1, 2, 3))]
    listed = [each["members"] for each in report.findings[0].evidence["groups"]]
    assert [0, 2] in listed and [1, 3] in listed


def test_collectives_swapped_on_one_rank_are_both_told(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            for number, path in enumerate(("a", "b") if rank.rank == 0 else ("b", "a")):
                summed(rank, path, number, top, SUM)

    found = origins(judged(tmp_path, 2, write))
    assert {(f[0], f[2], f[3], f[4]) for f in found} == {
        ("collective-mismatch", "a", "collective.0", (0, 1)),
        ("collective-mismatch", "b", "collective.0", (0, 1)),
    }


def test_swapped_inside_one_module_the_lines_tell(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            for number, line in enumerate(("x.py:1 f", "x.py:2 g")[:: -1 if rank.rank else 1]):
                summed(rank, "fc", number, top, SUM, at=line, ordinal=number)

    report = judged(tmp_path, 2, write)
    assert {f[3] for f in origins(report)} == {"collective.0", "collective.1"}
    assert "x.py:2 g" in str(report.findings[0].evidence)


def test_ranks_that_call_from_other_lines_are_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            summed(rank, "fc", 0, top, SUM, at=f"x.py:{rank.rank} f")

    assert judged(tmp_path, 2, write).verdict is Verdict.CLEAN


def messages(
    folder: Path, sent: list[int], received: list[int], *, since: str = "start", late: int = 0
) -> list[tuple]:
    """Rank 0 sends a value a step; rank 1 records its receives `late` steps after, or before."""

    def write(rank: PaperRank) -> None:
        setup(rank, {"a.weight": numbers(90 + rank.rank)})
        for number, seed in enumerate(received if rank.rank else sent):
            step = number + late * rank.rank
            facts = {"op": "recv" if rank.rank else "send", "peer": 1 - rank.rank, "tag": 0}
            facts |= {"since": since} if since else {}
            given, made = (None, numbers(seed)) if rank.rank else (numbers(seed), numbers(seed))
            with rank.call(class_name="Model", step=step) as top:
                collective(
                    rank, "fc", number, given, made, parent=top, step=step, reduce=None, **facts
                )

    return origins(judged(folder, 2, write))


WRONG = ("collective-mismatch", "collective", "fc", "collective.0", (1,))


@pytest.mark.parametrize("late", [0, 1])
def test_received_is_what_was_sent_in_whatever_step(tmp_path: Path, late: int):
    """A stage without an optimizer receives what it works on before its step has begun."""
    assert messages(tmp_path / "right", [3, 4, 5], [3, 4, 5], late=late) == []
    assert messages(tmp_path / "wrong", [3, 4, 5], [3, 7, 5], late=late) == [WRONG]


def test_messages_whose_number_is_not_known_are_not_paired(tmp_path: Path):
    """Some before them were not recorded: the second may be the third on the other rank."""
    assert messages(tmp_path, [3, 4], [4, 5], since="") == []


def test_receives_that_fit_the_sends_with_an_offset_say_that_the_numbers_are_wrong(tmp_path: Path):
    """Ranks that began to record at different messages have nothing wrong with their values."""
    assert messages(tmp_path, [3, 4, 5], [4, 5, 6]) == []


def test_a_rank_that_never_came_is_told_with_who_waits_where(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        with rank.call("first", parent=top) as first:
            summed(rank, "first", 0, first, SUM)
        if rank.rank == 0:
            gate = rank.enter("gate", parent=top)
            collective(rank, "gate", 1, numbers(0, 6), None, parent=gate)
        else:
            rank.enter("after", parent=top)

    ends = {0: EndReason.LOST, 1: EndReason.LOST}
    report = judged(tmp_path, 2, write, ends=ends)
    assert origins(report) == [("hang", "collective", "gate", "collective.0", (1,))]
    evidence = report.findings[0].evidence
    assert evidence["missing"] == "1"
    assert [w["path"] for w in evidence["waiting"]] == ["gate"]
    assert {each["rank"]: each["path"] for each in evidence["last"]}[1] == "after"


def test_a_crash_is_the_cause_of_the_wait_for_it(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        head = rank.enter("head", parent=top)
        if rank.rank == 0:
            collective(rank, "head", 0, numbers(0, 6), None, parent=head)
        else:
            rank.exit(head, CallStatus.RAISED, "ZeroDivisionError: division by zero")
            rank.exit(top, CallStatus.RAISED, "ZeroDivisionError: division by zero")

    report = judged(tmp_path, 2, write, ends={0: EndReason.LOST, 1: EndReason.RAISED})
    assert [(f[0], f[2], f[4]) for f in origins(report)] == [("crash", "head", (1,))]
    assert [f.kind.value for f in report.findings] == ["crash", "hang"]


def test_a_crash_in_a_forward_after_a_collective_of_its_own_names_the_forward(tmp_path: Path):
    """A collective has the path of its module: it must not be taken for the call that crashed. One
    that is left by the exception itself tells no more than the module's forward."""

    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        head = rank.enter("head", parent=top)
        collective(rank, "head", 0, numbers(0, 6), numbers(0, 6), parent=head)
        if rank.rank == 0:
            collective(rank, "head", 1, numbers(0, 6), None, parent=head)
        else:
            rank.exit(head, CallStatus.RAISED, "ZeroDivisionError: division by zero")
            rank.exit(top, CallStatus.RAISED, "ZeroDivisionError: division by zero")

    report = judged(tmp_path, 2, write, ends={0: EndReason.LOST, 1: EndReason.RAISED})
    found = [(f.kind.value, f.path, f.phase.word) for f in report.origins]
    assert found == [("crash", "head", "forward")]


def test_an_exception_outside_of_modules_is_told_with_its_text_and_peers_that_lost_it_are_not(
    tmp_path: Path,
):
    """Behind a collective of the script the place is still no collective."""

    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "a", numbers(0), numbers(1))
        collective(rank, "", 0, numbers(0, 6), numbers(0, 6), parent=NO_SEQUENCE)
        error = "OSError: no such file" if rank.rank == 1 else "RuntimeError: Connection reset"
        rank.define("raised", error=error, causes=[], where="train.py:31 main")

    ends = dict.fromkeys(range(3), EndReason.RAISED)
    (finding,) = judged(tmp_path, 3, write, ends=ends).origins
    assert (finding.path, finding.phase.word, finding.ranks) == ("", "forward", (1,))
    assert "OSError: no such file, outside of any module's call, at train.py:31" in finding.message


@pytest.mark.parametrize("path", [None, "head"])
def test_each_rank_that_crashed_by_an_exception_of_its_own_is_an_origin(
    tmp_path: Path, path: str | None
):
    """One place, as many crashes as ranks: none is another word for that of another rank, and
    nothing puts one before the other. Ranks that raised the same are told together."""

    def write(rank: PaperRank) -> None:
        error = f"ValueError: number {min(rank.rank, 3)}"
        top = rank.enter(class_name="Model")
        head = rank.enter("head", parent=top)
        how = (CallStatus.RAISED, error) if path else (CallStatus.RETURNED, "")
        rank.exit(head, *how)
        rank.exit(top, *how)
        rank.define("raised", error=error, causes=[], where="train.py:31 main")

    report = judged(tmp_path, 5, write, ends=dict.fromkeys(range(5), EndReason.RAISED))
    found = {f.ranks: f for f in report.origins if f.kind is Kind.CRASH}
    assert sorted(found) == [(0,), (1,), (2,), (3, 4)]
    assert all(f"number {ranks[0]}" in f.message for ranks, f in found.items())
    assert all(len(f.evidence["unordered"]) == 3 for f in found.values())


def test_a_stage_that_works_on_another_micro_batch_is_told(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        for micro in range(4):
            given = micro if not (rank.rank == 1 and micro == 2) else 1
            with rank.call(class_name="Stage", micro_batch=micro) as top:
                rank.value(top, "input.0", numbers(100 + given if rank.rank else micro))
                rank.value(top, "output", numbers(100 + micro + 100 * rank.rank))

    report = judged(tmp_path, 2, write)
    assert origins(report) == [("collective-mismatch", "forward", "", "input.0", (1,))]
    assert report.findings[0].micro_batch == 2


def test_a_stage_whose_calls_are_counted_one_later_is_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        for micro in range(4):
            with rank.call(class_name="Stage", micro_batch=micro) as top:
                rank.value(top, "input.0", numbers(99 + micro if rank.rank else micro))
                rank.value(top, "output", numbers(100 + micro + 100 * rank.rank))

    assert origins(judged(tmp_path, 2, write)) == []


def test_modules_beside_collectives_do_not_disturb(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(rank.rank), numbers(9 + rank.rank))

    assert judged(tmp_path, 2, write).verdict is Verdict.CLEAN


def test_a_rank_that_is_gone_is_the_cause_of_the_broken_connection_of_another(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        if rank.rank == 0:
            rank.exit(top, CallStatus.RAISED, "RuntimeError: gloo: Connection reset by peer")

    report = judged(tmp_path, 2, write, ends={0: EndReason.RAISED, 1: EndReason.LOST})
    assert [(f[0], f[4]) for f in origins(report)] == [("crash", (1,))]


@pytest.mark.parametrize(("killed", "named"), [(True, (1,)), (False, (0,))])
def test_a_killed_rank_is_the_cause_where_the_one_that_raised_had_gone_on(
    tmp_path: Path, killed: bool, named: tuple[int, ...]
):
    """Rank 0 raises outside of any call. Rank 1 is gone: killed in `a` while rank 0 came to `b`, or
    ended by the launcher in `b`, to which rank 0 never came."""

    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        first = rank.enter("a", parent=top)
        stops = rank.rank == (1 if killed else 0)
        if stops and killed:
            return
        rank.exit(first)
        if not stops:
            second = rank.enter("b", parent=top)
            if rank.rank:
                return
            rank.exit(second)
        rank.exit(top)

    report = judged(tmp_path, 2, write, ends={0: EndReason.RAISED, 1: EndReason.LOST})
    assert [(f[0], f[4]) for f in origins(report)] == [("crash", named)]
    assert ("gone" in report.findings[0].message) is killed


def test_of_ranks_that_raised_outside_of_calls_the_one_left_behind_is_named(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "a", numbers(0), numbers(1))
            if rank.rank != 2:
                module(rank, "b", numbers(1), numbers(2))
            if rank.rank == 0:
                module(rank, "c", numbers(2), numbers(3))

    ends = dict.fromkeys(range(4), EndReason.RAISED)
    report = judged(tmp_path, 4, write, ends=ends)
    assert [f[4] for f in origins(report) if f[0] == "crash"] == [(2,)]


def test_where_nothing_tells_who_ended_first_both_are_told(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "a", numbers(0), numbers(1))

    ends = {0: EndReason.RAISED, 1: EndReason.LOST}
    (finding,) = judged(tmp_path, 2, write, ends=ends).origins
    assert "rank 1, last in the same place, may have gone first" in finding.message
