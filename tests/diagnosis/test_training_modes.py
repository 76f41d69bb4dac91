"""Replicas that step with unlike modules in eval mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Kind, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def measures_between_steps(way: str, out: str) -> None:
    """Train with a frozen stem in eval mode, and measure with gradients on rank 0 behind step 0."""
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        stem = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1)).eval().requires_grad_(False)
        head = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
        model = DDP(nn.Sequential(stem, head))
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for iteration in range(3):
            generator = torch.Generator().manual_seed(10 * iteration + rank)
            model(torch.randn(4, 6, generator=generator)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and iteration == 0:
                model.eval().module(torch.randn(4, 6))
                if way != "whole":
                    model.train()
                    stem.eval()
                if way == "part":
                    head[1].eval()


def test_replicas_in_one_mode_when_they_step_are_left_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, measures_between_steps, "right", folder=tmp_path)
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())


@pytest.mark.parametrize(("way", "modules"), [("whole", "all modules"), ("part", "0, 1.1")])
def test_a_mode_that_one_rank_forgot_comes_before_any_number(
    ranks: RankPool, tmp_path: Path, way: str, modules: str
) -> None:
    first = report_of(ranks, measures_between_steps, way, folder=tmp_path).origins[0]
    path = "" if way == "whole" else "1.1"
    assert (first.kind, first.path, first.step) == (Kind.STRUCTURE, path, 1)
    texts = {"0": f"{modules} of Sequential", "1": "0 of Sequential"}
    assert first.evidence["eval_modules"] == texts
    assert first.ranks == ((0,) if way == "whole" else (0, 1))
