"""Who is charged with a value that a module was handed: the one that handed it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.diagnosis.check import check
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool
from tests.models import Layered, Masked, Parts


def trains(model: nn.Module, out: str, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(seed)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def masks(has_its_own_generator: bool, out: str) -> None:
    torch.manual_seed(0)
    generator = torch.Generator() if has_its_own_generator else None
    model = Layered([Masked(generator), Masked()], nn.Linear(8, 3), is_checkpointed=True)
    trains(DistributedDataParallel(model), out, 1 + dist.get_rank())


def test_a_mask_that_checkpointing_draws_again_is_no_fault(ranks: RankPool, tmp_path: Path):
    assert not report_of(ranks, masks, False, folder=tmp_path).findings


def test_a_mask_that_checkpointing_draws_anew_is_a_fault_of_the_module_that_draws_it(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, masks, True, folder=tmp_path)
    finding = report.origins[0]
    assert (finding.kind, finding.phase) == (Kind.RECOMPUTE, Phase.RECOMPUTE)
    assert (finding.path, finding.slot, finding.ranks) == ("layers.0", "", (0, 1))
    assert "handed layers.0.b:input.0 another value in its recomputation" in finding.message
    assert {finding.kind for finding in report.origins} == {Kind.RECOMPUTE}


def splits(out: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity(), Parts(8, 3))
    torch.manual_seed(1 + dist.get_rank())
    model[3].reset_parameters()
    trains(model, out, 0)


def test_a_gradient_that_a_layout_says_is_equal_is_charged_to_the_module_that_took_the_tensor(
    ranks: RankPool, tmp_path: Path
):
    out = traced(ranks, splits, folder=tmp_path, world=2)
    entry = '[[layout]]\npath = "2"\nslot = "grad_output.*"\nplacements = { tp = "Replicate()" }\n'
    report = check(open_trace(out), LayoutFile.parse(f'axes = "tp=2"\n{entry}'))
    first = report.origins[0]
    assert (first.kind, first.phase) == (Kind.REPLICA, Phase.BACKWARD)
    assert (first.path, first.slot) == ("3", "grad_input.0")
    assert all(finding.path != "2" for finding in report.findings)
