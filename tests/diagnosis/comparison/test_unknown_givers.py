"""What was not compared is no agreement: what is said of values behind it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Report
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

ROWS, WIDTH = 6, 8


class Summed(torch.autograd.Function):
    """Adds over ranks; backward hands on."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient


class Spread(nn.Module):
    """The first layer of a pair, of which each rank has a part of the outputs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Gathering(Spread):
    """The second one: each rank has a part of the inputs, and their products are added."""

    def __init__(self, weight: Tensor, *, is_cut: bool) -> None:
        super().__init__(weight)
        self._is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return Summed.apply(made) if self._is_cut else made


class Levelled(nn.Module):
    """Divides by the root of the mean square of all elements, or, wrongly, of a rank's own."""

    def __init__(self, *, is_over_ranks: bool) -> None:
        super().__init__()
        self._is_over_ranks = is_over_ranks

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().mean(-1, keepdim=True)
        if self._is_over_ranks:
            square = collectives.all_reduce(square) / dist.get_world_size()
        return x * torch.rsqrt(square + 1e-6)


class Pair(nn.Module):
    """A norm, a layer cut along its outputs, one that levels them, and one cut along its inputs."""

    def __init__(self, rank: int, ranks: int, *, is_faulty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = torch.randn(2 * WIDTH, WIDTH) * 0.3, torch.randn(WIDTH, 2 * WIDTH) * 0.3
        self.norm = nn.LayerNorm(WIDTH)
        self.first = Spread(first.chunk(ranks, 0)[rank].clone())
        self.levelled = Levelled(is_over_ranks=ranks > 1 and not is_faulty)
        self.second = Gathering(second.chunk(ranks, 1)[rank].clone(), is_cut=ranks > 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.levelled(self.first(self.norm(x))))


def cut(ranks: int, is_faulty: bool, out: str) -> None:
    """Train two steps with layers that are cut by hand."""
    warnings.simplefilter("ignore")
    model = Pair(dist.get_rank() if ranks > 1 else 0, ranks, is_faulty=is_faulty)
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def own_features(ranks: int, is_faulty: bool, out: str) -> None:
    """Train a reader of frozen random features on rows that ranks share out, averaging gradients
    by hand. The mistake: rank 1 draws features of its own."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(1 if is_faulty and rank == 1 else 0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 1))
    torch.manual_seed(2)
    nn.init.normal_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    share = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[share]
            model(x).square().mean().backward()
            for parameter in model[1].parameters() if ranks > 1 else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()


def beside(pool: RankPool, folder: Path, job: object, *, is_faulty: bool) -> Report:
    alone = folder / "alone" / "trace"
    pool.run(job, 1, False, str(alone), world_size=1)
    return diff(alone, traced(pool, job, 2, is_faulty, folder=folder / "two", world=2))


@pytest.mark.parametrize("job", [cut, own_features])
def test_the_right_programs_are_clean(ranks: RankPool, tmp_path: Path, job: object) -> None:
    assert beside(ranks, tmp_path, job, is_faulty=False).verdict.value == "clean"


def test_what_was_not_compared_before_a_wrong_value_is_named_and_not_said_to_agree(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = beside(ranks, tmp_path, cut, is_faulty=True)
    (finding,) = report.origins  # the layers' parameters of step 1, which are not seen, follow it
    assert (finding.kind, finding.phase, finding.step) == (Kind.DIVERGENCE, Phase.FORWARD, 0)
    assert finding.path == "second"
    assert "first:output" in finding.evidence["not_compared"]
    assert finding.evidence["agrees"] == "first:input.0"
    assert "not compared (layout unknown)" in finding.advice and "levelled" in finding.advice
    assert "agrees with the reference" not in finding.advice


def test_ranks_with_the_references_samples_among_them_are_data_parallel_whatever_they_hold(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = beside(ranks, tmp_path, own_features, is_faulty=True)
    places = {(f.kind, f.phase, f.path, f.ranks) for f in report.origins}
    assert places == {
        (Kind.REPLICA, Phase.SETUP, "0", (1,)),
    }
