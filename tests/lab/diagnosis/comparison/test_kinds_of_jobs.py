"""`diff` of kinds of jobs that one process does in another way: each right program tempts a rule
that names the mistake of its twin."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

import rankscope
from rankscope.diagnosis.comparison.datasamples import StepSamples, match_samples
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Finding, Kind, Report, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

WIDTH, ROWS, CLASSES = 8, 12, 4


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own(x: Tensor, ranks: int) -> Tensor:
    return x.chunk(ranks)[dist.get_rank()] if ranks > 1 else x


def averaged(model: nn.Module, ranks: int) -> None:
    for p in model.parameters() if ranks > 1 else ():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= ranks


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, width), nn.LayerNorm(width)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


class Gather(torch.autograd.Function):
    """Rows of all ranks; backward gives each rank the gradients of its own, `summed` or not."""

    @staticmethod
    def forward(ctx: object, x: Tensor, is_summed: bool) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.is_summed = is_summed
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        if ctx.is_summed:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone(), None


class Sharp(nn.Module):
    """A loss that pairs all rows with each other."""

    sharpness = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.sharpness * x @ x.roll(1, 0).T, torch.arange(len(x)))


def whole(ranks: int, way: str, out: str) -> None:
    """All ranks have the loss of all rows. Right: gradients come back as a "sum" and are averaged,
    or as "own" and are added. The mistake: on rank 1 the loss is less sharp."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": Net(), "loss": Sharp()})
    if way == "blunt" and dist.get_rank() == 1:
        model["loss"].sharpness = 2.5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = model["net"](own(drawn(ROWS, WIDTH, seed=step), ranks))
            x = Gather.apply(x, way == "sum") if ranks > 1 else x
            model["loss"](x).backward()
            averaged(model, ranks)
            for p in model.parameters() if way != "sum" and ranks > 1 else ():
                p.grad *= ranks
            optimizer.step()
            optimizer.zero_grad()


def owners(ranks: int, way: str, out: str) -> None:
    """A parameter is stepped by one rank and sent to all.
    The mistakes: one is "kept", or rank 1 "swaps" what it receives."""
    torch.manual_seed(0)
    model, rank = Net(), dist.get_rank() if ranks > 1 else 0
    named = [*model.named_parameters()]
    owner = {name: at % ranks for at, (name, _) in enumerate(named)}
    optimizer = torch.optim.Adam([p for n, p in named if owner[n] == rank], 0.02)
    with rankscope.trace(out=out, steps="all"):
        for step in range(3):
            x = own(drawn(ROWS, WIDTH, seed=step), ranks)
            model(x).square().mean().backward()
            averaged(model, ranks)
            optimizer.step()
            for name, p in named if ranks > 1 else ():
                if way != "kept" or name != "leave.weight":
                    dist.broadcast(p.detach(), owner[name])
            if way == "swaps" and rank == 1 and step == 1:
                model.leave.weight.data = model.leave.weight.data.flip(0).contiguous()
            model.zero_grad()


class Weighed(nn.Module):
    """A loss of its rows together, and what it keeps of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm = way, nn.BatchNorm1d(CLASSES)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("level", torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        spread = x.var(0)
        self.norm(x.detach())
        self.seen += len(x)
        if self.way != "right":
            mean = x.detach().square().mean(0)
            if self.way == "shared" and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.level.mul_(0.5).add_(mean)
        return (spread.log() ** 2).sum()


def levels(ranks: int, way: str, out: str) -> None:
    """A loss that no average over ranks makes that of all rows. Right: statistics and counts of a
    rank's own rows beside it, or a buffer that is "shared". The mistake: each has its "own"."""
    torch.manual_seed(0)
    model = nn.Sequential(Net(), Weighed(way))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            model(own(drawn(ROWS, WIDTH, seed=step), ranks)).backward()
            averaged(model, ranks)
            optimizer.step()
            optimizer.zero_grad()


def uneven(ranks: int, way: str, out: str) -> None:
    """FSDP1 with pieces of unlike size, some of which are empty. The mistake: each rank multiplies
    its own pieces by a factor of its own."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net = Net(3)
    model = net
    if ranks > 1:
        model = Fsdp(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = own(drawn(ROWS, WIDTH, seed=step), ranks)
            model(x).square().mean().backward()
            for p in model.parameters() if way == "clipped" else ():
                if p.grad is not None:
                    p.grad *= 2 + dist.get_rank()
            optimizer.step()
            optimizer.zero_grad()


class Stage(nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def stages(ranks: int, way: str, out: str) -> None:
    """Layers 0 and 2 are roots of rank 0, layers 1 and 3 of rank 1; activations go to and fro. The
    mistake: layers 1 and 2 have each other's weights."""
    rank = dist.get_rank() if ranks > 1 else 0
    parts = [Stage([rank]), Stage([rank + 2])] if ranks > 1 else [Stage([0, 1, 2, 3])]
    with torch.no_grad():
        for part in parts:
            for number, layer in part.layers.items():
                read = {"1": 2, "2": 1}.get(number, 0) if way == "crossed" else int(number)
                layer.weight.copy_(drawn(WIDTH, WIDTH, seed=90 + read) / 3)
                layer.bias.zero_()
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = drawn(ROWS, WIDTH, seed=step)
            if ranks == 1:
                parts[0](x).square().mean().backward()
            else:
                in_turns(parts, x, rank)
            optimizer.step()
            optimizer.zero_grad()


def in_turns(parts: list[Stage], x: Tensor, rank: int) -> None:
    """Go through four stages of two ranks, and back."""
    taken, made = [], []
    for at, part in enumerate(parts):
        if rank or at:
            x = torch.empty(ROWS, WIDTH)
            dist.recv(x, 1 - rank)
            x.requires_grad_()
        taken.append(x)
        made.append(part(x))
        if not (rank and at):
            dist.send(made[-1].detach(), 1 - rank)
    for at in (1, 0):
        if rank and at:
            made[at].square().mean().backward()
        else:
            gradient = torch.empty(ROWS, WIDTH)
            dist.recv(gradient, 1 - rank)
            made[at].backward(gradient)
        if rank or at:
            dist.send(taken[at].grad, 1 - rank)


def beside(pool: RankPool, folder: Path, job: Callable[..., None], way: str) -> Report:
    """Hold a run of two ranks to the right one in one process."""
    alone = "shared" if way in ("shared", "own") and job is levels else "right"
    ref = traced(pool, job, 1, alone, folder=folder / "ref", world=1)
    return diff(ref, traced(pool, job, 2, way, folder=folder / "test", world=2))


def place(finding: Finding) -> tuple[Phase, int, str, str, tuple[int, ...]]:
    return finding.phase, finding.step, finding.path, finding.slot, finding.ranks


@pytest.mark.parametrize(
    ("job", "way"),
    [
        (whole, "sum"),
        (whole, "right"),
        (owners, "right"),
        (levels, "right"),
        (levels, "shared"),
        (uneven, "right"),
        (stages, "right"),
    ],
)
def test_a_right_program_is_clean(
    ranks: RankPool, tmp_path: Path, job: Callable[..., None], way: str
) -> None:
    report = beside(ranks, tmp_path, job, way)
    assert report.verdict is Verdict.CLEAN, report.findings
    assert not report.origins


def test_a_loss_of_all_rows_is_that_of_the_rank_which_differs(
    ranks: RankPool, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, tmp_path, whole, "blunt").origins
    assert place(finding) == (Phase.FORWARD, 0, "@Sharp", "output", (1,))


def test_a_parameter_that_was_not_sent_stays_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    (finding,) = beside(ranks, tmp_path, owners, "kept").origins
    assert finding.kind is Kind.PARAMETER
    assert place(finding) == (Phase.PARAMS, 0, "leave", "param:weight", (1,))


def test_a_parameter_that_one_rank_changed_is_wrong_there_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, tmp_path, owners, "swaps").origins
    assert place(finding)[1:] == (1, "leave", "param:weight", (1,))


def test_a_loss_of_its_own_rows_excuses_no_buffer_that_ranks_hold_unlike(
    ranks: RankPool, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, tmp_path, levels, "own").origins
    assert place(finding) == (Phase.PARAMS, 0, "1", "buffer:level", (0, 1))


def test_a_factor_of_a_rank_is_told_of_its_pieces(ranks: RankPool, tmp_path: Path) -> None:
    found = beside(ranks, tmp_path, uneven, "clipped").origins
    assert {finding.phase for finding in found} == {Phase.GRADS}
    scaled = [finding for finding in found if finding.kind is Kind.SCALE]
    assert {(f.ranks, round(f.evidence["factor"], 3)) for f in scaled} == {((0,), 2), ((1,), 3)}


def test_all_stages_of_a_rank_have_a_partner(ranks: RankPool, tmp_path: Path) -> None:
    report = beside(ranks, tmp_path, stages, "crossed")
    assert {place(f)[:3] for f in report.origins} == {
        (Phase.SETUP, 0, "layers.1"),
        (Phase.SETUP, 0, "@Stage.layers.2"),
    }


def test_samples_are_told_apart_beside_one_that_is_large() -> None:
    keys = np.random.default_rng(0).standard_normal((2, 6, 8))
    keys[:, 0] = 1e4
    keys[1, 1:5] = keys[0, 1:5]
    ref, test = (
        StepSamples(
            places=np.zeros(1, np.int64),
            place_count=1,
            micro_batches=1,
            sizes={(0, 0): 6},
            keys=side,
            is_of_integers=False,
        )
        for side in keys
    )
    batches = match_samples(ref, test)
    assert (batches.unknown, batches.lost) == (1, 1)
