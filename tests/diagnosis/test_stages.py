"""Layers that two stages of a pipeline run, so that the model runs them twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind
from tests.diagnosis.paper import told
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool

SPLITS = {
    "right": ((0, 1), (2, 3)),
    "overlap": ((0, 1), (1, 2, 3)),
    "summed": ((0, 1), (1, 2, 3)),
    "owned": ((0, 1), (1, 2, 3)),
    "towers": ((0, 1), (0, 1, 2)),
}
"""{what: the layers that stages of one replica call}."""


class Stage(nn.Module):
    """The modules keep the names they have in the whole; an embedding is tied to the head."""

    def __init__(self, what: str, place: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.called = SPLITS[what][place]
        self.layers = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in self.called})
        if what == "owned" and place:
            self.called = (2, 3)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.place else self.embed(x)
        for number in self.called:
            x = torch.tanh(self.layers[str(number)](x))
        return nn.functional.linear(x, self.embed.weight) if self.place else x


def pipeline(what: str, seeds: tuple[int, int], out: str) -> None:
    """Two stages, of one replica or of two (ranks 0 and 1 feed 2 and 3)."""
    rank, replicas = dist.get_rank(), dist.get_world_size() // 2
    place, peer = rank // replicas, (rank + replicas) % (2 * replicas)
    torch.manual_seed(seeds[place])
    stage = Stage(what, place)
    with torch.no_grad():
        stage.embed.weight.copy_(torch.randn(16, 8, generator=torch.Generator().manual_seed(7)))
    pairs = [dist.new_group([n, n + replicas]) for n in range(replicas)]
    rows = [dist.new_group([*range(n, n + replicas)]) for n in (0, replicas)]
    shared = [stage.embed] + ([stage.layers["1"]] if what == "summed" else [])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                if place:
                    x = torch.empty(3, 8)
                    dist.recv(x, peer)
                    x.requires_grad_()
                    stage(x).square().mean().backward()
                    dist.send(x.grad, peer)
                else:
                    seed = 10 * step + micro + 100 * rank
                    tokens = torch.randint(
                        0, 16, (3,), generator=torch.Generator().manual_seed(seed)
                    )
                    made = stage(tokens)
                    dist.send(made.detach(), peer)
                    gradient = torch.empty(3, 8)
                    dist.recv(gradient, peer)
                    made.backward(gradient)
            for parameter in stage.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=rows[place])
            for module in shared:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad, group=pairs[rank % replicas])
            optimizer.step()


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)], ids=["other-weights", "same-weights"])
def test_a_layer_that_two_stages_run_is_told_first(
    ranks: RankPool, tmp_path: Path, seeds: tuple[int, int]
) -> None:
    report = report_of(ranks, pipeline, "overlap", seeds, folder=tmp_path)
    assert told(report.origins[0]) == ("structure-mismatch", "forward", "layers.1", "", (0, 1))
    assert "split into stages" in report.origins[0].advice


def test_of_two_replicas_of_a_pipeline_all_ranks_of_both_stages_are_named(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, pipeline, "overlap", (1, 2), folder=tmp_path, world=4)
    assert told(report.origins[0]) == (
        "structure-mismatch",
        "forward",
        "layers.1",
        "",
        (0, 1, 2, 3),
    )


@pytest.mark.parametrize(
    ("what", "world"),
    [("right", 2), ("summed", 2), ("owned", 2), ("towers", 2), ("right", 4)],
)
def test_stages_that_share_on_purpose_or_do_not_call_what_they_own_are_no_fault(
    ranks: RankPool, tmp_path: Path, what: str, world: int
) -> None:
    # "summed": one layer for two stages, its gradients summed over them. "towers": two models of
    # which one feeds the other, each with a layer 0 of its own
    report = report_of(ranks, pipeline, what, (1, 2), folder=tmp_path, world=world)
    assert not [f for f in report.findings if f.kind is Kind.STRUCTURE]
