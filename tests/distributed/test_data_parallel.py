"""Data-parallel loops on real ranks: unharmed bit by bit, and every update in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Step, Trace
from tests.distributed import data_parallel_job as job
from tests.distributed.pool import RankPool
from tests.noted import remarks

WORLD = 2
ALIKE = {"bucket views", "static graph", "fsdp2 kept", "fsdp2 offload", "fsdp1 flat"}
"""Programs that touch gradients and parameters as others do."""


def recorded(step: Step, phase: Phase, rank: int) -> list[float]:
    """Return the norms of all parameters or gradients a rank recorded in one step."""
    found = []
    for node in step.walk():
        for view in node.slots if node.phase is phase else ():
            digest = view.per_rank().get(rank)
            if digest is not None and view.slot.startswith(("grad:", "param:")):
                found.append(digest.l2)
    return found


def flags(found: Trace, phase: Phase) -> set[str]:
    return {
        flag
        for node in found.find(phase=phase)
        for view in node.slots
        for fold in view.folds
        for flag in fold.flags
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.lab] if name in ALIKE else [])
        for name in job.PROGRAMS
        if name not in ("fsdp2 stale", "flat copies")
    ],
)
def test_a_loop_is_unharmed_and_every_rank_shows_its_gradients_and_parameters(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    truth = ranks.run(job.run, str(tmp_path / "trace"), name, world_size=WORLD)
    found = open_trace(tmp_path / "trace")
    assert found.is_complete
    assert not [node.errors for node in found.walk() if node.errors]
    assert not [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    assert [step.step for step in found.steps] == list(range(job.STEPS))
    for step in found.steps:
        roots = [n for n in step.nodes if n.path == "" and n.phase is Phase.FORWARD]
        assert [n.micro_batch for n in roots] == list(range(2 if name in job.ACCUMULATING else 1))
        assert not remarks(step)
        for rank in range(WORLD):
            for phase, seen in zip((Phase.GRADS, Phase.PARAMS), truth[rank][step.step]):
                ours = sorted(n for n in recorded(step, phase, rank) if n)
                assert ours == pytest.approx(sorted(n for n in seen if n), rel=1e-6)
    assert flags(found, Phase.GRADS) == job.GRADIENT_FLAGS.get(name, set())


def test_parameters_that_fully_shard_replaced_behind_the_optimizer_are_told(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.run, str(tmp_path / "trace"), "fsdp2 stale", world_size=WORLD)
    found = open_trace(tmp_path / "trace")
    assert flags(found, Phase.GRADS) == {"unheld"}
    for step in found.steps:
        (note,) = remarks(step)
        assert str(note).startswith(
            "ranks 0-1: SGD holds 0 parameters of the modules seen, and 8 that none of them owns "
            "(8 without a gradient"
        )
    first, last = (
        found.value("head", "param:weight", step=n, phase="params").per_rank[0] for n in range(2)
    )
    assert first is not None and last is not None and first.hash == last.hash, "nothing was trained"


def test_parameters_trained_by_flat_copies_raise_no_alarm_while_they_are_half_new(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Under ZeRO ranks hold different parts of the new values between the steps of the groups."""
    ranks.run(job.run, str(tmp_path / "trace"), "flat copies", world_size=WORLD)
    found = open_trace(tmp_path / "trace")
    assert check(found).verdict is Verdict.CLEAN
    for step in found.steps:
        weight = found.value("head", "param:weight", step=step.step, phase="params").per_rank
        assert weight[0] is not None and weight[1] is not None
        assert weight[0].hash == weight[1].hash
