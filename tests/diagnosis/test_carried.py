"""`zero_grad` that one rank skips: DDP's sum is wrong on all ranks alike, and one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.phases import Phase
from tests.diagnosis.paper import told
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool

SKIPPED = (1, 2)
"""Rank and step at which the fault is in."""


class Net(nn.Module):
    """Three layers, the first frozen; the middle one runs on some ranks only where asked to."""

    def __init__(self, *, is_random: bool) -> None:
        super().__init__()
        self.frozen, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(requires_grad=False)
        self.is_random, self.calls = is_random, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.calls = torch.tanh(self.frozen(x)), self.calls + 1
        if not (self.is_random and (self.calls + dist.get_rank()) % 2):
            x = torch.tanh(self.middle(x))
        return self.head(x)


def train(how: str, out: str) -> None:
    """Four steps of DDP on two ranks; `how` says what is special in the loop."""
    torch.manual_seed(0)
    rank, is_depth = dist.get_rank(), "depth" in how
    model = DistributedDataParallel(Net(is_random=is_depth), find_unused_parameters=is_depth)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in how, init_scale=4.0)
    micro_batches = 2 if "accumulating" in how else 1
    with rankscope.trace(out=out, steps="1-3", paths="*" if not is_depth else "middle"):
        for step in range(4):
            is_skipped = "faulty" in how and (rank, step) == SKIPPED
            if "late" not in how and "over-steps" not in how and not is_skipped:
                optimizer.zero_grad(set_to_none="zeros" not in how)
            for micro in range(micro_batches):
                seed = 100 * step + 10 * micro + rank
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
                loss = model(x).square().mean()
                if "late" in how and not is_skipped:
                    optimizer.zero_grad()
                if "scaler" in how and step == 2:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("how", ["faulty", "faulty zeros", "faulty accumulating", "faulty late"])
def test_the_rank_that_skipped_zero_grad_is_named_in_that_step(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    report = report_of(ranks, train, how, folder=tmp_path)
    (found,) = report.findings
    assert told(found) == ("replica-mismatch", "grads", "middle", "grad:weight", (1,))
    assert (found.step, found.evidence["gradients"]) == (2, 4)
    assert "zero_grad" in found.advice


@pytest.mark.parametrize(
    "how", ["", "zeros", "late", "accumulating", "over-steps", "scaler", "scaler zeros", "depth"]
)
def test_gradients_that_are_gone_or_kept_on_all_ranks_are_no_fault(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    # "depth": a layer that not every rank runs is all that is traced, so no rank can say what was
    # there when its backward began
    report = report_of(ranks, train, how, folder=tmp_path)
    assert not [f for f in report.findings if f.phase is Phase.GRADS]
