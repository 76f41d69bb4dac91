"""Rules that `tests/lab/outside` asked for, each beside right programs that tempt it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool


def rows(step: int, *shape: int, rank: int | None = None) -> Tensor:
    """Return the rows of a rank in a step."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- two parameters in one reduction -------------------------------------------------------------


class Part(nn.Module):
    """What one rank owns under a name that no other rank has."""

    def __init__(self, name: str, start: int) -> None:
        super().__init__()
        torch.manual_seed(start)
        self.shared = nn.Linear(6, 6)
        torch.manual_seed(start)
        self.add_module(name, nn.Linear(6, 6))
        self.own = name

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, 6]` to the same shape."""
        return getattr(self, self.own)(self.shared(x).tanh())


def pairs(way: str, out: str) -> None:
    """Each rank owns another module: one loop averages all gradients, or what they share alone, or
    the two modules are one that is tied, and begins alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Part(("first", "second")[rank], 0)
    if way != "tied":
        torch.manual_seed(10 + rank)
        nn.init.normal_(getattr(model, model.own).weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(2):
            optimizer.zero_grad()
            model(rows(step, 4, 6)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if way != "right" or name.startswith("shared"):
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world
            if way == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


def test_a_loop_that_averages_what_each_rank_owns_is_named(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, pairs, "wrong", folder=tmp_path)
    found = {(f.kind, f.path, f.slot, f.ranks, f.step) for f in report.origins}
    assert (Kind.COLLECTIVE, "second", "grad:weight", (1,), 0) in found
    assert {kind for kind, *_ in found} == {Kind.COLLECTIVE}


@pytest.mark.parametrize("way", ["right", "tied"])
def test_what_ranks_own_or_tie_is_left_alone(ranks: RankPool, tmp_path: Path, way: str) -> None:
    assert report_of(ranks, pairs, way, folder=tmp_path).verdict is Verdict.CLEAN


# ---- frozen models -------------------------------------------------------------------------------


class Halves(nn.Module):
    """A frozen layer of which each rank holds half the columns, summed in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, 6]` of all ranks to `[rows, 4]`."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        at = 3 * dist.get_rank()
        out = self.part(torch.cat(parts)[:, at : at + 3])
        dist.all_reduce(out)
        return out.chunk(dist.get_world_size())[dist.get_rank()]


def distils(way: str, out: str) -> None:
    """A student in DDP learns from a frozen teacher: each rank's own, the same one, or one of which
    each rank holds a part."""
    torch.manual_seed(dist.get_rank())
    student = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    teacher = Halves() if way == "parts" else nn.Linear(6, 4)
    if way == "same":
        torch.manual_seed(7)
        teacher = nn.Linear(6, 4)
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = rows(step, 4, 6)
            with torch.no_grad():
                wanted = teacher(x)
            (student(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_teacher_that_each_rank_drew_is_named(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, distils, "own", folder=tmp_path)
    (origin,) = report.origins
    assert (origin.kind, origin.phase, origin.ranks) == (Kind.REPLICA, Phase.SETUP, (0, 1))
    assert origin.path.startswith("@Linear")
    assert "2 parameters of a frozen model" in origin.message


@pytest.mark.parametrize("way", ["same", "parts"])
def test_a_teacher_that_ranks_share_is_left_alone(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    assert report_of(ranks, distils, way, folder=tmp_path).verdict is Verdict.CLEAN


# ---- steps that ranks leave out ------------------------------------------------------------------


def plays(way: str, out: str) -> None:
    """Generator and critic: all ranks train the critic twice for each step of the generator, or
    rank 1 leaves a step of the critic out."""
    torch.manual_seed(0)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)))
    generator = DistributedDataParallel(nn.Linear(6, 6))
    of_critic = torch.optim.SGD(critic.parameters(), 0.1)
    of_generator = torch.optim.SGD(generator.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(3):
            for part in range(2 if way == "twice" else 1):
                of_critic.zero_grad()
                made = generator(rows(step, 4, 6)).detach()
                (critic(made).mean() - critic(rows(50 + step + part, 4, 6)).mean()).backward()
                if way == "twice" or (dist.get_rank(), step) != (1, 1):
                    of_critic.step()
            of_critic.zero_grad()
            of_generator.zero_grad()
            (-critic(generator(rows(step, 4, 6))).mean()).backward()
            of_generator.step()


def test_a_step_that_one_rank_leaves_out_is_named(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, plays, "left out", folder=tmp_path)
    (origin,) = report.origins
    assert (origin.kind, origin.path, origin.ranks) == (Kind.STRUCTURE, "", (1,))
    assert "rank 1 did not step this model" in origin.message


def test_models_that_all_ranks_step_unequally_often_are_left_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert report_of(ranks, plays, "twice", folder=tmp_path).verdict is Verdict.CLEAN


# ---- batches of a mesh ---------------------------------------------------------------------------


def parallel(way: str, out: str) -> None:
    """Tensor parallelism by DTensors: ranks read other rows, or are handed a part of each row."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        plan: dict[str, object] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        if way == "sequence":
            plan = {
                "": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                    use_local_output=True,
                ),
                **plan,
            }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(2):
            x = rows(step, 8, 4, 6, rank=9)
            if way == "apart" and world > 1:
                x = x.chunk(world)[dist.get_rank()]
            elif way == "sequence" and world > 1:
                x = x.chunk(world, 1)[dist.get_rank()]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_other_rows_on_ranks_of_one_mesh_are_named(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, parallel, "apart", folder=tmp_path)
    (origin,) = report.origins
    assert (origin.kind, origin.path, origin.slot) == (Kind.REPLICA, "", "input.0")
    assert "were handed different batches" in origin.message


def test_parts_of_rows_on_ranks_of_one_mesh_are_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert report_of(ranks, parallel, "sequence", folder=tmp_path).verdict is Verdict.CLEAN


def test_diff_says_that_ranks_of_one_mesh_have_other_samples(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = traced(ranks, parallel, "apart", folder=tmp_path / "one", world=1)
    two = traced(ranks, parallel, "apart", folder=tmp_path / "two", world=2)
    first = diff(one, two).origins[0]
    assert (first.path, first.slot) == ("", "input.0")
    assert "ranks that share a layer were handed different samples" in first.message


# ---- diff ----------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """A loss of this rank's rows beside those of all ranks."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of `[rows, 6]`."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach())
        labels = torch.arange(len(x)) + self.offset * len(x)
        return nn.functional.cross_entropy(x @ torch.cat(parts).T, labels)


def contrasts(way: str, out: str) -> None:
    """The labels of a rank begin at its first row, or at that of rank 0."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(6, 6))
    loss_of = Contrast(0 if way == "wrong" else rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = rows(step, 8, 6, rank=9).chunk(world)[rank]
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["right", "wrong"])
def test_a_loss_over_gathered_rows_is_not_that_of_a_local_batch(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    one = traced(ranks, contrasts, way, folder=tmp_path / "one", world=1)
    two = traced(ranks, contrasts, way, folder=tmp_path / "two", world=2)
    origins = diff(one, two).origins
    assert [(f.kind, f.path, f.slot) for f in origins] == (
        [] if way == "right" else [(Kind.DIVERGENCE, "@Contrast", "output")]
    )


class Balance(nn.Module):
    """A loss of this rank's rows alone, which says how full they are on all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of `[rows, 6]`."""
        loads = x.softmax(-1).mean(0)
        parts = [torch.empty_like(loads) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, loads.detach())
        return loads.square().sum()


def balances(out: str) -> None:
    """Each rank balances its own rows."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(6, 6))
    loss_of = Balance()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            y = model(rows(step, 8, 6, rank=9).chunk(world)[rank])
            (y.square().mean() + 1e-6 * loss_of(y)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_of_a_local_batch_may_gather_other_numbers(ranks: RankPool, tmp_path: Path) -> None:
    one = traced(ranks, balances, folder=tmp_path / "one", world=1)
    two = traced(ranks, balances, folder=tmp_path / "two", world=2)
    report = diff(one, two)
    assert report.origins == ()
    assert {f.path for f in report.findings} == {"@Balance"}


def teaches(way: str, out: str) -> None:
    """A frozen teacher that is larger than the student, and runs in steps of its own."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    teacher = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).requires_grad_(False)
    student = DistributedDataParallel(nn.Linear(6, 4))
    slow = deepcopy(student.module)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            x = rows(step, 8, 6, rank=9).chunk(world)[rank]
            with torch.no_grad():
                wanted = teacher(x) + slow(x)
            (student(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_samples_of_a_student_are_matched_beside_a_larger_teacher(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = traced(ranks, teaches, "", folder=tmp_path / "one", world=1)
    two = traced(ranks, teaches, "", folder=tmp_path / "two", world=2)
    report = diff(one, two)
    assert report.verdict is Verdict.CLEAN
    assert report.judged == report.compared
    samples = [line for line in report.preflight if line.what == "samples"]
    assert all(line.is_same for line in samples)
    assert "2 data-parallel ranks" in samples[0].text
