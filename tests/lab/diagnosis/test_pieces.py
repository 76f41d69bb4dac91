"""`diff` of values that ranks hold in pieces cut by hand: right programs that tempt its rules, and
mistakes that statistics of all pieces show, or those of the same ranks in another run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rankscope
from rankscope.cli.layout import proposal_lines
from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.layoutproposal import propose_layout
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Kind, Report, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults.parallel import Enter, Leave
from tests.lab.faults.setup import Setup
from tests.lab.unusual.material import Block
from tests.lab.unusual.programs.context import VOCABULARY, is_there, texts, token_losses

WIDTH, ROWS = 8, 6


def of_rank(x: Tensor, ranks: int) -> Tensor:
    return x.chunk(ranks, 1)[dist.get_rank()].contiguous() if ranks > 1 else x


def weighed(ranks: int, way: str, out: str) -> None:
    """Read tokens of padded texts whose time is split; a rank's loss is the mean over its own, and
    its gradients weigh as these do. The mistake: they weigh alike."""
    warnings.simplefilter("ignore")
    setup = Setup(ranks=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with rankscope.trace(out=out, steps="all"):
        for step in range(3):
            there = of_rank(is_there(setup, step), ranks)
            tokens, targets = (of_rank(x, ranks) for x in texts(setup, step))
            losses = token_losses(model(tokens), targets) * there
            (losses.sum() / there.sum()).backward()
            for p in model.parameters() if ranks > 1 else ():
                total = is_there(setup, step).sum()
                p.grad *= 1 / ranks if way == "alike" else there.sum() / total
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()


class Half(nn.Module):
    """A part of what is wide is halved here, and doubled by what takes it."""

    def __init__(self, rank: int, ranks: int, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(2 * WIDTH, WIDTH) * 0.3, torch.randn(WIDTH, 2 * WIDTH) * 0.3
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.Tanh()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, False), nn.Linear(2 * WIDTH, WIDTH, False)
        self.up.weight = nn.Parameter(up.chunk(ranks, 0)[rank].clone())
        self.down.weight = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        self.way, self.is_cut = way, ranks > 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        wide = self.act(self.up(Enter.apply(x, dist.group.WORLD) if self.is_cut else x))
        if self.way == "rolled":
            wide = wide.roll(1, -1)
        made = self.down(wide)
        return Leave.apply(made, dist.group.WORLD) if self.is_cut else made


def halves(ranks: int, way: str, out: str) -> None:
    """Train with layers that are cut over ranks. The mistakes: what is wide is "rolled" by a place,
    or rank 1 steps its part at "another" rate."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank() if ranks > 1 else 0
    model = Half(rank, ranks, way)
    rate = 0.05 if way == "another" and rank == 1 else 0.01
    groups = [{"params": [*model.norm.parameters()], "lr": 0.01}]
    groups += [{"params": [model.up.weight, model.down.weight], "lr": rate}]
    optimizer = torch.optim.Adam(groups)
    with rankscope.trace(out=out, steps="all"):
        for step in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            F.mse_loss(model(x), x.flip(0)).backward()
            optimizer.step()
            optimizer.zero_grad()


def bent(ranks: int, way: str, out: str) -> None:
    """Train five layers, traced without backward. The mistake: in front of the fourth, gradients
    take another order."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    if way == "bent":
        model[3].register_forward_pre_hook(
            lambda _, given: (given[0] * 1.0, given[0].register_hook(lambda g: g.flip(0)))[:1]
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all", phases="setup,forward,grads,params"):
        for _ in range(2):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def beside(pool: RankPool, folder: Path, job: object, way: str, ranks: int) -> Report:
    """Hold a run of two ranks to the right one of so many ranks."""
    ref = traced(pool, job, ranks, "right", folder=folder / "ref", world=ranks)
    return diff(ref, traced(pool, job, 2, way, folder=folder / "test", world=2))


@pytest.mark.parametrize("alone", [1, 2])
@pytest.mark.parametrize("job", [weighed, halves])
def test_right_programs_whose_pieces_weigh_unlike_or_step_by_signs_are_clean(
    ranks: RankPool, tmp_path: Path, job: object, alone: int
) -> None:
    report = beside(ranks, tmp_path, job, "right", alone)
    assert report.verdict is Verdict.CLEAN and not report.findings
    unlike = "pieces that differ, though what is made of them agrees"
    assert {s.reason for s in report.skipped} <= {unlike}


def test_ranks_that_weigh_alike_are_seen_at_the_gradient_of_the_loss(
    ranks: RankPool, tmp_path: Path
) -> None:
    (finding,) = beside(ranks, tmp_path, weighed, "alike", 1).origins
    assert (finding.phase, finding.path, finding.slot) == (Phase.BACKWARD, "", "grad_output")


@pytest.mark.parametrize("alone", [1, 2])
def test_pieces_in_another_order_are_seen_where_they_are_used(
    ranks: RankPool, tmp_path: Path, alone: int
) -> None:
    (finding,) = beside(ranks, tmp_path, halves, "rolled", alone).origins
    if alone == 2:  # rank by rank, by sketches
        place = (Phase.FORWARD, "down", "input.0")
        assert finding.kind is Kind.PERMUTATION
    else:  # no sketch tells the order of pieces: it may have come in with them
        place = (Phase.FORWARD, "down", "output")
        assert "down:input.0" in finding.evidence["not_compared"]
    assert (finding.phase, finding.path, finding.slot) == place
    assert "agrees with the reference" not in finding.advice


def test_a_rank_that_steps_its_pieces_at_another_rate_is_seen_beside_the_same_topology(
    ranks: RankPool, tmp_path: Path
) -> None:
    first = beside(ranks, tmp_path, halves, "another", 2).origins[0]
    assert (first.phase, first.step, first.ranks) == (Phase.PARAMS, 0, (1,))


def test_where_backward_was_not_traced_the_first_wrong_gradient_that_it_makes_is_named(
    ranks: RankPool, tmp_path: Path
) -> None:
    paths = [tmp_path / way / "trace" for way in ("right", "bent")]
    for path in paths:
        ranks.run(bent, 1, path.parent.name, str(path), world_size=1)
    (finding,) = diff(*paths).origins
    assert (finding.phase, finding.path, finding.step) == (Phase.GRADS, "2", 0)
    assert "What backward gave this module was not compared" in finding.advice


@pytest.mark.parametrize("job", [weighed, halves])
def test_a_proposed_layout_file_never_lowers_what_is_compared(
    ranks: RankPool, tmp_path: Path, job: object
) -> None:
    ref = traced(ranks, job, 1, "right", folder=tmp_path / "ref", world=1)
    test = traced(ranks, job, 2, "right", folder=tmp_path / "test", world=2)
    file = tmp_path / "layout.toml"
    proposal = propose_layout(rankscope.open_trace(test))
    file.write_text("\n".join(proposal_lines(proposal, str(test))))
    alone, declared = (
        diff(ref, test, layouts=file_of) for file_of in (None, LayoutFile.load(file))
    )
    assert declared.verdict is Verdict.CLEAN
    assert declared.compared >= alone.compared
