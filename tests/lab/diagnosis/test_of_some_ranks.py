"""Some ranks do otherwise than the rest: what their optimizers hold, what they make of gathered
gradients, columns that begin at zero."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def holds(way: str, out: str) -> None:
    """Rank 1 hands the second layer to its optimizer a step late; or each parameter is held by one
    rank, which sends it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    named, rank, world = list(model.named_parameters()), dist.get_rank(), dist.get_world_size()
    owned = [p for place, (_, p) in enumerate(named) if way == "late" or place % world == rank]
    is_late = way == "late" and rank == 1
    optimizer = torch.optim.SGD(owned[:2] if is_late else owned, lr=0.1)
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(2):
            if step and is_late:
                optimizer.add_param_group({"params": owned[2:]})
            model.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for _, parameter in named:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()
            for place, (_, parameter) in enumerate(named):
                if way == "owned":
                    dist.broadcast(parameter.detach(), place % world)


def test_a_rank_whose_optimizer_does_not_hold_what_the_others_move_is_named(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, holds, "late", folder=tmp_path)
    found = [f for f in report.findings if (f.kind, f.step) == (Kind.PARAMETER, 0)]
    assert [f.is_origin for f in found] == [True, False]
    assert {(f.kind, f.path, f.slot, f.ranks, f.step) for f in found} == {
        (Kind.PARAMETER, "2", f"param:{name}", (1,), 0) for name in ("weight", "bias")
    }
    assert "no optimizer holds it here, and on rank 0 one moved it" in report.origins[0].message


def test_a_parameter_may_be_held_by_one_rank_that_sends_it(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, holds, "owned", folder=tmp_path)
    assert report.verdict is Verdict.CLEAN


def votes(odd: int, out: str) -> None:
    """Every rank gathers the gradients of all and takes their median; one rank their signs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).pow(2).mean().backward()
            for parameter in model.parameters():
                parts = [torch.empty_like(parameter) for _ in range(world)]
                dist.all_gather(parts, parameter.grad)
                of_all = torch.stack(parts)
                median = of_all.median(0).values
                parameter.grad = of_all.sign().mean(0) if rank == odd else median
            optimizer.step()


def test_a_gradient_that_no_pass_left_and_most_ranks_share_was_not_left_unreduced(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, votes, 1, folder=tmp_path, world=3)
    assert {(f.kind, f.phase, f.ranks) for f in report.origins} == {
        (Kind.REPLICA, Phase.GRADS, (1,))
    }


def test_ranks_may_reduce_gradients_in_a_way_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    assert not report_of(ranks, votes, -1, folder=tmp_path, world=3).origins


def columns(is_summed: bool, out: str) -> None:
    """Every rank has columns of the last layer, which begin at zero; the gradient of the shared
    layer before it is to be summed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(3):
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            target = rows.repeat(1, 4)[:, 4 * dist.get_rank() :][:, :4]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rows), target).backward()
            for parameter in model[0].parameters() if is_summed else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()


def test_columns_that_begin_at_zero_draw_no_random_numbers(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, columns, False, folder=tmp_path / "wrong")
    assert {(f.path, f.step) for f in report.origins} == {("0", 1)}
    assert not any("random numbers" in f.advice for f in report.findings)
    assert not report_of(ranks, columns, True, folder=tmp_path / "right").origins
