"""Ranks that begin with other weights, though their gradients are reduced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Report, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.paper import event, judged, module, numbers, origins, setup
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.tree.ranks_on_paper import PaperRank


def job(
    folder: Path,
    world: int = 4,
    *,
    begins: bool = True,
    reduced: bool = True,
    stays: bool = True,
    same_data: bool = False,
) -> Report:
    """Rank 1 begins with other weights (`begins`), and has them after the step (`stays`)."""

    def write(rank: PaperRank) -> None:
        odd = np.float32(0.9 if rank.rank == 1 else 1)
        setup(rank, {"fc.weight": numbers(0) * (odd if begins else 1), "norm.weight": numbers(1)})
        own = 0 if same_data else rank.rank
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(10 + own), numbers(20 + rank.rank))
        gradient = numbers(30 if reduced else 30 + rank.rank)
        event(rank, Phase.GRADS, "grad", {"fc.weight": gradient, "norm.weight": numbers(31)})
        after = {"fc.weight": numbers(40) * (odd if stays else 1), "norm.weight": numbers(41)}
        event(rank, Phase.PARAMS, "param", after)

    return judged(folder, world, write)


def test_other_weights_under_one_reduced_gradient_are_told_at_setup(tmp_path: Path):
    report = job(tmp_path)
    assert origins(report) == [("replica-mismatch", "setup", "fc", "param:weight", (1,))]
    assert report.findings[0].step == 0
    assert {side["ranks"] for side in report.findings[0].evidence["values"]} == {"1", "0,2-3"}


def test_of_two_ranks_both_are_named(tmp_path: Path):
    assert origins(job(tmp_path, 2))[0][4] == (0, 1)


def test_shards_are_never_told_of(tmp_path: Path):
    assert job(tmp_path, 2, reduced=False).verdict is Verdict.CLEAN


def test_weights_that_were_made_equal_after_setup_are_no_fault(tmp_path: Path):
    assert job(tmp_path, stays=False).verdict is Verdict.CLEAN


def test_gradients_that_agree_by_arithmetic_show_nothing(tmp_path: Path):
    assert job(tmp_path, same_data=True).verdict is Verdict.CLEAN


class Adapted(nn.Module):
    """A frozen layer with an adapter of which one half begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 6)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapts(is_seed_of_rank: bool, out: str) -> None:
    """Adapters whose gradients are averaged by hand, made from one seed or from each rank's own."""
    torch.manual_seed(0)
    model = Adapted()
    torch.manual_seed(5 + dist.get_rank() * is_seed_of_rank)
    nn.init.normal_(model.down.weight)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    torch.manual_seed(9 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            for parameter in trained:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("is_seed_of_rank", [True, False])
def test_adapters_whose_first_gradient_is_zero_are_judged_by_the_next(
    ranks: RankPool, tmp_path: Path, is_seed_of_rank: bool
):
    report = report_of(ranks, adapts, is_seed_of_rank, folder=tmp_path)
    place = ("replica-mismatch", "setup", "down", "param:weight", (0, 1))
    assert origins(report) == ([place] if is_seed_of_rank else [])
