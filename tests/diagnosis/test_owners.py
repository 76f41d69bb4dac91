"""Parameters are held to each other as ranks go on to use them; options stand beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def owners_step(kept: str, out: str) -> None:
    """Every rank steps the parameters it owns and sends them, but for one that it keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    named = list(model.named_parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for place, (_, parameter) in enumerate(named):
                dist.reduce(parameter.grad, place % world)
                if place % world != rank:
                    parameter.grad = None
            optimizer.step()
            for place, (name, parameter) in enumerate(named):
                if name != kept:
                    dist.broadcast(parameter.detach(), place % world)


def test_an_owner_may_step_and_send_what_others_go_on_with(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, owners_step, "", folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def test_a_parameter_that_its_owner_does_not_send_is_named(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, owners_step, "1.bias", folder=tmp_path)
    first = report.origins[0]
    assert (first.kind, first.phase, first.step) == (Kind.REPLICA, Phase.PARAMS, 0)
    assert (first.path, first.slot) == ("1", "param:bias")


def steps_at(rate: float, out: str) -> None:
    """Gradients are averaged by hand; the second rank steps at a rate of its own."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate if dist.get_rank() else 0.1)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_options_that_differ_stand_beside_parameters_that_differ(
    ranks: RankPool, tmp_path: Path, rate: float
):
    report = report_of(ranks, steps_at, rate, folder=tmp_path)
    if rate == 0.1:
        assert not report.findings
        return
    first = report.origins[0]
    assert (first.kind, first.phase) == (Kind.REPLICA, Phase.PARAMS)
    assert [(row["option"], row["ranks"]) for row in first.evidence["options"]] == [
        ("lr=0.1", "0"),
        ("lr=0.2", "1"),
    ]
    assert first.evidence["equal_inputs"] == ["grad:weight"]
