"""What a right program may do raises no alarm in `diff`, and one cause is one finding."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from tests.diagnosis.comparison import jobs
from tests.diagnosis.comparison.test_diff import compared, of_row
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.faults.model import batch, loss_of, whole
from tests.faults.programs.data import sgd
from tests.faults.setup import Setup, Trained, train


def replicas(setup: Setup, fault: str, out: str) -> None:
    """Train with DDP in two micro-batches. `fault`: "detached" cuts the first feed-forward layer
    off backward, "undivided" forgets to divide the loss by the number of micro-batches."""
    warnings.simplefilter("ignore")
    model = whole(setup)
    if fault == "detached":
        inside = model.layers["0"].feed_forward
        compute = inside.forward
        inside.forward = lambda x: compute(x).detach()
    wrapped = DDP(model, find_unused_parameters=fault == "detached")

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        losses = []
        for n, (x, y) in enumerate(zip(tokens.chunk(2), targets.chunk(2))):
            with contextlib.nullcontext() if n else wrapped.no_sync():
                losses.append(loss_of(wrapped(x), y) / (1 if fault == "undivided" else 2))
                losses[-1].backward()
        return torch.stack(losses).sum()

    with rankscope.trace(out=out, steps="all"):
        train(Trained(model), sgd(model), one)


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of one process."""
    return jobs.traced_alone(ranks, Setup(), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("fault", "path", "phase"),
    [
        ("detached", "layers.0.feed_forward", "backward"),
        ("undivided", "", "grads"),
    ],
)
def test_larger_gradients_of_data_parallel_ranks_are_no_finding_beside_a_fault(
    ranks: RankPool, alone: Path, fault: str, path: str, phase: str, tmp_path: Path
) -> None:
    found = traced(ranks, replicas, Setup(), fault, folder=tmp_path, world=2)
    (first,) = compared(alone, found).origins
    assert (first.phase.word, first.step) == (phase, 0)
    assert first.path.startswith(path)
    assert first.slot != "grad_output" or first.path


@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_shards_that_no_layout_describes_are_skipped_beside_half_batches_of_their_size(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ref = of_row(ranks, name, "float32", tmp_path / "ref")
    report = compared(ref, of_row(ranks, "tp-dtensor", "float32", tmp_path / "test"))
    assert [f.message for f in report.findings] == []
    assert "layout unknown" in [skipped.reason for skipped in report.skipped]
    assert report.compared >= 200
