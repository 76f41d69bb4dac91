"""Pipeline stages: every micro-batch is one, and the run on empty memory before them is none.

torch runs each stage once on uninitialised tensors to learn its shapes. Should a newer torch call
the functions that do so by other names, these tests fail: they belong in `torch_internals`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.record.call import Mode
from rankscope.record.finding import Verdict
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.distributed import pipeline_job as job
from tests.distributed.pool import RankPool
from tests.noted import remarks
from tests.torches import RUNS_ZERO_BUBBLE

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
        assert not remarks(step)
        roots = [n for n in step.nodes if n.path == "" and n.phase is Phase.FORWARD]
        assert [n.micro_batch for n in roots] == list(range(job.MICRO_BATCHES))
        for root in roots:
            assert set(root.ranks) == set(range(WORLD))
        forward = [n for n in step.walk() if n.phase is Phase.FORWARD]
        losses = [n for n in forward if n.class_name == "MSELoss"]
        assert len(losses) == job.MICRO_BATCHES and {tuple(n.ranks) for n in losses} == {(1,)}
    evaluated = [step for step in found.steps if step.mode is Mode.EVAL]
    assert [step.step for step in evaluated] == (expected if name == "evaluating" else [])
    for step in evaluated:
        roots = [n for n in step.nodes if n.path == "" and n.phase is Phase.FORWARD]
        assert [n.micro_batch for n in roots] == list(range(job.MICRO_BATCHES))
    assert check(found).verdict is Verdict.CLEAN


SMOKE = ("inference", "smoke GPipe", "smoke interleaved", "smoke zero bubble")
SMOKE = SMOKE if RUNS_ZERO_BUBBLE else SMOKE[:-1]


@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, "0-2") for name in SMOKE), ("inference", "1"), ("smoke 1F1B", "2")],
)
def test_a_run_of_a_schedule_is_one_step_without_an_optimizer_too(
    ranks: RankPool, tmp_path: Path, name: str, steps: str
) -> None:
    """Nothing but the schedule says which forwards belong together where no optimizer steps. A
    receive before the first of them is part of the step as well, in a later step as in the first.
    """
    ranks.run(job.hold, str(tmp_path / "trace"), name, steps, world_size=WORLD, timeout_s=120)
    found = open_trace(tmp_path / "trace")
    assert not [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    mode = Mode.EVAL if name == "inference" else Mode.TRAIN
    wanted = [0, 1, 2] if steps == "0-2" else [int(steps)]
    assert [(step.mode, step.step) for step in found.steps] == [(mode, n) for n in wanted]
    stages = 1 if name in ("inference", "smoke GPipe", "smoke 1F1B") else 2
    for step in found.steps:
        roots = [n for n in step.nodes if n.phase is Phase.FORWARD and n.class_name == "Part"]
        for path in {n.path for n in roots}:
            own = [n.micro_batch for n in roots if n.path == path]
            assert own == list(range(job.MICRO_BATCHES))
        assert sum(len(n.ranks) for n in roots) == WORLD * stages * job.MICRO_BATCHES
    sends, receives = messages(found, "send"), messages(found, "recv")
    assert sends == receives and None not in {since for since, _ in sends}
    assert {step for _, step in sends} == set(wanted)
    assert check(found).verdict is Verdict.CLEAN


def messages(found: Trace, op: str) -> dict[tuple[str | None, int], set[tuple[object, ...]]]:
    """{(from where they are counted, step): each channel and number} of the sends or receives."""
    ends: dict[tuple[str | None, int], set[tuple[object, ...]]] = {}
    for step in found.steps:
        for node in step.walk():
            for _, facts in node.collectives:
                if facts["op"] != op:
                    continue
                numbers = tuple(facts[key] for key in ("group", "tag", "peer", "sequence"))
                ends.setdefault((facts.get("since"), step.step), set()).add(
                    _from_sender(op, numbers)
                )
    return ends


def _from_sender(op: str, numbers: tuple[object, ...]) -> tuple[object, ...]:
    """Two ranks: the peer of the one end is the rank of the other."""
    group, tag, peer, sequence = numbers
    return group, tag, peer if op == "recv" else 1 - int(str(peer)), sequence


@pytest.mark.parametrize("steps", ["0-2", "1,4"])
@pytest.mark.parametrize("name", ["by hand", "by hand between updates"])
def test_a_pipeline_written_by_hand_raises_no_alarm(
    ranks: RankPool, tmp_path: Path, name: str, steps: str
) -> None:
    """Its receives are recorded a step before the sends they take; where steps before are not
    traced nobody knows which those are, and nothing may be said."""
    ranks.run(job.hold, str(tmp_path / "trace"), name, steps, world_size=WORLD, timeout_s=120)
    assert check(open_trace(tmp_path / "trace")).verdict is Verdict.CLEAN
