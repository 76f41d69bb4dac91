"""`diff` on real jobs: right ones of every topology are clean beside one process, faults are named
by module, ranks and kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.errors import SettingError
from rankscope.record.finding import Report
from rankscope.testing import assert_same
from tests.diagnosis.comparison import jobs
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults import ranks as rank_jobs
from tests.lab.faults.setup import Setup
from tests.torches import GLOO_SUMS_FOR_AVERAGES

DTYPES = ("float32", "bfloat16")
MOSTLY = ["bfloat16", pytest.param("float32", marks=pytest.mark.lab)]
"""In bfloat16, whose rounding is larger, a false alarm is likelier, and so is a miss."""
RIGHT = {
    "ddp": 2,
    "ddp-compiled": 2,
    "context-parallel": 2,
    "fsdp2-checkpoint-accumulation": 2,
    "fsdp2-tp": 4,
    "fsdp2-uneven": 2,
    "hsdp": 4,
    "pipeline": 2,
    "sequence-parallel": 2,
    "tp-by-hand": 2,
    "tp-dtensor": 2,
    "zero": 2,
}
"""Programs of the fault benchmark without a fault, and on how many ranks they run here."""


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trace of one process, by dtype."""
    return {
        dtype: jobs.traced_alone(ranks, Setup(dtype=dtype), tmp_path_factory.mktemp("alone"))
        for dtype in DTYPES
    }


def of_row(
    ranks: RankPool, name: str, dtype: str, folder: Path, *, size: int = 2, is_faulty: bool = False
) -> Path:
    """Trace a program of the fault benchmark."""
    setup = Setup(ranks=size, dtype=dtype, is_faulty=is_faulty)
    job = (rank_jobs.traced, "tests.lab.faults.rows", name, setup, False)
    return traced(ranks, *job, folder=folder, world=size)


def compared(ref: Path, test: Path, **more: object) -> Report:
    return diff(rankscope.open_trace(ref), rankscope.open_trace(test), **more)


@pytest.mark.parametrize("dtype", MOSTLY)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_of_any_topology_is_as_one_process(
    ranks: RankPool, alone: dict[str, Path], name: str, dtype: str, tmp_path: Path
) -> None:
    report = compared(alone[dtype], of_row(ranks, name, dtype, tmp_path / "t", size=RIGHT[name]))
    said = [f.message for f in report.findings]
    if GLOO_SUMS_FOR_AVERAGES and name.startswith(("fsdp2", "hsdp")):  # so it is not right there
        assert len(said) == 1 and said[0].startswith("(root): all final gradients are ")
    else:
        assert said == []
        assert report.verdict.value == "clean"
    assert all(same is not False for what, same, _ in report.preflight if what != "dtypes")
    assert report.compared >= (100 if name == "ddp-compiled" else 200)


@pytest.mark.parametrize("dtype", MOSTLY)
@pytest.mark.parametrize(
    ("name", "size", "kind", "phase", "path", "slot", "guilty"),
    [
        ("row-reduce-by-hand", 2, "replica-mismatch", "forward",
         "layers.1.attention.o_proj", "output", (0, 1)),
        ("row-reduce-dtensor", 2, "replica-mismatch", "forward",
         "layers.1.attention.o_proj", "returned", (0, 1)),
        ("ddp-bypassed", 2, "gradient-not-reduced", "grads", "embed", "grad:weight", (0, 1)),
        ("gradient-twice", 2, "scale-error", "grads",
         "layers.1.feed_forward_norm", "grad:weight", (1,)),
        ("same-rows-everywhere", 2, "duplicate-data", "forward", "", "input.0", (0, 1)),
        ("stale-pipeline-buffer", 2, "divergence", "forward", "layers.1", "input.0", (1,)),
        ("shard-order-at-load", 4, "divergence", "forward",
         "layers.1.attention.o_proj", "input.0|output", (2, 3)),
    ],
)  # fmt: skip
def test_a_fault_under_parallelism_is_named_by_module_ranks_and_kind(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path, name: str, size: int, kind: str,
    phase: str, path: str, slot: str, guilty: tuple[int, ...], dtype: str,
) -> None:  # fmt: skip
    found = of_row(ranks, name, dtype, tmp_path / "t", size=size, is_faulty=True)
    first = compared(alone[dtype], found).origins[0]
    assert (first.kind.value, first.phase.word, first.path) == (kind, phase, path)
    assert first.slot in slot.split("|") and first.ranks == guilty


@pytest.mark.parametrize("dtype", MOSTLY)
def test_a_reduction_that_averages_is_named_with_the_degree_it_lacks(
    ranks: RankPool, alone: dict[str, Path], dtype: str, tmp_path: Path
) -> None:
    setup = Setup(dtype=dtype)
    found = jobs.traced_together(ranks, jobs.averaged_reduction, setup, tmp_path / "t")
    first = compared(alone[dtype], found).origins[0]
    assert (first.kind.value, first.path, first.slot) == (
        ("scale-error", "layers.1.attention.o_proj", "output")
    )
    assert first.ranks == (0, 1)
    assert first.evidence["factor"] == pytest.approx(0.5, rel=0.02)
    assert first.evidence["equals"] == ["number of ranks, 2"]


@pytest.mark.parametrize("dtype", MOSTLY)
def test_gradients_that_are_added_over_data_parallel_ranks_are_one_finding(
    ranks: RankPool, alone: dict[str, Path], dtype: str, tmp_path: Path
) -> None:
    setup = Setup(dtype=dtype)
    found = jobs.traced_together(ranks, jobs.doubled_gradients, setup, tmp_path / "t")
    report = compared(alone[dtype], found)
    assert len([f for f in report.origins if f.step == 0]) == 1
    first = report.origins[0]
    assert (first.kind.value, first.phase.word, first.path) == ("scale-error", "grads", "")
    assert first.ranks == (0, 1)
    assert first.evidence["factor"] == pytest.approx(2.0, rel=0.02)
    assert "data-parallel ranks, 2" in first.evidence["equals"]


@pytest.mark.parametrize(
    ("fault", "kind", "phase", "path", "slot"),
    [
        ("wrong_epsilon", "divergence", "forward", "layers.1.attention_norm", "output"),
        ("transposed_weight", "permutation", "setup", "layers.1.attention.v_proj", "param:weight"),
        ("positions_turned", "permutation", "forward", "positions", "input.0"),
        ("loss_scaled", "scale-error", "backward", "", "grad_output"),
        ("other_rows", "divergence", "forward", "", "input.0"),
    ],
)
def test_a_port_with_one_fault_is_judged_where_it_begins(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path, fault: str, kind: str, phase: str,
    path: str, slot: str,
) -> None:  # fmt: skip
    found = jobs.traced_alone(ranks, Setup(), tmp_path, fault)
    first = compared(alone["float32"], found).origins[0]
    assert (first.kind.value, first.phase.word, first.path, first.slot) == (kind, phase, path, slot)
    assert first.ranks == (0,)
    assert first.victims > 10


def test_the_same_rows_in_another_order_are_matched_and_said(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path
) -> None:
    found = jobs.traced_alone(ranks, Setup(), tmp_path, "rows_turned")
    report = compared(alone["float32"], found)
    assert report.verdict.value == "clean"
    assert ("samples", False, "train step 0: the same 8 samples in another order") in (
        report.preflight
    )


def test_half_precision_beside_single_precision_is_clean_and_said_first(
    alone: dict[str, Path],
) -> None:
    report = compared(alone["float32"], alone["bfloat16"])
    assert report.verdict.value == "clean"
    assert [what for what, same, _ in report.preflight if same is False] == ["dtypes"]


def test_another_seed_is_a_finding_for_every_parameter(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path
) -> None:
    setup = replace(Setup(), seed=1)
    report = compared(alone["float32"], jobs.traced_alone(ranks, setup, tmp_path))
    assert {f.phase.word for f in report.origins if f.path} == {"setup"}
    assert ("start", False, "15 of 20 initial values differ") in report.preflight


def test_assert_same_says_where_a_run_leaves_its_golden_trace(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path
) -> None:
    assert_same(alone["float32"], alone["float32"])
    found = jobs.traced_alone(ranks, Setup(), tmp_path, "wrong_epsilon")
    with pytest.raises(AssertionError, match=r"divergence: layers\.1\.attention_norm:output"):
        assert_same(alone["float32"], found)


def test_paths_that_have_other_names_are_mapped_and_told_in_the_names_of_the_test(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path
) -> None:
    found = jobs.traced_alone(ranks, Setup(), tmp_path, "wrong_epsilon")
    rules = [r"^layers\.=blocks.", "^blocks.=layers."]
    first = compared(alone["float32"], found, paths=rules).origins[0]
    assert first.path == "layers.1.attention_norm"
    with pytest.raises(SettingError, match="write 'regex=replacement'"):
        compared(alone["float32"], found, paths=["layers"])


def test_measured_noise_shows_what_the_tolerance_of_the_dtype_hides(
    ranks: RankPool, alone: dict[str, Path], tmp_path: Path
) -> None:
    found = jobs.traced_alone(ranks, Setup(), tmp_path / "found", "small_epsilon")
    noise = jobs.traced_alone(ranks, Setup(), tmp_path / "noise", "perturbed")
    right = of_row(ranks, "tp-dtensor", "float32", tmp_path / "right")
    assert compared(alone["float32"], found).verdict.value == "clean"
    measured = rankscope.open_trace(noise)
    first = compared(alone["float32"], found, noise=measured).origins[0]
    assert (first.path, first.slot) == ("layers.1.attention_norm", "output")
    assert compared(alone["float32"], right, noise=measured).findings == ()


@pytest.mark.parametrize("dtype", MOSTLY)
def test_experts_that_every_rank_numbers_from_zero_raise_no_alarm(
    ranks: RankPool, dtype: str, tmp_path: Path
) -> None:
    setup = Setup(ranks=1, dtype=dtype)
    out = tmp_path / "alone" / "trace"
    job = (rank_jobs.traced, "tests.lab.faults.rows", "expert-parallel", setup, False)
    ranks.run(*job, str(out), world_size=1)
    report = compared(out, of_row(ranks, "expert-parallel", dtype, tmp_path / "split"))
    assert report.verdict.value == "clean"
    assert ("other modules of that name on other ranks", 168) in [
        (skipped.reason, skipped.count) for skipped in report.skipped
    ]


def test_a_router_whose_gradient_one_rank_keeps_is_named_with_that_rank(
    ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "alone" / "trace"
    job = (rank_jobs.traced, "tests.lab.faults.rows", "router-gradient-kept", Setup(ranks=1), False)
    ranks.run(*job, str(out), world_size=1)
    name = "router-gradient-kept"
    found = of_row(ranks, name, "float32", tmp_path / "split", size=4, is_faulty=True)
    first = compared(out, found).origins[0]
    assert (first.kind.value, first.path, first.slot, first.ranks) == (
        ("replica-mismatch", "layers.1.feed_forward.router", "grad:weight", (1,))
    )
