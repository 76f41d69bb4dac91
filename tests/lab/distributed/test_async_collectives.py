"""Torch's count of collectives in flight, in steps that are not traced."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import traced_with_answers
from tests.distributed.pool import RankPool


def counts(out: str) -> list[int]:
    """Return what torch's count was just after each collective of the step that is traced."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after: list[int] = []
    with rankscope.trace(model, out=out, steps="2"):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            after.clear()
            for later in (False, True):
                work = dist.all_reduce(model.weight.grad, async_op=later)
                after.append(dist.group.WORLD._get_sequence_number_for_group())
                if work is not None:
                    work.wait()
            optimizer.step()
            optimizer.zero_grad()
    return after


def test_torchs_count_of_a_collective_goes_on_in_steps_that_are_not_traced(
    ranks: RankPool, tmp_path: Path
) -> None:
    out, answers = traced_with_answers(ranks, counts, folder=tmp_path, world=2)
    trace = open_trace(out)
    issued: dict[int, list[int]] = {}
    for node in trace.walk():
        numbers = node.step["calls.issued"][node.call_rows]
        if node.phase is Phase.COLLECTIVE:
            for rank, number in zip(node.ranks, numbers.tolist()):
                issued.setdefault(rank, []).append(number)
        else:
            assert not numbers.any()
    for rank, after in enumerate(answers):
        assert sorted(issued[rank]) == after
