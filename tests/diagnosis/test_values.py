"""What is not finite, what moved, what was recomputed, what ranks hold as different things."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.layout.placement import Mesh
from rankscope.record.finding import Verdict
from rankscope.record.notes import Note, NoteKind
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import StepEvent
from tests.diagnosis.paper import collective, event, judged, module, numbers, origins, setup
from tests.tree.ranks_on_paper import PaperRank


def spoiled(value: np.ndarray, by: float = np.inf) -> np.ndarray:
    made = value.copy()
    made.reshape(-1)[0] = by
    return made


# ---- not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [np.inf, np.nan])
def test_the_call_that_made_it_is_the_origin_and_ranks_that_caught_it_are_not(
    tmp_path: Path, by: float
):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(0))
            made = numbers(1 + rank.rank, 6)
            module(rank, "act", numbers(0, 6), spoiled(made, by) if rank.rank == 1 else made)
            given = spoiled(made, by) if rank.rank == 1 else made
            collective(rank, "row", 0, given, spoiled(made, by), parent=top)
            module(rank, "head", spoiled(made, by), spoiled(numbers(9), np.nan))

    report = judged(tmp_path, 2, write)
    assert origins(report)[0] == ("nonfinite-origin", "forward", "act", "output", (1,))
    assert len(report.origins) == 1
    assert report.findings[0].evidence["caught_through"] == ["row:collective.0 (rank 0)"]


def test_masks_of_minus_infinity_are_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        for step in range(2):
            with rank.call(class_name="Model", step=step):
                mask = spoiled(numbers(5), -np.inf)
                module(rank, "mask", numbers(0), mask, step=step)
                module(rank, "attention", mask, numbers(6), step=step)

    assert judged(tmp_path, 2, write).verdict is Verdict.CLEAN


def test_overflow_in_a_step_that_a_scaler_skipped_is_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)})
        gradient = {"fc.weight": spoiled(numbers(1))}
        with rank.call(class_name="Model") as top:
            given, made = spoiled(numbers(1)), spoiled(numbers(2))
            collective(rank, "fc", 0, given, made, parent=top, issuer="backward", members=[0])
        event(rank, Phase.GRADS, "grad", gradient, flags=int(ValueFlag.SKIPPED))

    assert judged(tmp_path, 1, write).verdict is Verdict.CLEAN


def test_values_without_a_finite_element_were_held_to_nothing(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0), "fc.bias": numbers(1, 6)})
        nothing = np.full((4, 6), np.nan, np.float32)
        gradients = {"fc.weight": nothing, "fc.bias": spoiled(numbers(2, 6))}
        event(rank, Phase.GRADS, "grad", gradients, flags=int(ValueFlag.SKIPPED))

    report = judged(tmp_path, 2, write)
    assert report.verdict is Verdict.CLEAN and (report.judged, report.alone) == (4, 1)
    (skipped,) = report.skipped
    assert (skipped.reason, skipped.count) == ("no finite element on any rank", 1)


def test_a_rank_that_only_took_part_in_the_reduction_is_a_victim(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)})
        with rank.call(class_name="Model") as top, rank.call("fc", parent=top) as layer:
            given = spoiled(numbers(1), np.nan) if rank.rank else numbers(1)
            rank.value(layer, "grad_output", given, phase=Phase.BACKWARD)
        event(rank, Phase.GRADS, "grad", {"fc.weight": spoiled(numbers(2), np.nan)})

    assert origins(judged(tmp_path, 2, write)) == [
        ("nonfinite-origin", "backward", "fc", "grad_output", (1,))
    ]


def test_what_comes_in_spoiled_is_charged_to_where_it_came_in(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", spoiled(numbers(0), np.nan))
            rank.value(top, "output", spoiled(numbers(1), np.nan))

    assert origins(judged(tmp_path, 1, write)) == [
        ("nonfinite-origin", "forward", "", "input.0", (0,))
    ]


FOREIGN = Note.of(
    NoteKind.FOREIGN_PARAMETERS, optimizer="SGD", own=0, foreign=1, idle=1, shapes="[6]"
)

# ---- updates -------------------------------------------------------------------------------------


def trained(rank: PaperRank, moved: dict[str, float], *, note: Note | str = "", **how) -> None:
    """One step in which some parameters move and others do not."""
    values = {name: numbers(n) for n, name in enumerate(moved)}
    setup(rank, values)
    rank.step(StepEvent.BEGIN, 0)
    if note:
        rank.step(StepEvent.NOTE, 0, note=note)
    event(rank, Phase.GRADS, "grad", {n: numbers(50 + k) for k, n in enumerate(values)}, **how)
    after = {name: value + np.float32(moved[name]) for name, value in values.items()}
    dtype = how.get("dtype", "float32")
    event(rank, Phase.PARAMS, "param", after, dtype=dtype)


def test_a_parameter_that_stays_beside_others_that_move_is_told(tmp_path: Path):
    report = judged(tmp_path, 1, lambda rank: trained(rank, {"a.weight": True, "b.weight": False}))
    assert origins(report) == [("parameter-not-updated", "params", "b", "param:weight", (0,))]


def test_few_elements_may_stay_where_steps_are_as_small_as_their_spacing(tmp_path: Path):
    tiny = {"a.weight": 5e-8, "b.weight": 0.0}
    assert judged(tmp_path / "tiny", 1, lambda rank: trained(rank, tiny)).verdict is Verdict.CLEAN
    small = {"a.weight": 2e-4, "b.weight": 0.0}
    report = judged(tmp_path / "small", 1, lambda rank: trained(rank, small))
    assert origins(report) == [("parameter-not-updated", "params", "b", "param:weight", (0,))]


def test_a_step_in_which_nothing_moves_is_a_warm_up(tmp_path: Path):
    report = judged(tmp_path, 1, lambda rank: trained(rank, {"a.weight": False, "b.weight": False}))
    assert report.verdict is Verdict.CLEAN


def test_narrow_parameters_may_lose_small_updates(tmp_path: Path):
    moved = {"a.weight": True, "norm.weight": False}
    report = judged(tmp_path, 1, lambda rank: trained(rank, moved, dtype="bfloat16"))
    assert report.verdict is Verdict.CLEAN


@pytest.mark.parametrize(("times", "count"), [(1, 0), (20, 1)])
def test_a_narrow_parameter_should_move_where_a_sibling_moved_with_much_less(
    tmp_path: Path, times: int, count: int
):
    def write(rank: PaperRank) -> None:
        before = {f"layers.{n}.norm.weight": np.ones(6, np.float32) for n in range(2)}
        setup(rank, before)
        gradients = {name: numbers(5, 6) * np.float32(1 + (times - 1) * n)
                     for n, name in enumerate(before)}  # fmt: skip
        event(rank, Phase.GRADS, "grad", gradients)
        after = before | {"layers.0.norm.weight": np.full(6, 1.5, np.float32)}
        event(rank, Phase.PARAMS, "param", after, dtype="bfloat16")

    assert len(origins(judged(tmp_path, 1, write))) == count


@pytest.mark.parametrize(
    ("note", "severity"),
    [("", "warning"), (FOREIGN, "fault"), (str(FOREIGN), "fault")],
    ids=["no note", "a note", "a note of a trace without facts"],
)
def test_what_no_optimizer_holds_is_a_warning_and_a_fault_where_one_holds_strangers(
    tmp_path: Path, note: Note | str, severity: str
):
    unheld = int(ValueFlag.UNHELD)
    report = judged(
        tmp_path, 1, lambda rank: trained(rank, {"a.weight": False}, flags=unheld, note=note)
    )
    (finding,) = report.findings
    assert (finding.kind.value, finding.severity.value) == ("parameter-not-updated", severity)
    assert finding.evidence["notes"] == ([f"rank 0: {note}"] if note else [])


def test_parameters_read_behind_the_last_optimizer_step_belong_to_the_gradients_of_an_earlier_one(
    tmp_path: Path,
):
    """What no optimizer holds is read when the train step closes, in an event of its own."""

    def write(rank: PaperRank) -> None:
        value = {"a.weight": numbers(0)}
        setup(rank, value)
        flags = int(ValueFlag.UNHELD)
        event(rank, Phase.GRADS, "grad", {"a.weight": numbers(50)}, flags=flags)
        event(rank, Phase.PARAMS, "param", value, ordinal=2, flags=int(ValueFlag.AFTER_CALL))

    (finding,) = judged(tmp_path, 1, write).findings
    assert (finding.kind.value, finding.severity.value) == ("parameter-not-updated", "warning")


# ---- recomputation, structure --------------------------------------------------------------------


def test_a_recomputation_that_gives_something_else_is_told(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "dropout", numbers(0), numbers(1 + rank.rank))
            module(rank, "fc", numbers(2), numbers(3))
        again = Phase.RECOMPUTE
        module(rank, "dropout", numbers(0), numbers(7 + rank.rank), phase=again)
        module(rank, "fc", numbers(2), numbers(3), phase=again)

    found = origins(judged(tmp_path, 2, write))
    assert found == [("recompute-mismatch", "recompute", "dropout", "output", (0, 1))]


def test_a_module_called_twice_is_recomputed_last_call_first(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            for n in (0, 1):
                module(rank, "shared", numbers(n), numbers(10 + n))
        for n in (1, 0):
            module(rank, "shared", numbers(n), numbers(10 + n), phase=Phase.RECOMPUTE)

    assert judged(tmp_path, 1, write).verdict is Verdict.CLEAN


def test_a_dtype_left_behind_is_charged_to_the_rank_that_siblings_outvote(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        for n in range(3):
            is_odd = n == 1 and rank.rank == 0
            dtype = "bfloat16" if is_odd else "float32"
            value = {f"layers.{n}.norm.weight": np.ones(6, np.float32)}
            event(rank, Phase.SETUP, "param", value, dtype=dtype)

    found = origins(judged(tmp_path, 2, write))
    assert found == [("dtype-mismatch", "setup", "layers.1.norm", "param:weight", (0,))]


def test_stages_of_a_pipeline_may_be_handed_different_things(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {f"layers.{rank.rank}.weight": numbers(rank.rank)})
        with rank.call(class_name="Model") as top:
            rank.value(
                top, "input.0", numbers(rank.rank), dtype="int64" if rank.rank else "float32"
            )
            module(rank, f"layers.{rank.rank}", numbers(5), numbers(6 + rank.rank))

    assert judged(tmp_path, 2, write).verdict is Verdict.CLEAN


@pytest.mark.parametrize(("data", "found"), [(0, [("structure-mismatch", "b", (1,))]), (1, [])])
def test_a_module_not_called_is_told_where_the_ranks_had_the_same_data(
    tmp_path: Path, data: int, found: list
):
    def write(rank: PaperRank) -> None:
        setup(rank, {f"{name}.weight": numbers(n) for n, name in enumerate("abc")})
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7 + data * rank.rank))
            for n, name in enumerate("abc"):
                if name != "b" or rank.rank == 0:
                    module(rank, name, numbers(20 + n + data * rank.rank), numbers(30 + n))

    told = origins(judged(tmp_path, 2, write))
    assert [(f[0], f[2], f[4]) for f in told] == found


def test_experts_of_which_each_rank_calls_its_own_are_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {f"experts.{n}.weight": numbers(n) for n in range(2)})
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7))
            module(rank, f"experts.{rank.rank}", numbers(20), numbers(30 + rank.rank))

    assert origins(judged(tmp_path, 2, write)) == []


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrappers", "count"), [(["DDP"], 1), ([], 0)])
def test_the_same_batch_on_data_parallel_ranks_is_a_warning(
    tmp_path: Path, wrappers: list[str], count: int
):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)}, wrappers=wrappers)
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7))
            rank.value(top, "output", numbers(8))

    report = judged(tmp_path, 2, write)
    assert report.verdict is Verdict.CLEAN
    assert [(f.kind.value, f.path, f.slot, f.ranks) for f in report.findings] == count * [
        ("duplicate-data", "", "input.0", (0, 1))
    ]


@pytest.mark.parametrize(("axis", "count"), [("dp_shard", 1), ("dp_shard_cp", 0)])
def test_one_batch_on_fsdp_ranks_is_no_duplicate_where_the_axis_cuts_sequences_too(
    tmp_path: Path, axis: str, count: int
):
    # under context parallelism ranks load one batch and each takes its part of the sequence
    mesh = Mesh(axes=(axis,), shape=(2,), ranks=(0, 1))

    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)}, wrappers=["FSDP2"], mesh=mesh)
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7))
            rank.value(top, "output", numbers(8))

    kinds = [finding.kind.value for finding in judged(tmp_path, 2, write).findings]
    assert kinds == count * ["duplicate-data"]


def test_ranks_that_place_one_value_differently_are_told_with_their_placements(tmp_path: Path):
    mesh = Mesh(axes=("tp",), shape=(3,), ranks=(0, 1, 2))

    def write(rank: PaperRank) -> None:
        value, how = numbers(0, 6), "Shard(0)" if rank.rank == 1 else "Replicate()"
        own = value[2:4] if rank.rank == 1 else value
        with rank.call(class_name="Model"), rank.call("fc", class_name="Linear") as call:
            rank.value(call, "input.0", own, mesh=mesh, placements=[how], whole=value.shape)

    (found,) = judged(tmp_path, 3, write).findings
    assert (found.kind.value, found.ranks) == ("placement-mismatch", (1,))
    assert found.message == (
        "fc:input.0: ranks 0,2: tp=Replicate() on mesh tp=3; rank 1: tp=Shard(0) on mesh tp=3"
    )
