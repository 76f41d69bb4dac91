"""Pipeline stages of torch, one a rank, each loop run plain and traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import rankscope
from tests.torches import HAS_SCHEDULE_EVAL
from tests.unharmed import differences, numbers_of

MICRO_BATCHES = 4
STEPS = 3


class Part(nn.Module):
    """What one stage holds; the same modules on every rank, so that paths are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.layer(x)))


def train(kind: Callable[..., Any], *, evaluates: bool = False) -> Callable[[], Any]:
    """Return a loop whose schedule may run once without gradients behind each update."""

    def program() -> Any:
        model = Part()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = kind(stage_of(model), MICRO_BATCHES, loss_fn=nn.MSELoss())
        losses: list[float] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses += run(schedule.step, step)
            optimizer.step()
            if evaluates:  # a schedule of its own: its first run infers shapes once more
                loss = nn.MSELoss() if HAS_SCHEDULE_EVAL else None
                other = ScheduleGPipe(stage_of(model), MICRO_BATCHES, loss_fn=loss)
                with torch.no_grad():
                    losses += run(evaluate(other), step, has_loss=HAS_SCHEDULE_EVAL)
        return model, optimizer, losses

    return program


def evaluate(schedule: Any) -> Callable[..., Any]:
    """Return what runs a schedule forward alone: `step` of one without a loss in torch 2.8."""
    return schedule.eval if HAS_SCHEDULE_EVAL else schedule.step


def stage_of(model: nn.Module, index: int | None = None, stages: int = 0) -> PipelineStage:
    where = dist.get_rank() if index is None else index
    return PipelineStage(model, where, stages or dist.get_world_size(), torch.device("cpu"))


def infer(kind: Callable[..., Any]) -> Callable[[], Any]:
    """Return a loop that only runs forward, whose schedule has no loss: `step` and `eval` alike."""

    def program() -> Any:
        model = Part()
        schedule = kind(stage_of(model), MICRO_BATCHES)
        with torch.no_grad():
            for step in range(STEPS):
                run(evaluate(schedule) if step == 1 else schedule.step, step, has_loss=False)
        return model, None, []

    return program


def try_out(kind: Callable[..., Any]) -> Callable[[], Any]:
    """Return a first smoke run: forward, backward, and no optimizer yet."""

    def program() -> Any:
        model = Part()
        schedule = kind(stage_of(model), MICRO_BATCHES, loss_fn=nn.MSELoss())
        losses = [loss for step in range(STEPS) for loss in run(schedule.step, step)]
        return model, None, losses

    return program


def of_two_stages(kind: Callable[..., Any], *, is_v: bool = False) -> Callable[[], Any]:
    """Return a smoke run with two stages a rank: rank 0 has the first and third, or in a V the
    first and the last."""

    def program() -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        models = nn.ModuleList([Part(), Part()])
        places = (rank, 2 * ranks - 1 - rank if is_v else rank + ranks)
        stages = [stage_of(m, place, 2 * ranks) for m, place in zip(models, places, strict=True)]
        schedule = kind(stages, MICRO_BATCHES, loss_fn=nn.MSELoss())
        has_last = any(stage.is_last for stage in stages)
        losses = [
            loss for step in range(STEPS) for loss in run(schedule.step, step, is_last=has_last)
        ]
        return models, None, losses

    return program


def by_hand() -> Any:
    """Hand-written inference: nothing tells which forwards belong together."""
    model = Part()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(STEPS * MICRO_BATCHES):
            x = torch.randn(2, 6, generator=generator)
            if rank:
                dist.recv(x, rank - 1)
            x = model(x)
            if rank < last:
                dist.send(x, rank + 1)
    return model, None, []


def by_hand_between_updates() -> Any:
    """Hand-written training that evaluates by hand between updates."""
    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 * STEPS):
        for is_train in (True, False, False):
            x = torch.randn(2, 6, generator=generator)
            if rank:
                dist.recv(x, rank - 1)
            with torch.set_grad_enabled(is_train):
                made = model(x)
            if rank < last:
                dist.send(made.detach(), rank + 1)
            if is_train:
                made.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer, []


def run(
    schedule: Callable[..., Any], step: int, *, has_loss: bool = True, is_last: bool | None = None
) -> list[float]:
    """Run one batch through all stages; the last one returns the losses of its micro-batches."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(8, 6, generator=generator) for _ in range(2))
    losses: list[torch.Tensor] = []
    if is_last is None:
        is_last = dist.get_rank() == dist.get_world_size() - 1
    given = {"target": targets, "losses": losses} if is_last and has_loss else {}
    schedule(*([inputs] if dist.get_rank() == 0 else []), **given)
    return [loss.item() for loss in losses]


PROGRAMS = {
    "1F1B": train(Schedule1F1B),
    "GPipe": train(ScheduleGPipe),
    "evaluating": train(Schedule1F1B, evaluates=True),
    "inference": infer(ScheduleGPipe),
    "smoke GPipe": try_out(ScheduleGPipe),
    "smoke 1F1B": try_out(Schedule1F1B),
    "smoke interleaved": of_two_stages(ScheduleInterleaved1F1B),
    "smoke zero bubble": of_two_stages(ScheduleZBVZeroBubble, is_v=True),
    "by hand": by_hand,
    "by hand between updates": by_hand_between_updates,
}


def hold(folder: str, name: str, steps: str) -> None:
    """Hold a loop, traced, to itself untraced; the tree is there when every rank has ended."""
    plain = numbers_of(seeded, PROGRAMS[name])
    with rankscope.trace(out=Path(folder), steps=steps):
        traced = numbers_of(seeded, PROGRAMS[name])
    assert not differences(plain, traced), "\n".join(differences(plain, traced))


def seeded(program: Callable[[], Any]) -> Any:
    torch.manual_seed(5 + dist.get_rank())  # stages are no replicas
    return program()
