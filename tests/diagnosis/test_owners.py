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
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool


def owners_step(kept: str, out: str) -> None:
    """Every rank steps the parameters it owns and sends them, but for one that it keeps; `kept`
    "all": every rank reduces and steps all."""
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
                if kept == "all":
                    dist.all_reduce(parameter.grad)
                else:
                    dist.reduce(parameter.grad, place % world)
                if kept != "all" and place % world != rank:
                    parameter.grad = None
            optimizer.step()
            for place, (name, parameter) in enumerate(named):
                if kept not in (name, "all"):
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


def test_owners_are_held_to_a_reference_by_what_they_send(ranks: RankPool, tmp_path: Path):
    every, owners, kept = (
        traced(ranks, owners_step, word, folder=tmp_path / str(at), world=2)
        for at, word in enumerate(("all", "", "1.bias"))
    )
    assert rankscope.diff(every, owners).verdict is Verdict.CLEAN
    first = rankscope.diff(every, kept).origins[0]
    assert (first.phase, first.path, first.slot) == (Phase.PARAMS, "1", "param:bias")


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


def reduces_over(members: str, out: str) -> None:
    """Two columns of a layer on ranks 0-1 and on 2-3, whose gradients `members` average."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    pairs = [[0, 2], [1, 3]] if members == "replicas" else [[0, 1], [2, 3]]
    group = [dist.new_group(pair) for pair in pairs][
        rank % 2 if members == "replicas" else rank // 2
    ]
    whole = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].weight.copy_(whole.weight.chunk(2)[rank % 2])
        model[1].bias.copy_(whole.bias.chunk(2)[rank % 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank // 2)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for parameter in model[0].parameters():
                dist.all_reduce(parameter.grad)
            for parameter in model[1].parameters():
                dist.all_reduce(parameter.grad, group=group)
            optimizer.step()


def test_shards_are_averaged_over_the_ranks_that_hold_the_same(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, reduces_over, "replicas", folder=tmp_path, world=4)
    assert report.verdict is Verdict.CLEAN


def test_shards_that_are_averaged_with_other_shards_are_no_fault_of_the_weights(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, reduces_over, "shards", folder=tmp_path, world=4)
    assert {(f.phase, f.path) for f in report.origins} == {(Phase.GRADS, "1")}
