"""One event is one origin: many parameters of one moment are told together, and what two steps with
equal parameters between them hold is told apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankscope
from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Finding, Kind, Report, Verdict
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool
from tests.lab.faults.layouttext import layout_text

PROBES = layout_text("tp={ranks}", [("*probe", "*", {"tp": "Replicate()"})])


class Probe(nn.Module):
    """Measures what it sees, outside of the graph; may keep it."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.is_off, self.keeps = False, keeps
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        measured = x.detach() * (2.0 if self.is_off else 1.0)
        if self.keeps:
            self.seen += measured.mean(0)
        return measured


class Probed(nn.Module):
    """Two layers, each with a probe behind it."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.enter_probe, self.leave_probe = Probe(keeps=keeps), Probe(keeps=keeps)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        self.enter_probe(x)
        x = self.leave(x)
        self.leave_probe(x)
        return x


def probes(off: Mapping[int, str], keeps: bool, is_split: bool, out: str) -> None:
    """Ranks train on one batch, or on rows of their own, and average gradients. In some steps rank
    1 measures something else."""
    torch.manual_seed(0)
    model = Probed(keeps=keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.Generator().manual_seed(rank if is_split else 7)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(4):
            for name, probe in (("enter", model.enter_probe), ("leave", model.leave_probe)):
                probe.is_off = rank == 1 and off.get(step) == name
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=rows)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()


def probed(
    ranks: RankPool,
    folder: Path,
    off: Mapping[int, str],
    *,
    keeps: bool = False,
    is_split: bool = False,
) -> Report:
    """Return what `check` says of it; probes are declared equal where ranks share a batch."""
    trace = traced(ranks, probes, off, keeps, is_split, folder=folder, world=2)
    text = PROBES.replace("{ranks}", "2")
    return check(open_trace(trace), None if is_split else LayoutFile.parse(text))


def places(findings: tuple[Finding, ...]) -> list[tuple[str, str, int]]:
    return [(f.path, f.slot, f.step) for f in findings]


def test_faults_with_equal_parameters_between_them_are_two_origins(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = probed(ranks, tmp_path, {0: "enter", 2: "leave"})
    assert places(report.origins) == [
        ("enter_probe", "output", 0),
        ("leave_probe", "output", 2),
    ]


def test_the_same_place_again_is_no_second_origin(ranks: RankPool, tmp_path: Path) -> None:
    report = probed(ranks, tmp_path, {0: "enter", 2: "enter"})
    assert places(report.origins) == [("enter_probe", "output", 0)]
    assert ("enter_probe", "output", 2) in places(report.victims)


def test_what_a_buffer_carried_into_a_later_step_follows_from_the_first(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = probed(ranks, tmp_path, {0: "enter", 2: "leave"}, keeps=True)
    assert places(report.origins) == [("enter_probe", "output", 0)]
    assert ("leave_probe", "output", 2) in places(report.victims)


@pytest.mark.parametrize("keeps", [False, True], ids=["measures", "keeps"])
def test_measures_of_each_rank_s_own_rows_are_no_fault(
    ranks: RankPool, tmp_path: Path, keeps: bool
) -> None:
    report = probed(ranks, tmp_path, {}, keeps=keeps, is_split=True)
    assert report.verdict is Verdict.CLEAN


# ---- parameters of one moment --------------------------------------------------------------------


def averages(left_out: tuple[str, ...], halved: tuple[str, ...], out: str) -> None:
    """Average gradients by hand, but for some; rank 1 halves others afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if not name.startswith(left_out or "-"):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                if rank == 1 and name.startswith(halved or "-"):
                    parameter.grad /= 2
            optimizer.step()


def test_gradients_that_nothing_reduced_are_one_origin_that_counts_them(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, averages, ("0", "2"), (), folder=tmp_path)
    (origin,) = report.origins
    assert (origin.kind, origin.ranks) == (Kind.GRADIENT, (0, 1))
    assert origin.message.endswith("; the same kind of fault: 4 of the 6 gradients of this step")
    assert sorted(origin.evidence["parameters"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert len([f for f in report.victims if f.kind is Kind.GRADIENT and f.step == 0]) == 3


def test_two_mistakes_of_one_step_stay_two_origins(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, averages, ("0",), ("2",), folder=tmp_path)
    assert {(f.kind, len(f.evidence["parameters"])) for f in report.origins} == {
        (Kind.GRADIENT, 2),
        (Kind.REPLICA, 2),
    }


def test_what_was_averaged_as_a_whole_is_no_fault(ranks: RankPool, tmp_path: Path) -> None:
    assert report_of(ranks, averages, (), (), folder=tmp_path).verdict is Verdict.CLEAN


def begins(seeds: tuple[int, int], out: str) -> None:
    """Two models of one process, each from a seed of its own."""
    layers = []
    for seed in seeds:
        torch.manual_seed(seed)
        layers.append(nn.Linear(6, 6))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    with rankscope.trace(model, out=out, steps="all"):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("seeds", "many"), [((1, 2), "2 of the 4"), ((2, 4), "all 4")])
def test_diff_tells_other_weights_once(
    ranks: RankPool, tmp_path: Path, seeds: tuple[int, int], many: str
) -> None:
    runs = [
        traced(ranks, begins, each, folder=tmp_path / name, world=1)
        for name, each in (("ref", (1, 3)), ("test", seeds))
    ]
    report = diff(*runs)
    (origin,) = report.origins
    assert origin.message.endswith(f"; the same kind of fault: {many} parameters at setup")
    assert diff(runs[0], runs[0]).verdict is Verdict.CLEAN
