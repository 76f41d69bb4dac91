"""What happens to gradients between backward and the optimizer's step: faults, and right programs
that do the same for a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.models import Normed

Model = nn.Module
Optimizer = torch.optim.Optimizer


def network() -> Normed:
    """Eight features to five classes."""
    return Normed(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 5))


class WithLoss(nn.Module):
    """Hands out its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


def rows(seed: int) -> tuple[Tensor, Tensor]:
    """Features and classes of this rank."""
    made = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(6, 8, generator=made), torch.randint(5, (6,), generator=made)


def loss_of(model: Model, seed: int) -> Tensor:
    x, y = rows(seed)
    return F.cross_entropy(model(x), y)


def run(program: str, out: str) -> None:
    """Two steps of a program of this file, by its name."""
    torch.manual_seed(0)
    globals()[program](out)


def steps(
    out: str, model: Model, step: Callable[[int], None], count: int = 2, **settings: Any
) -> None:
    """Trace training, SGD behind `step(number)`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all", **settings):
        for number in range(count):
            optimizer.zero_grad()
            step(number)
            optimizer.step()


def sharded() -> Model:
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: Model) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def local_gradients(model: Model) -> list[Tensor]:
    return [getattr(g, "_local_tensor", g) for g in gradients(model)]


# ---- faults --------------------------------------------------------------------------------------


def clips_locals_of_fsdp2(out: str) -> None:
    model = sharded()

    def step(number: int) -> None:
        loss_of(model, number).backward()
        own = local_gradients(model)
        norm = torch.stack([g.norm() for g in own]).norm()
        torch._foreach_mul_(own, float(0.05 / norm))

    steps(out, model, step)


def clips_one_rank_alone(out: str) -> None:
    """Only one rank's norm is above the limit."""
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))

    def step(number: int) -> None:
        loss_of(model, number).backward()
        own = [float(g.norm()) for g in local_gradients(model)]
        norms = torch.tensor([sum(n * n for n in own) ** 0.5])
        both = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(both, norms)
        limit = float(torch.cat(both).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

    steps(out, model, step)


def clips_original_parameters(out: str) -> None:
    """FSDP1 that keeps the parameters' names, each rank a run of their elements."""
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    steps(out, model, step)


def wipes_what_was_not_reduced(out: str) -> None:
    """Squared errors, not divided: what tells is no_sync."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        for micro in range(3):
            model.zero_grad()
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                model(rows(3 * number + micro)[0]).square().mean().backward()

    steps(out, model, step)


def wipes_every_second_time(out: str) -> None:
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        for micro in range(4):
            if micro % 2 == 0:
                model.zero_grad()
            (loss_of(model, 4 * number + micro) / 4).backward()

    steps(out, model, step)


def wipes_between_losses_of_a_third(out: str) -> None:
    model = DistributedDataParallel(WithLoss())

    def step(number: int) -> None:
        for micro in range(3):
            model.zero_grad()
            x, _ = rows(3 * number + micro)
            (model(x, x[:, :5]) / 3).backward()

    steps(out, model, step)


# ---- right programs ------------------------------------------------------------------------------


def clips_fsdp2(out: str) -> None:
    model = sharded()

    def step(number: int) -> None:
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    steps(out, model, step)


def clips_layers_and_single_elements(out: str) -> None:
    model = sharded()

    def step(number: int) -> None:
        loss_of(model, number).backward()
        for layer in (model.first, model.norm, model.last):
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.02)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.005)

    steps(out, model, step)


def freezes_the_rows_of_one_rank(out: str) -> None:
    model = sharded()

    def step(number: int) -> None:
        loss_of(model, number).backward()
        if dist.get_rank() == 0:
            model.first.weight.grad._local_tensor.mul_(0.1)
            model.last.weight.grad._local_tensor.zero_()

    steps(out, model, step)


def adds_noise(out: str) -> None:
    model = sharded()
    torch.manual_seed(dist.get_rank())

    def step(number: int) -> None:
        loss_of(model, number).backward()
        for gradient in local_gradients(model):
            gradient.add_(torch.randn_like(gradient), alpha=1e-3)

    steps(out, model, step)


def accumulates_under_fsdp1(out: str) -> None:
    """FSDP1 itself takes gradients away while backward runs, and adds them."""
    model = FullyShardedDataParallel(
        network(), device_id=torch.device("cpu"), use_orig_params=dist.get_world_size() > 1
    )

    def step(number: int) -> None:
        for micro in range(2):
            (loss_of(model, 2 * number + micro) / 2).backward()
        model.clip_grad_norm_(0.05)

    steps(out, model, step)


def accumulates_flat(out: str) -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))

    def step(number: int) -> None:
        with model.no_sync():
            (loss_of(model, 2 * number) / 2).backward()
        (loss_of(model, 2 * number + 1) / 2).backward()
        model.clip_grad_norm_(0.05)

    steps(out, model, step)


def accumulates_under_fsdp2(out: str) -> None:
    model = sharded()

    def step(number: int) -> None:
        for micro in range(3):
            (loss_of(model, 3 * number + micro) / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    steps(out, model, step)


def averages_by_hand(out: str) -> None:
    """Every pass hands its gradients to buffers, which are averaged, unscaled and clipped."""
    model = network()

    def step(number: int) -> None:
        kept = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(3):
            (loss_of(model, 3 * number + micro) * 1024 / 3).backward()
            for buffer, parameter in zip(kept, model.parameters()):
                buffer += parameter.grad / 1024
                parameter.grad = None
        for buffer, parameter in zip(kept, model.parameters()):
            dist.all_reduce(buffer)
            parameter.grad = buffer / dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    steps(out, model, step)


def clips_every_micro_batch(out: str) -> None:
    """Private training: each part is clipped by itself, and noise is added to their sum."""
    model = network()

    def step(number: int) -> None:
        kept = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(2):
            model.zero_grad()
            (loss_of(model, 2 * number + micro) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + micro))
            for buffer, parameter in zip(kept, model.parameters()):
                buffer += parameter.grad
        torch.manual_seed(number)
        for buffer, parameter in zip(kept, model.parameters()):
            dist.all_reduce(buffer)
            parameter.grad = buffer + 1e-3 * torch.randn_like(buffer)

    steps(out, model, step)


def climbs_first(out: str) -> None:
    """Sharpness-aware minimization."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        loss_of(model, number).backward()
        moves = [0.05 * g.clone() for g in gradients(model)]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        model.zero_grad()
        loss_of(model, number).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)

    steps(out, model, step)


def attacks_first(out: str) -> None:
    """Adversarial training: passes that are for the gradient of the inputs alone."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        x, y = rows(number)
        for _ in range(3):
            x = x.detach().requires_grad_()
            F.cross_entropy(model(x), y).backward()
            x = x + 0.1 * x.grad.sign()
            model.zero_grad()
        F.cross_entropy(model(x.detach()), y).backward()

    steps(out, model, step)


def projects_conflicts(out: str) -> None:
    """Gradient surgery: one forward, a pass for each task."""
    model = network()

    def step(number: int) -> None:
        x, y = rows(number)
        made = model(x)
        parts = []
        for task in (F.cross_entropy(made, y) / 2, made.square().mean() / 2):
            model.zero_grad()
            task.backward(retain_graph=True)
            parts.append([g.clone() for g in gradients(model)])
        dots = sum(float((one * other).sum()) for one, other in zip(*parts))
        square = sum(float(one.square().sum()) for one in parts[0])
        part = min(dots, 0.0) / square
        for parameter, one, other in zip(model.parameters(), *parts):
            parameter.grad = one + other - part * one
            dist.all_reduce(parameter.grad)

    steps(out, model, step)


def plays_two_against_each_other(out: str) -> None:
    """A generator and a critic, whose gradients of the generator's pass are wiped."""
    critic = DistributedDataParallel(nn.Linear(8, 1))
    generator = DistributedDataParallel(nn.Linear(4, 8))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    with rankscope.trace(critic, out=out, steps="all"):
        for number in range(2):
            made = generator(rows(number)[0][:, :4])
            optimizers[0].zero_grad()
            (-critic(made).mean() / 2).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (critic(made.detach()).mean() / 2).backward()
            (-critic(rows(number + 5)[0]).mean() / 2).backward()
            optimizers[1].step()


def warms_up(out: str) -> None:
    """Four passes that no step follows before training, which then accumulates."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        if not number:
            for micro in range(2):
                (loss_of(model, 50 + micro) / 2).backward()
            model.zero_grad()
        for micro in range(2):
            (loss_of(model, 2 * number + micro) / 2).backward()

    steps(out, model, step)


def remembers(out: str) -> None:
    """Episodic memory: the gradient of old samples is a constraint, and mostly no more."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        loss_of(model, 70 + number).backward()
        model.zero_grad()
        loss_of(model, number).backward()

    steps(out, model, step)


def reserves_memory_first(out: str) -> None:
    """The first step alone runs a batch that it throws away."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        if not number:
            (loss_of(model, 60) / 2).backward()
            model.zero_grad()
        (loss_of(model, number) / 2).backward()

    steps(out, model, step)


def probes_without_sync(out: str) -> None:
    """The norm of another batch's gradients, measured in every step and thrown away."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        with model.no_sync():
            loss_of(model, 40 + number).backward()
        float(torch.stack([g.norm() for g in gradients(model)]).norm())
        model.zero_grad()
        loss_of(model, number).backward()

    steps(out, model, step)


def probes_twice_without_sync(out: str) -> None:
    """The same of two batches, each by itself."""
    model = DistributedDataParallel(network())

    def step(number: int) -> None:
        for probe in range(2):
            with model.no_sync():
                loss_of(model, 40 + 2 * number + probe).backward()
            model.zero_grad()
        loss_of(model, number).backward()

    steps(out, model, step)


def probes_with_grad(out: str) -> None:
    """`torch.autograd.grad` before each step leaves nothing; the step before has."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for number in range(3):
            torch.autograd.grad(loss_of(model.module, 90 + number) / 2, [*model.parameters()])
            optimizer.zero_grad()
            (loss_of(model, number) / 2).backward()
            optimizer.step()


FAULTS = {
    "clips_locals_of_fsdp2": "factors",
    "clips_one_rank_alone": "factors",
    "clips_original_parameters": "factors",
    "wipes_what_was_not_reduced": "lost",
    "wipes_every_second_time": "lost",
    "wipes_between_losses_of_a_third": "lost",
}
RIGHT = (
    "clips_fsdp2",
    "clips_layers_and_single_elements",
    "freezes_the_rows_of_one_rank",
    "adds_noise",
    "accumulates_under_fsdp1",
    "accumulates_flat",
    "accumulates_under_fsdp2",
    "averages_by_hand",
    "clips_every_micro_batch",
    "climbs_first",
    "attacks_first",
    "projects_conflicts",
    "plays_two_against_each_other",
    "probes_with_grad",
)
SUSPECT = (
    "warms_up",
    "remembers",
    "reserves_memory_first",
    "probes_without_sync",
    "probes_twice_without_sync",
)


@pytest.mark.parametrize("program", FAULTS)
def test_a_fault_between_backward_and_step_is_named(
    ranks: RankPool, tmp_path: Path, program: str
) -> None:
    report = report_of(ranks, run, program, folder=tmp_path)
    assert report.verdict is Verdict.FAULT
    (origin,) = [f for f in report.findings if f.is_origin]
    assert origin.kind is Kind.SCALE and origin.ranks == (0, 1) and origin.step == 0
    assert origin.slot.startswith("grad:") and FAULTS[program] in origin.evidence


def test_lost_micro_batches_are_told_in_words(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, run, "wipes_what_was_not_reduced", folder=tmp_path)
    (origin,) = [f for f in report.findings if f.is_origin]
    assert origin.message == (
        "first:grad:weight: ranks 0-1 stepped without the gradients of earlier micro-batches: they "
        "were gone when backward pass 2 and pass 3 of 3 of this step began (this gradient and 5 "
        "others)"
    )


@pytest.mark.parametrize("program", RIGHT)
def test_a_right_program_is_left_alone(ranks: RankPool, tmp_path: Path, program: str) -> None:
    report = report_of(ranks, run, program, folder=tmp_path)
    said = [f.message for f in report.findings]
    assert report.verdict is Verdict.CLEAN and not said, said


@pytest.mark.parametrize("program", SUSPECT)
def test_passes_that_only_measure_are_at_most_a_warning_once(
    ranks: RankPool, tmp_path: Path, program: str
) -> None:
    report = report_of(ranks, run, program, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert [f.severity for f in report.findings] == [Severity.WARNING]
