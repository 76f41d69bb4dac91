"""Pipeline stages: every micro-batch is one, and the run on empty memory before them is none.

torch runs each stage once on uninitialised tensors to learn its shapes. Should a newer torch call
the functions that do so by other names, these tests fail: they belong in `torch_internals`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.record.call import Mode, Phase
from rankscope.tree.reader import open_trace
from tests.distributed import pipeline_job as job
from tests.distributed.pool import RankPool

WORLD = 2


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("1F1B", "all", [0, 1, 2]),
        ("1F1B", "1", [1]),  # the run on empty memory meets the watching hook alone
        ("GPipe", "all", [0, 1, 2]),
        ("evaluating", "all", [0, 1, 2]),  # it runs with the hooks of a traced step on
    ],
)
def test_every_step_has_its_micro_batches_and_not_the_run_that_learns_shapes(
    ranks: RankPool, tmp_path: Path, name: str, steps: str, expected: list[int]
) -> None:
    ranks.run(job.hold, str(tmp_path / "trace"), name, steps, world_size=WORLD)
    found = open_trace(tmp_path / "trace")
    assert found.is_complete
    assert not [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    trained = [step for step in found.steps if step.mode is Mode.TRAIN]
    assert [step.step for step in trained] == expected
    for step in trained:
        assert not step.notes
        roots = [n for n in step.nodes if n.path == "" and n.phase is Phase.FORWARD]
        assert [n.micro_batch for n in roots] == list(range(job.MICRO_BATCHES))
        for root in roots:
            assert set(root.ranks) == set(range(WORLD))
        forward = [n for n in step.walk() if n.phase is Phase.FORWARD]
        losses = [n for n in forward if n.class_name == "MSELoss"]
        assert len(losses) == job.MICRO_BATCHES and {tuple(n.ranks) for n in losses} == {(1,)}
    evaluated = [step for step in found.steps if step.mode is Mode.EVAL]
    wanted = job.STEPS * job.MICRO_BATCHES if name == "evaluating" else 0
    assert [step.step for step in evaluated] == list(range(wanted))
