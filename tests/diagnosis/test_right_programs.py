"""Right programs that look wrong: each raised an alarm once."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def rests(out: str) -> None:
    """A backbone that stands still, by its learning rate, while the head warms up."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    backbone, head = model.module
    groups = [{"params": backbone.parameters(), "lr": 0.0}, {"params": head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_group_with_a_learning_rate_of_zero_may_stay_where_it_is(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, rests, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).masked_fill(padding[:, None, :], float("-inf"))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.scores, self.out = nn.Linear(6, 6), Attends(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.out(self.scores(self.query(x), padding).softmax(-1) @ x)


def pads(out: str) -> None:
    """Batches of which one alone, on one rank, holds padding."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Padded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(3):
            padding = torch.zeros(4, 5, dtype=torch.bool)
            if step > 0 and dist.get_rank():
                padding[2, 3:] = True
            model(torch.randn(4, 5, 6), padding).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_mask_that_some_batches_alone_have_is_a_warning_once(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, pads, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    (found,) = report.findings
    assert (found.severity, found.path, found.step) == (Severity.WARNING, "scores", 1)


class Local(nn.Module):
    """A feed-forward that each rank has for itself, with a norm as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x))


def has_its_own(out: str) -> None:
    """A shared embedding and output; between them what each rank has for itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), Local(), nn.Linear(6, 6))
    torch.manual_seed(1 + dist.get_rank())
    model[1].up.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shared = [*model[0].parameters(), *model[2].parameters()]
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randint(0, 12, (3, 4))).square().mean().backward()
            for parameter in shared:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


def test_a_norm_beside_weights_that_each_rank_has_for_itself_is_one_of_them(
    ranks: RankPool, tmp_path: Path
):
    assert not report_of(ranks, has_its_own, folder=tmp_path).findings


class Probed(nn.Module):
    """A head that nothing trains, whose scores are gathered to be looked at; with `is_handed` they
    also weigh the output, without their gradient.
    """

    def __init__(self, is_handed: bool) -> None:
        super().__init__()
        self.body, self.probe, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.is_handed = is_handed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        scores = self.probe(x)
        pieces = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, scores)
        return self.out(torch.cat(pieces) if self.is_handed else x)


def probes(is_handed: bool, out: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Probed(is_handed), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_head_that_the_loss_does_not_use_may_be_gathered(ranks: RankPool, tmp_path: Path):
    assert not report_of(ranks, probes, False, folder=tmp_path).findings


def test_a_head_whose_gathered_output_the_loss_uses_without_its_graph_is_named(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, probes, True, folder=tmp_path)
    places = {(found.kind, found.path, found.slot) for found in report.findings}
    for name in ("weight", "bias"):
        assert (Kind.PARAMETER, "probe", f"param:{name}") in places
