"""`diff` where both traces kept full tensors: exact distances, and values that digests alone cannot
compare.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Kind, Report
from tests.distributed import global_tensors_job as job
from tests.distributed.pool import RankPool
from tests.lab.faults.layouttext import layout_text
from tests.torches import GLOO_SUMS_FOR_AVERAGES

SIZES = {"tp": 2, "ddp": 2, "fsdp x tp": 4}
LARGE = 80
"""Samples of a batch that is too large for sketches of its samples."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_process(tmp_path_factory.mktemp("alone") / "trace")


@pytest.fixture(scope="module")
def traced(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trace of a kind of parallelism, all tensors kept."""
    found: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp("jobs") / "trace"
            ranks.run(job.run, kind, str(found[kind]), "", world_size=SIZES[kind])
        return found[kind]

    return of


def one_process(out: Path, change: Callable[[nn.Module], None] = lambda model: None) -> Path:
    model = job.net()
    change(model)
    with rankscope.trace(out=out, tensors="**"):
        job.train(model, job.batch())
    return out


def told(report: Report) -> str:
    return "\n".join(report.notes)


@pytest.mark.parametrize("kind", ["tp", "ddp", "fsdp x tp"])
def test_right_programs_are_clean_by_exact_distances(
    alone: Path, traced: Callable[[str], Path], kind: str
) -> None:
    report = rankscope.diff(alone, traced(kind))
    if GLOO_SUMS_FOR_AVERAGES and kind.startswith("fsdp"):  # so it is not right there
        assert {finding.phase.word for finding in report.origins} == {"grads"}
    else:
        assert report.verdict.value == "clean"
        assert report.findings == ()
    assert "are exact, by full tensors" in told(report)
    assert "could not be compared" not in told(report)


def test_an_exact_distance_is_that_of_the_tensors_and_its_module_is_at_fault(
    alone: Path, tmp_path: Path
) -> None:
    def wrong(model: nn.Module) -> None:
        model.norm.eps = 0.1

    found = one_process(tmp_path / "t", wrong)
    first = rankscope.diff(alone, found).origins[0]
    assert (first.path, first.slot, first.kind) == ("norm", "output", Kind.DIVERGENCE)
    values = [rankscope.open_trace(trace).value("norm", "output") for trace in (alone, found)]
    a, b = (value.local(0).double() for value in values)
    apart = float((a - b).norm() / a.norm())
    assert first.evidence["relative_error"] == pytest.approx(apart, rel=1e-2)
    assert first.evidence["measured"] == "full tensors"
    assert first.evidence["inputs"] == "equal"
    assert "range" not in first.evidence
    assert "(exactly, by full tensors)" in first.message
    assert first.advice.startswith("This module is at fault, and nothing before it: ")
    estimated = rankscope.diff(alone, found, tensors=False).origins[0]
    assert (estimated.path, estimated.evidence["measured"]) == ("norm", "sketches")
    assert estimated.evidence["inputs"] == "equal", "their hashes tell that as well"


def test_a_module_whose_inputs_agree_only_nearly_is_not_called_guilty(
    alone: Path, tmp_path: Path
) -> None:
    def wrong(model: nn.Module) -> None:
        with torch.no_grad():
            model.norm.weight.mul_(1 + 2e-7)
        model.down.forward = lambda x: nn.Linear.forward(model.down, x) * 1.01

    report = rankscope.diff(alone, one_process(tmp_path / "t", wrong))
    first = next(f for f in report.origins if f.path == "down" and f.phase.word == "forward")
    assert first.slot == "output"
    assert "inputs" not in first.evidence


class Scored(nn.Module):
    """No norm over the batch: every sample is by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * self.factor)


class Summed(nn.Linear):
    """The second layer cut by hand: its ranks' outputs are added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        dist.all_reduce(made)
        return made


def cut(model: Scored, *, is_faulty: bool) -> Scored:
    """Return this rank's half of a model; the fault is that one rank's half is scaled."""
    rank, half = dist.get_rank(), Scored()
    mine = slice(4 * rank, 4 * rank + 4)
    half.up, half.down = nn.Linear(6, 4), Summed(4, 3, bias=False)
    with torch.no_grad():
        half.up.weight.copy_(model.up.weight[mine])
        half.up.bias.copy_(model.up.bias[mine])
        half.down.weight.copy_(model.down.weight[:, mine])
    half.factor = 1.5 if is_faulty and rank == 1 else 1.0
    return half


LAYOUT = layout_text(
    "tp=2",
    [
        ("up", "*:*", {"tp": "Shard(0)"}),
        ("up", "output", {"tp": "Shard(1)"}),
        ("down", "*:weight", {"tp": "Shard(1)"}),
        ("down", "input", {"tp": "Shard(1)"}),
        ("down", "output", {"tp": "Replicate()"}),
    ],
)


def large_batch(kind: str, out: str) -> None:
    """Train one step on a batch of 80: whole, or interleaved over ranks as a sampler hands it out.

    `kind`: "whole", "split", "cut" (tensor parallelism by hand), "split wrong", "cut wrong".
    """
    torch.manual_seed(0)
    model = Scored()
    x = torch.randn(LARGE, 6, generator=torch.Generator().manual_seed(3))
    called: nn.Module = model
    if kind.startswith("split"):
        x = x[dist.get_rank() :: dist.get_world_size()]
        model.factor = 1.5 if kind == "split wrong" and dist.get_rank() == 1 else 1.0
        called = DDP(model)
    if kind.startswith("cut"):
        called = model = cut(model, is_faulty=kind == "cut wrong")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all", tensors="**"):
        called(x).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def large(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("large")
    kinds = ("whole", "split", "split wrong", "cut", "cut wrong")
    for kind in kinds:
        ranks.run(large_batch, kind, str(folder / kind), world_size=1 if kind == "whole" else 2)
    return {kind: folder / kind for kind in kinds}


def test_samples_of_a_large_batch_are_known_by_the_bytes_of_the_roots_input(
    large: dict[str, Path], tmp_path: Path
) -> None:
    report = rankscope.diff(large["whole"], large["split"])
    assert (report.verdict.value, report.findings) == ("clean", ())
    assert report.skipped == ()
    without = Path(shutil.copytree(large["split"], tmp_path / "without"))
    shutil.rmtree(without / "tensors")
    assert rankscope.diff(large["whole"], without).compared == report.compared  # by statistics
    assert "samples were told apart by the bytes of the root's inputs" in told(report)
    first = rankscope.diff(large["whole"], large["split wrong"]).origins[0]
    assert (first.path, first.slot, first.ranks) == ("down", "input.0", (1,))
    assert first.evidence["measured"] == "full tensors"


def test_shards_that_were_cut_by_hand_are_compared_by_their_tensors(
    large: dict[str, Path], tmp_path: Path
) -> None:
    """Their layout is declared afterwards, so their sketches do not add up."""
    given = tmp_path / "layout.toml"
    given.write_text(LAYOUT)
    layouts = LayoutFile.load(given)
    report = diff(large["whole"], large["cut"], layouts=layouts)
    assert (report.verdict.value, report.findings, report.skipped) == ("clean", (), ())
    first = diff(large["whole"], large["cut wrong"], layouts=layouts).origins[0]
    assert (first.path, first.slot) == ("down", "input.0")
    assert first.evidence["measured"] == "full tensors"
    without = Path(shutil.copytree(large["cut wrong"], tmp_path / "without"))
    shutil.rmtree(without / "tensors")
    estimated = diff(large["whole"], without, layouts=layouts)
    assert "could not be compared: " in told(estimated)
    assert estimated.origins[0].evidence["measured"] == "statistics"


def test_a_value_whose_distance_is_no_number_is_not_compared(
    large: dict[str, Path], tmp_path: Path
) -> None:
    """A layout that is declared afterwards gives no sketch of what is put together by it."""
    given = tmp_path / "layout.toml"
    given.write_text(LAYOUT)
    without = {kind: Path(shutil.copytree(large[kind], tmp_path / kind)) for kind in large}
    for folder in without.values():
        shutil.rmtree(folder / "tensors")
    layouts = LayoutFile.load(given)
    report = diff(without["whole"], without["split wrong"], layouts=layouts)
    skipped = {each.reason: each.count for each in report.skipped}
    assert skipped["no sketches and no statistics tell how far it is off"] == 2
    assert report.compared + sum(skipped.values()) + report.unpaired == report.recorded


# ---- layouts that nothing marks ------------------------------------------------------------------


class Act(nn.GELU):
    """Works on each element by itself."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class Halves(nn.Module):
    """Computes with the local part of its weight, in a class that no proof knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        return torch.tanh(x @ own.t())


class Block(nn.Module):
    """A layer cut by rows, one by columns, and what stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 12), Act(), nn.Linear(12, 6)
        self.halves = Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.halves(x)
        return self.down(self.act(self.up(x)))


def plain_shards(kind: str, scale: float, out: str) -> None:
    """Train a step in which DTensor weights make plain shards of activations.

    `kind`: "whole", "tp", "fsdp x tp", each with "wrong" behind it: the last rank's act is scaled.
    `scale`: what the loss is multiplied by before the backward, and gradients are divided by then.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    model, world = Block(), dist.get_world_size()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    if kind.endswith("wrong") and dist.get_rank() == world - 1:
        model.act.factor = 1.25
    if not kind.startswith("whole"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        cut = distribute_tensor(model.halves.weight.detach(), mesh["tp"], [Shard(0)])
        model.halves.weight = nn.Parameter(cut)
    if kind.startswith("fsdp"):
        x = x.chunk(world // 2)[dist.get_rank() // 2]
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all", tensors="**"):
        (model(x).square().mean() * scale).backward()
        for parameter in filter(lambda each: each.grad is not None, model.parameters()):
            parameter.grad.div_(scale)
        optimizer.step()


@pytest.fixture(scope="module")
def shards(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The trace of a kind, with its tensors or without."""
    folder = tmp_path_factory.mktemp("shards")

    def of(kind: str, *, is_kept: bool = True, scale: float = 1.0) -> Path:
        found = folder / f"{kind} {scale}"
        if not found.exists():
            size = {"whole": 1, "tp": 2, "fsdp x tp": 4}[kind.removesuffix(" wrong")]
            ranks.run(plain_shards, kind, scale, str(found), world_size=size)
        if not is_kept:
            without = folder / f"{kind} {scale} without"
            if not without.exists():
                shutil.rmtree(Path(shutil.copytree(found, without)) / "tensors")
            return without
        return found

    return of


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(("kind", "scale"), [("tp", 1.0), ("tp", 4.0), ("fsdp x tp", 1.0)])
def test_plain_shards_that_are_proven_are_compared_and_raise_no_alarm(
    shards: Callable[..., Path], kind: str, scale: float, is_kept: bool
) -> None:
    report = rankscope.diff(shards("whole"), shards(kind, scale=scale, is_kept=is_kept))
    if GLOO_SUMS_FOR_AVERAGES and kind.startswith("fsdp"):  # so it is not right there
        assert {finding.phase.word for finding in report.origins} == {"grads"}
    else:
        assert (report.verdict.value, report.findings) == ("clean", ())
    # what is not proven is compared by the statistics of all pieces: the output of `halves`
    assert "layout unknown" not in {skipped.reason for skipped in report.skipped}
    if is_kept:
        assert not report.skipped


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("kind", ["tp", "fsdp x tp"])
def test_a_fault_in_plain_shards_that_are_proven_is_found_at_its_module(
    shards: Callable[..., Path], kind: str, is_kept: bool
) -> None:
    report = rankscope.diff(shards("whole"), shards(f"{kind} wrong", is_kept=is_kept))
    first = report.origins[0]
    assert (first.path, first.slot, first.phase.word) == ("act", "output", "forward")
    assert first.evidence["measured"] == ("full tensors" if is_kept else "statistics")
