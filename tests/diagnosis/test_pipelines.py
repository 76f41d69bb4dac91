"""Stages of a pipeline made alike, with one seed and the same module paths, are no replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

import rankscope
from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind, Severity
from rankscope.record.ranks import parse_ranks
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool

ROWS, WIDTH, MICRO_BATCHES = 2, 8, 2


def alike(first: bool = False) -> nn.Sequential:
    """A stage of which every rank makes the same weights; the first one may begin with tokens."""
    torch.manual_seed(0)
    begin = nn.Embedding(16, WIDTH) if first else nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(1)
    return nn.Sequential(begin, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())


def data(step: int, *, rows: int = ROWS, tokens: bool = False) -> Tensor:
    """What the first stage of this rank's replica is handed."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if tokens:
        return torch.randint(0, 16, (rows, 3), generator=generator)
    return torch.randn(rows, WIDTH, generator=generator)


def scheduled(schedule: str, out: str) -> None:
    """torch's own stages, one of each rank or two."""
    rank, world = dist.get_rank(), dist.get_world_size()
    micro_batches = max(MICRO_BATCHES, world)
    device, loss = torch.device("cpu"), nn.functional.mse_loss
    modules = [alike(), alike()] if schedule == "interleaved" else [alike()]
    parts: list[_PipelineStageBase] = [
        PipelineStage(module, rank + n * world, len(modules) * world, device)
        for n, module in enumerate(modules)
    ]
    plan: ScheduleInterleaved1F1B | Schedule1F1B | ScheduleGPipe
    if schedule == "interleaved":
        plan = ScheduleInterleaved1F1B(parts, micro_batches, loss_fn=loss)
    elif schedule == "1f1b":
        plan = Schedule1F1B(parts[0], micro_batches, loss_fn=loss)
    else:
        plan = ScheduleGPipe(parts[0], micro_batches, loss_fn=loss)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            optimizer.zero_grad()
            x = data(step, rows=ROWS * micro_batches)
            if rank == 0:
                plan.step(x)
            elif rank == world - 1:
                plan.step(target=x * 0)
            else:
                plan.step()
            optimizer.step()


def by_hand(places: int, what: str, out: str) -> None:
    """Stages that send and receive; several replicas of them (ranks 0 and 1 feed 2 and 3) reduce
    the gradients of each stage, unless that is forgotten."""
    rank, replicas = dist.get_rank(), dist.get_world_size() // places
    place = rank // replicas
    stage = alike(first=what == "tokens" and not place)
    lines = [dist.new_group([*range(n * replicas, (n + 1) * replicas)]) for n in range(places)]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    shape = (ROWS, 3, WIDTH) if what == "tokens" else (ROWS, WIDTH)
    is_training = what != "evaluating"
    stage.train(is_training)
    with rankscope.trace(out=out, steps="all"), torch.set_grad_enabled(is_training):
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(MICRO_BATCHES):
                if place:
                    x = torch.empty(shape)
                    dist.recv(x, rank - replicas)
                    x.requires_grad_(is_training)
                else:
                    x = data(10 * step + micro, tokens=what == "tokens")
                made = stage(x)
                last = place == places - 1
                if not last:
                    dist.send(made.detach(), rank + replicas)
                if not is_training:
                    continue
                if last:
                    made.square().mean().backward()
                else:
                    gradient = torch.empty(shape)
                    dist.recv(gradient, rank + replicas)
                    made.backward(gradient)
                if x.grad is not None:
                    dist.send(x.grad, rank - replicas)
            if not is_training:
                continue
            for name, parameter in stage.named_parameters():
                if replicas > 1 and not (what == "forgotten" and place and name == "1.weight"):
                    dist.all_reduce(parameter.grad, group=lines[place])
                if what == "tied" and name == "1.weight":
                    dist.all_reduce(parameter.grad)
                if what == "tied-once" and name == "1.weight" and not step:
                    dist.all_reduce(parameter.grad)
            optimizer.step()


@pytest.mark.parametrize(("schedule", "world"), [("gpipe", 3), ("1f1b", 4), ("interleaved", 2)])
def test_stages_of_a_schedule_with_one_seed_are_no_replicas(
    ranks: RankPool, tmp_path: Path, schedule: str, world: int
) -> None:
    # every rank holds the same weights under the same paths, and each trains its own part
    # the first of these jobs imports torch's pipelining, which takes long on a busy machine
    trace = traced(ranks, scheduled, schedule, folder=tmp_path, world=world, timeout_s=300.0)
    found = open_trace(trace)
    assert not check(found).findings
    # with torch 2.15 all stages agree before anything else, though not all have a neighbour yet
    agreed = [agreements(found, rank) for rank in range(world)]
    assert agreed == [agreed[0]] * world
    assert agreed[0][:1] == [("all_reduce", "min")] * (torch.__version__ >= (2, 15))


def agreements(found: Trace, rank: int) -> list[tuple[str, str]]:
    """What a rank issued in the first step besides messages."""
    facts = [
        each
        for node in found.steps[0].walk()
        for ranks, each in node.collectives
        if rank in parse_ranks(ranks)
    ]
    return [(each["op"], each["reduce"]) for each in facts if "peer" not in each]


@pytest.mark.parametrize(
    ("places", "what", "world"),
    [
        (2, "usual", 2),
        (4, "usual", 4),
        (2, "usual", 4),
        (2, "tokens", 2),
        (2, "evaluating", 2),
        (2, "tied", 2),
    ],
)
def test_stages_written_by_hand_with_one_seed_are_no_replicas(
    ranks: RankPool, tmp_path: Path, places: int, what: str, world: int
) -> None:
    report = report_of(ranks, by_hand, places, what, folder=tmp_path, world=world)
    assert not report.findings


def test_replicas_of_a_stage_are_held_to_each_other(ranks: RankPool, tmp_path: Path) -> None:
    # all four ranks began with the same weights; ranks 2 and 3 are the second stage
    report = report_of(ranks, by_hand, 2, "forgotten", folder=tmp_path, world=4)
    found = [f for f in report.findings if f.severity is Severity.FAULT]
    assert {f.path for f in found if f.kind is Kind.GRADIENT} == {"1"}
    assert {f.ranks for f in found} == {(2, 3)}


def test_stages_that_share_a_gradient_share_the_weight(ranks: RankPool, tmp_path: Path) -> None:
    # what was summed over two stages once is one weight, and should be summed ever after
    report = report_of(ranks, by_hand, 2, "tied-once", folder=tmp_path)
    assert {(f.path, f.ranks) for f in report.origins} == {("1", (0, 1))}
