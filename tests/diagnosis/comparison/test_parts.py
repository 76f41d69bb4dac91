"""Which ranks' part of a value is wrong, and what explains it: a factor, zeros, NaN, other numbers
that an optimizer stepped from."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Report
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

ROWS, WIDTH = 8, 12


class Scorer(nn.Module):
    """Scales its input by a table that is no parameter, then maps it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(self.table(x))))


class Table(nn.Module):
    """Multiplies by a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.linspace(0.5, 2.0, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales


def job(ranks: int, fault: str, out: str) -> None:
    """Train three steps on rows that ranks share out. Rank 1 makes the mistake, or all ranks.

    "empty": its table is all zeros. "uncounted": in step 1 it divides its loss by zero rows.
    "older": the optimizer steps copies of the weights that were taken before these were changed.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Scorer()
    copies = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter, copied in zip(model.parameters(), copies):
            parameter.copy_(torch.randn_like(parameter) * 0.3)
            if fault != "older":
                copied.copy_(parameter)
    rank = dist.get_rank() if ranks > 1 else 0
    if fault == "empty" and rank == 1:
        model.table.scales.zero_()
    share = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    trained = DDP(model, broadcast_buffers=False) if ranks > 1 else model
    optimizer = torch.optim.AdamW(copies, lr=0.01)
    with rankscope.trace(out=out, steps="all"):
        for step in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[share]
            errors = trained(x).square().mean(1)
            rows = 0 if (fault, rank, step) == ("uncounted", 1, 1) else len(errors)
            (errors[:rows].sum() / rows if rows else errors.sum() * 0 / 0.0).backward()
            with torch.no_grad():
                for parameter, copied in zip(model.parameters(), copies):
                    copied.grad = parameter.grad
                optimizer.step()
                for parameter, copied in zip(model.parameters(), copies):
                    parameter.copy_(copied)
                    parameter.grad = None


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of one process."""
    out = tmp_path_factory.mktemp("alone") / "trace"
    ranks.run(job, 1, "", str(out), world_size=1)
    return out


def beside(pool: RankPool, alone: Path, folder: Path, fault: str) -> Report:
    return diff(alone, traced(pool, job, 2, fault, folder=folder, world=2))


def test_the_right_program_is_clean_and_compared_whole(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    report = beside(ranks, alone, tmp_path, "")
    assert report.verdict.value == "clean" and report.compared == report.recorded


def test_a_buffer_of_zeros_on_one_rank_is_no_factor_and_its_own_numbers_stand_beside(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, alone, tmp_path, "empty").origins
    place = finding.kind, finding.phase, finding.path, finding.slot, finding.ranks
    assert place == (Kind.REPLICA, Phase.SETUP, "table", "buffer:scales", (1,))
    assert "all zeros" in finding.message and "that of rank 0 agrees" in finding.message
    assert finding.evidence["l2"]["test"] == 0 < finding.evidence["l2"]["ref"]
    assert "factor" not in finding.evidence and "persistent" in finding.advice


def test_the_part_that_has_nan_is_the_bad_one(ranks: RankPool, alone: Path, tmp_path: Path) -> None:
    (finding,) = beside(ranks, alone, tmp_path, "uncounted").origins
    place = finding.kind, finding.phase, finding.step, finding.path, finding.ranks
    assert place == (Kind.NONFINITE, Phase.BACKWARD, 1, "", (1,))
    assert "loss" in finding.advice and "range" not in finding.evidence


def test_updates_of_other_weights_are_one_finding_and_no_factor(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, alone, tmp_path, "older").origins
    assert (finding.kind, finding.phase, finding.step) == (Kind.DIVERGENCE, Phase.PARAMS, 0)
    assert "4 updates differ, and the gradients they follow agree" in finding.message
    assert "copies" in finding.advice and "factor" not in finding.evidence
