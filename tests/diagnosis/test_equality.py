"""Replicas: what must be equal, who is blamed, and what is called by another name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.finding import Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.paper import (
    LINE,
    PAIR,
    event,
    judged,
    module,
    numbers,
    origins,
    placed_on,
    setup,
)
from tests.tree.ranks_on_paper import PaperRank

ROUTER = """axes = "tp=2"
[[layout]]
path = "layers.*.router"
slot = "param:weight"
placements = { tp = "Replicate()" }
"""


def test_a_replica_outvoted_by_the_others_is_named_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(0), numbers(1 + (rank.rank == 2)), mesh=LINE)

    report = judged(tmp_path, 4, write)
    assert report.verdict is Verdict.FAULT
    assert origins(report) == [("replica-mismatch", "forward", "fc", "output", (2,))]
    assert "rank_resolution" not in report.findings[0].evidence
    assert {side["ranks"] for side in report.findings[0].evidence["values"]} == {"2", "0-1,3"}


def test_of_two_replicas_that_differ_both_are_named_because_nothing_tells(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"router.weight": numbers(rank.rank)}, mesh=PAIR)

    (finding,) = judged(tmp_path, 2, write).findings
    assert (finding.path, finding.slot, finding.ranks) == ("router", "param:weight", (0, 1))
    assert finding.phase is Phase.SETUP
    assert finding.evidence["rank_resolution"] == "none"


@pytest.mark.parametrize(("layout", "verdict"), [("", Verdict.CLEAN), (ROUTER, Verdict.FAULT)])
def test_plain_parameters_that_differ_at_setup_are_told_where_a_layout_says_so(
    tmp_path: Path, layout: str, verdict: Verdict
):
    def write(rank: PaperRank) -> None:
        setup(rank, {"layers.0.router.weight": numbers(rank.rank), "fc.weight": numbers(9)})

    assert judged(tmp_path, 2, write, layout).verdict is verdict


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.SETUP])
def test_rounding_counts_as_equal_in_what_replicas_compute_and_never_at_setup(
    tmp_path: Path, phase: Phase
):
    def write(rank: PaperRank) -> None:
        value = numbers(1) * np.float32(1 + 1e-6 * rank.rank)
        if phase is Phase.SETUP:
            setup(rank, {"fc.weight": value}, mesh=PAIR)
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(0), numbers(1) if phase is Phase.SETUP else value, mesh=PAIR)

    report = judged(tmp_path, 2, write)
    assert report.verdict is (Verdict.FAULT if phase is Phase.SETUP else Verdict.CLEAN)


def test_what_from_local_calls_replicated_is_a_wrong_placement(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model"), rank.call("lift", class_name="Lift") as lift:
            rank.value(lift, "input.0", numbers(0))
            entered = numbers(0) * np.float32(1.1 if rank.rank == 1 else 1)
            module(rank, "lift.inner", entered, entered * 2, mesh=LINE)

    found = origins(judged(tmp_path, 4, write))
    assert found == [("placement-mismatch", "forward", "lift.inner", "input.0", (1,))]


def test_gradients_of_own_data_are_not_reduced_and_scaled_ones_are_a_mismatch(tmp_path: Path):
    def job(is_scaled: bool, folder: Path) -> list[str]:
        def write(rank: PaperRank) -> None:
            setup(rank, {"fc.weight": numbers(0)})
            with rank.call(class_name="Model"):
                module(rank, "fc", numbers(10 + rank.rank), numbers(20 + rank.rank))
            own = numbers(30) * np.float32(1 - 0.5 * rank.rank)
            gradient = own if is_scaled else numbers(40 + rank.rank)
            event(rank, Phase.GRADS, "grad", {"fc.weight": gradient})

        return [finding[0] for finding in origins(judged(folder, 2, write))]

    assert job(False, tmp_path / "own") == ["gradient-not-reduced"]
    assert job(True, tmp_path / "scaled") == ["replica-mismatch"]


def test_constants_are_replicas_only_where_something_else_proves_it(tmp_path: Path):
    def job(other: int, folder: Path) -> list[str]:
        def write(rank: PaperRank) -> None:
            ones = np.ones(6, np.float32)
            setup(rank, {"norm.weight": ones, "fc.weight": numbers(other * rank.rank)})
            with rank.call(class_name="Model"):
                module(rank, "norm", numbers(10 + rank.rank), numbers(20 + rank.rank))
            gradients = {"norm.weight": numbers(50 + rank.rank, 6)}
            event(rank, Phase.GRADS, "grad", gradients)

        return [finding[2] for finding in origins(judged(folder, 2, write))]

    assert job(1, tmp_path / "shards") == []
    assert job(0, tmp_path / "replicas") == ["norm"]


def test_a_constant_whose_module_was_handed_the_same_has_the_same_gradient(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        ones = np.ones(6, np.float32)
        setup(rank, {"norm.weight": ones, "fc.weight": numbers(1 + rank.rank)})
        with rank.call(class_name="Model") as top:
            with rank.call("norm", class_name="Norm") as norm:
                rank.value(norm, "input.0", numbers(10))
                rank.value(norm, "output", numbers(11))
            rank.value(top, "output", numbers(12))
        rank.value(norm, "grad_output", numbers(13), phase=Phase.BACKWARD)
        clipped = np.float32(0.5 if rank.rank else 1)
        event(rank, Phase.GRADS, "grad", {"norm.weight": numbers(14, 6) * clipped})

    found = origins(judged(tmp_path, 2, write))
    assert found == [("replica-mismatch", "grads", "norm", "grad:weight", (0, 1))]


def test_gradients_of_siblings_that_agree_show_that_constants_are_replicas(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        norms = {f"layers.{n}.norm.weight": np.ones(6, np.float32) for n in range(2)}
        setup(rank, norms | {"fc.weight": numbers(1 + rank.rank)})
        with rank.call(class_name="Model"):
            for n in range(2):
                module(rank, f"layers.{n}.norm", numbers(10 + rank.rank), numbers(20 + rank.rank))
        own = numbers(30 + rank.rank, 6)
        gradients = {"layers.0.norm.weight": own, "layers.1.norm.weight": numbers(40, 6)}
        event(rank, Phase.GRADS, "grad", gradients)

    found = origins(judged(tmp_path, 2, write))
    assert found == [("gradient-not-reduced", "grads", "layers.0.norm", "grad:weight", (0, 1))]


def test_parameters_that_differ_after_the_step_are_victims_of_their_gradients(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)}, mesh=LINE)
        odd = int(rank.rank == 3)
        event(rank, Phase.GRADS, "grad", {"fc.weight": numbers(1 + odd)}, mesh=LINE)
        event(rank, Phase.PARAMS, "param", {"fc.weight": numbers(3 + odd)}, mesh=LINE)

    report = judged(tmp_path, 4, write)
    assert [(f.phase.word, f.ranks, f.is_origin) for f in report.findings] == [
        ("grads", (3,), True),
        ("params", (3,), False),
    ]
    assert report.findings[0].victims == 1


def test_a_rank_that_recorded_nothing_is_no_replica_that_differs(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            value = None if rank.rank == 1 else numbers(0)
            rank.value(top, "output", value, flags=8 if rank.rank == 1 else 0,
                       **placed_on(LINE, numbers(0)))  # fmt: skip

    assert judged(tmp_path, 4, write).verdict is Verdict.CLEAN


def test_a_parameter_that_one_rank_has_no_gradient_of_is_told_as_such(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0), "head.weight": numbers(1)})
        gradients = {"fc.weight": numbers(2), "head.weight": numbers(3)}
        if rank.rank == 1:
            del gradients["fc.weight"]
        event(rank, Phase.GRADS, "grad", gradients)
        after = numbers(0) if rank.rank == 1 else numbers(4)
        event(rank, Phase.PARAMS, "param", {"fc.weight": after, "head.weight": numbers(5)})

    report = judged(tmp_path, 2, write)
    assert origins(report) == [("replica-mismatch", "params", "fc", "param:weight", (1,))]
    assert "rank 1 had no gradient of it" in report.findings[0].message
    assert "frozen" in report.findings[0].advice


def test_sides_are_told_by_a_number_that_differs_as_it_is_printed(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        value = numbers(0)
        value[0, 0] += np.float32(1e-6) * rank.rank
        value[0, 1] -= np.float32(1e-6) * rank.rank
        value[1, 1] *= np.float32(1 + rank.rank)
        value[1, 2] -= value[1, 1] / 2 * np.float32(rank.rank)
        setup(rank, {"fc.weight": value}, mesh=PAIR)

    message = judged(tmp_path, 2, write).findings[0].message
    first, second = message.partition("(")[2].rstrip(")").split("; ")
    assert first.removeprefix("rank 0: ") != second.removeprefix("rank 1: ")


def test_a_norm_that_is_not_summed_over_tensor_parallel_ranks_is_told_beside_data_parallel_ones(
    tmp_path: Path,
):
    """Ranks 0 and 2 are data-parallel, 0 and 1 hold shards: the norms of all four are replicas."""

    def write(rank: PaperRank) -> None:
        half, ones = rank.rank % 2, np.ones(6, np.float32)
        norms = {f"layers.{n}.norm.weight": ones for n in range(3)}
        setup(rank, norms | {"fc.weight": numbers(half)})
        with rank.call(class_name="Model"):
            for n in range(3):
                module(rank, f"layers.{n}.norm", numbers(10 + rank.rank), numbers(20 + rank.rank))
        summed = {f"layers.{n}.norm.weight": numbers(50 + n, 6) for n in range(2)}
        gradients = summed | {"layers.2.norm.weight": numbers(60 + half, 6)}
        event(rank, Phase.GRADS, "grad", gradients | {"fc.weight": numbers(70 + half)})

    found = origins(judged(tmp_path, 4, write))
    assert found == [
        ("gradient-not-reduced", "grads", "layers.2.norm", "grad:weight", (0, 1, 2, 3))
    ]
