"""What a right program may do raises no alarm in `diff`, and one cause is one finding."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.comparison import jobs
from tests.diagnosis.comparison.test_diff import compared, of_row
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train
from tests.models import Normed


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
def test_shards_that_no_layout_describes_are_proven_beside_half_batches_of_their_size(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ref = of_row(ranks, name, "float32", tmp_path / "ref")
    report = compared(ref, of_row(ranks, "tp-dtensor", "float32", tmp_path / "test"))
    assert [f.message for f in report.findings] == []
    assert "layout unknown" not in [skipped.reason for skipped in report.skipped]
    assert report.compared >= 200


def small(kind: str, rows: int, rate: float, out: str) -> None:
    """Train two steps on the first `rows` of eight samples, shared out over the ranks. `kind`:
    "normed" for a model with a batch norm, "learned" for one that uses what it has learned."""
    torch.manual_seed(0)
    model = (
        Normed(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        if kind in ("normed", "learned")
        else nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    )
    if kind == "learned":
        model.norm.eval()
    wrapped = DDP(model) if dist.is_initialized() and dist.get_world_size() > 1 else model
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(2):
            torch.manual_seed(step)
            samples = torch.randn(8, 6)[:rows].chunk(world)[rank]
            wrapped(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def ran(ranks: RankPool, folder: Path, kind: str, rows: int, rate: float, world: int = 1) -> Path:
    """Run `small` and return its trace."""
    if world > 1:
        return traced(ranks, small, kind, rows, rate, folder=folder, world=world)
    ranks.run(small, kind, rows, rate, str(folder), world_size=1)
    return folder


def test_statistics_of_a_rank_own_batch_are_one_warning(ranks: RankPool, tmp_path: Path) -> None:
    one = ran(ranks, tmp_path / "one", "normed", 8, 0.01)
    report = compared(one, ran(ranks, tmp_path / "two", "normed", 8, 0.01, world=2))
    assert report.verdict is Verdict.CLEAN
    (warning,) = report.findings
    assert warning.severity is Severity.WARNING and warning.path == "norm"


def test_statistics_of_a_batch_where_the_reference_uses_learned_ones_are_a_fault(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = ran(ranks, tmp_path / "one", "learned", 8, 0.01)
    report = compared(one, ran(ranks, tmp_path / "two", "normed", 8, 0.01, world=2))
    first = report.origins[0]
    assert (first.path, first.phase.word, first.step) == ("norm", "forward", 0)


def test_another_learning_rate_is_one_finding(ranks: RankPool, tmp_path: Path) -> None:
    one = ran(ranks, tmp_path / "one", "plain", 8, 0.02)
    report = compared(one, ran(ranks, tmp_path / "other", "plain", 8, 0.01))
    (origin,) = report.origins
    assert (origin.kind, origin.phase.word, origin.step) == (Kind.SCALE, "params", 0)
    assert "0.5" in origin.message


def test_samples_that_are_missing_are_not_said_to_be_doubled(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = ran(ranks, tmp_path / "one", "plain", 8, 0.01)
    report = compared(one, ran(ranks, tmp_path / "fewer", "plain", 4, 0.01))
    assert report.verdict is Verdict.FAULT
    assert all(finding.kind is not Kind.DUPLICATE for finding in report.findings)
    assert any("missing" in finding.message for finding in report.findings)


def of_fewer_options(option: str, value: str, out: str) -> None:
    """Train two steps with DDP, each rank on samples of its own; `option`: what is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all", **({option: value} if option else {})):
        for step in range(2):
            torch.manual_seed(step)
            samples = torch.randn(8, 6).chunk(2)[dist.get_rank()]
            wrapped(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def of_all_options(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return traced(ranks, of_fewer_options, "", "", folder=folder, world=2)


@pytest.mark.parametrize(
    ("option", "value"), [("phases", "forward"), ("paths", "1"), ("slots", "output")]
)
def test_one_program_traced_with_fewer_options_is_the_same_program(
    ranks: RankPool, of_all_options: Path, option: str, value: str, tmp_path: Path
) -> None:
    """Such a trace does not tell that its ranks are data-parallel; the whole one does."""
    fewer = traced(ranks, of_fewer_options, option, value, folder=tmp_path, world=2)
    for ref, test in ((of_all_options, fewer), (fewer, of_all_options)):
        report = compared(ref, test)
        assert [f.message for f in report.findings] == []
        assert report.verdict is Verdict.CLEAN and report.compared >= 4
