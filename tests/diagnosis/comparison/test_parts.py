"""Which ranks' part of a value is wrong, what explains it, and what was not compared before it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Report
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults.parallel import Leave

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


# ---- what was not compared ---


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
        return Leave.apply(made, dist.group.WORLD) if self._is_cut else made


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


def held_to_one(pool: RankPool, folder: Path, job: object, *, is_faulty: bool) -> Report:
    alone = folder / "alone" / "trace"
    pool.run(job, 1, False, str(alone), world_size=1)
    return diff(alone, traced(pool, job, 2, is_faulty, folder=folder / "two", world=2))


@pytest.mark.parametrize("job", [cut, own_features])
def test_the_right_programs_are_clean(ranks: RankPool, tmp_path: Path, job: object) -> None:
    assert held_to_one(ranks, tmp_path, job, is_faulty=False).verdict.value == "clean"


def test_what_statistics_alone_tell_before_a_wrong_value_is_named_and_not_said_to_agree(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = held_to_one(ranks, tmp_path, cut, is_faulty=True)
    (finding,) = report.origins  # the layers' parameters of step 1 follow it
    assert (finding.kind, finding.phase, finding.step) == (Kind.DIVERGENCE, Phase.FORWARD, 0)
    assert (finding.path, finding.evidence["measured"]) == ("levelled", "statistics")
    assert "first:output" in finding.evidence["not_compared"]
    assert finding.evidence["agrees"] == "first:input.0"
    assert "were compared by statistics alone" in finding.advice and "first" in finding.advice
    assert "agrees with the reference" not in finding.advice


def test_ranks_with_the_references_samples_among_them_are_data_parallel_whatever_they_hold(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = held_to_one(ranks, tmp_path, own_features, is_faulty=True)
    places = {(f.kind, f.phase, f.path, f.ranks) for f in report.origins}
    assert places == {
        (Kind.REPLICA, Phase.SETUP, "0", (1,)),
    }
