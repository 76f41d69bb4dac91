"""Pipeline stages of torch, one a rank, each loop run plain and traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import rankscope
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
                other = ScheduleGPipe(stage_of(model), MICRO_BATCHES, loss_fn=nn.MSELoss())
                with torch.no_grad():
                    losses += run(other.eval, step)
        return model, optimizer, losses

    return program


def stage_of(model: nn.Module) -> PipelineStage:
    return PipelineStage(model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def run(schedule: Callable[..., Any], step: int) -> list[float]:
    """Run one batch through all stages; the last one returns the losses of its micro-batches."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(8, 6, generator=generator) for _ in range(2))
    losses: list[torch.Tensor] = []
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    given = {"target": targets, "losses": losses} if is_last else {}
    schedule(*([inputs] if is_first else []), **given)
    return [loss.item() for loss in losses]


PROGRAMS = {
    "1F1B": train(Schedule1F1B),
    "GPipe": train(ScheduleGPipe),
    "evaluating": train(Schedule1F1B, evaluates=True),
}


def hold(folder: str, name: str, steps: str) -> None:
    """Hold a loop, traced, to itself untraced; the tree is there when every rank has ended."""
    plain = numbers_of(seeded, PROGRAMS[name])
    with rankscope.trace(out=Path(folder), steps=steps):
        traced = numbers_of(seeded, PROGRAMS[name])
    assert not differences(plain, traced), "\n".join(differences(plain, traced))


def seeded(program: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return program()
