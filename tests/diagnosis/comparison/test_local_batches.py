"""Values that are made of all samples of a batch, in runs that split that batch in another way."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.diagnosis.comparison.datasamples import StepSamples, match_samples
from rankscope.diagnosis.comparison.diff import diff
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

SAMPLES, WIDTH, CLASSES = 8, 16, 10


class Model(nn.Module):
    """Computes its own loss, as models of transformers do; `balance` adds one that is no mean."""

    def __init__(self, *, reduction: str, has_balance: bool, has_mask: bool) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attend = Attend()
        self.loss = nn.CrossEntropyLoss(reduction=reduction)
        self._has_balance, self._has_mask = has_balance, has_mask

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.fc(x)
        if self._has_mask:
            mask = torch.zeros(len(x), 4, 4).masked_fill(
                torch.ones(4, 4).triu(1).bool(), torch.finfo(x.dtype).min
            )
            x = self.attend(x, mask)
        logits = self.head(x)
        made = {"loss": self.loss(logits, labels), "logits": logits}
        if self._has_balance:
            used = logits.softmax(-1).mean(0)
            made["balance"] = CLASSES * (used * used.detach()).sum()
            made["loss"] = made["loss"] + made["balance"]
        return made


class Attend(nn.Module):
    """Adds a mask of the least number that the dtype has."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x.reshape(len(x), 4, -1) @ x.reshape(len(x), 4, -1).transpose(1, 2) + mask
        return (scores.softmax(-1) @ x.reshape(len(x), 4, -1)).reshape(x.shape)


def job(ranks: int, how: dict[str, object], is_uneven: bool, out: str) -> None:
    """Train two steps on a part of the batch, or in one process on all of it."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model(
        reduction=str(how.get("reduction", "mean")),
        has_balance=bool(how.get("balance")),
        has_mask=bool(how.get("mask")),
    )
    own = slice(0, SAMPLES)
    if ranks > 1:
        rank, size = dist.get_rank(), SAMPLES // ranks
        own = slice(rank * size, (rank + 1) * size)
    trained: nn.Module = DDP(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all", tensors="**" if how.get("kept") else ""):
        for step in range(2):
            source = torch.Generator().manual_seed(step)
            x = torch.randn(SAMPLES, WIDTH, generator=source)
            labels = torch.randint(CLASSES, (SAMPLES,), generator=source)
            if is_uneven:  # the second half has few samples that count
                labels[SAMPLES // 2 + 1 :] = -100
            if how.get("ignored") and step == 1:  # the second rank has none: its mean is 0 / 0
                labels[SAMPLES // 2 :] = -100
            trained(x[own], labels[own])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


def runs(
    pool: RankPool, folder: Path, *, is_uneven: bool = False, **how: object
) -> tuple[Path, Path]:
    """Return the trace of one process and that of two ranks."""
    alone = folder / "alone" / "trace"
    pool.run(job, 1, how, is_uneven, str(alone), world_size=1)
    return alone, traced(pool, job, 2, how, is_uneven, folder=folder / "two", world=2)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_over_a_part_of_the_batch_is_none_where_all_parts_make_the_references(
    ranks: RankPool, tmp_path: Path, reduction: str, kept: bool
) -> None:
    report = diff(*runs(ranks, tmp_path, reduction=reduction, kept=kept))
    assert [f.message for f in report.findings if f.phase.word == "forward"] == []
    if reduction == "mean":
        assert report.verdict.value == "clean" and report.compared == report.recorded


def test_a_loss_of_a_part_that_is_nan_is_a_fault(ranks: RankPool, tmp_path: Path) -> None:
    first = diff(*runs(ranks, tmp_path, ignored=True)).origins[0]
    assert (first.kind.value, first.path, first.step) == ("nonfinite-origin", "loss", 1)


def test_samples_of_which_ranks_hold_parts_are_not_told_by_their_order() -> None:
    def samples(count: int) -> StepSamples:
        sizes = {(0, place): 2 for place in range(count // 2)}
        return StepSamples(
            places=np.arange(len(sizes)), place_count=len(sizes), micro_batches=1, sizes=sizes
        )

    assert match_samples(samples(4), samples(4)).is_known
    assert not match_samples(samples(4), samples(8)).is_known


def test_a_mask_of_the_least_number_is_compared_by_its_statistics(
    ranks: RankPool, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report = diff(*runs(ranks, tmp_path, mask=True))
    assert report.verdict.value == "clean" and report.compared == report.recorded


def with_a_nan(ranks: int, out: str) -> None:
    """Hand a model with a NaN in one sample its batch, alone or over tensor-parallel ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 8))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 8)
    x[1, 2] = float("nan")
    with rankscope.trace(out=out):
        model(x).nan_to_num(0.0).sum().backward()


def test_what_is_not_finite_in_both_runs_is_no_fault_of_summands(
    ranks: RankPool, tmp_path: Path
) -> None:
    """How many elements of a sum are NaN is not known before it is made."""
    alone = tmp_path / "alone"
    ranks.run(with_a_nan, 1, str(alone), world_size=1)
    report = diff(alone, traced(ranks, with_a_nan, 2, folder=tmp_path / "two", world=2))
    assert [f.message for f in report.findings] == []
    reasons = [each.reason for each in report.skipped]
    assert "no sketches and no statistics tell how far it is off" in reasons


class Masked(nn.Linear):
    """Is handed the mask first, and doubles what it makes of some micro-batches."""

    factor = 1.0

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return (super().forward(x) + mask.masked_fill(mask < 0, 0.0)) * self.factor


def in_two_micro_batches(out: Path, *, is_other: bool) -> Path:
    """Train a step on two micro-batches. In the first one the outputs are too large to sketch;
    those of the second are other ones where that is asked for."""
    torch.manual_seed(0)
    model = Masked(4, 4)
    mask = torch.full((3, 4), torch.finfo(torch.float32).min)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out):
        for number in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            model.factor = 2.0 if number and is_other else 1.0
            given = mask if number else torch.full((3, 4), 3e38)
            model(given, x).mul(1e-30).sum().backward()
        optimizer.step()
    return out


def test_what_is_too_large_to_sketch_hides_nothing_beside_it(tmp_path: Path) -> None:
    ref = in_two_micro_batches(tmp_path / "ref", is_other=False)
    report = rankscope.diff(ref, in_two_micro_batches(tmp_path / "same", is_other=False))
    assert (report.verdict.value, report.findings) == ("clean", ())
    assert ("samples", None) in [(what, same) for what, same, _ in report.preflight]
    report = rankscope.diff(ref, in_two_micro_batches(tmp_path / "other", is_other=True))
    first = report.origins[0]
    assert (first.phase.word, first.slot, first.micro_batch) == ("forward", "output", 1)


@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_that_is_no_mean_over_samples_is_a_warning(
    ranks: RankPool, tmp_path: Path, kept: bool
) -> None:
    report = diff(*runs(ranks, tmp_path, balance=True, kept=kept))
    assert report.origins == ()
    (warning,) = report.findings
    assert (warning.path, warning.slot.partition(".")[0]) == ("", "output")
    assert "is made of all samples of its local batch" in warning.message


def test_means_over_unlike_numbers_of_samples_weigh_ranks_unlike(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = diff(*runs(ranks, tmp_path, is_uneven=True))
    first = report.origins[0]
    assert (first.kind.value, first.phase.word, first.ranks) == ("scale-error", "backward", (0, 1))
    assert first.path in ("", "loss")
