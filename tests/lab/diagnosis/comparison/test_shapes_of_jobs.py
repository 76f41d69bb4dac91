"""Ranks that hold other modules, samples or parameters than one process under the same name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Verdict
from tests.diagnosis.comparison.test_diff import compared
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

ROWS = 8


class Attention(nn.Module):
    """Attention whose queries, keys and values come of one layer, with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def language_model() -> nn.Module:
    """Return the same small model of tokens for every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(24, 16), Attention(), Attention(), nn.Linear(16, 24))


def rank_and_world() -> tuple[int, int]:
    """Return those of this process, (0, 1) alone."""
    together = dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Train one step on this rank's part of the rows, and return these."""
    torch.manual_seed(step)
    rank, world = rank_and_world()
    rows = torch.randint(24, (ROWS, 9)).chunk(world)[rank]
    made = model(rows[:, :-1])
    F.cross_entropy(made.flatten(0, 1), rows[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return rows


def tokens_of(kind: str, out: str) -> None:
    """Train two steps with AdamW. `kind`: "" for DDP; "flat" and "kept" for FSDP1, which makes one
    flat parameter of many or keeps them; "fast" for biases with a learning rate of their own;
    "frozen" for a norm that is not trained."""
    warnings.simplefilter("ignore")
    _, world = rank_and_world()
    model = wrapped = language_model()
    if world > 1 and kind in ("flat", "kept"):
        wrapped = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Attention}),
            use_orig_params=kind == "kept",
            device_id=torch.device("cpu"),
        )
    elif world > 1:
        wrapped = DDP(model)
    if kind == "frozen":
        model[2].norm.requires_grad_(False)
    biases = [p for p in wrapped.parameters() if p.ndim == 1]
    others = [p for p in wrapped.parameters() if p.ndim != 1]
    groups = [{"params": others}, {"params": biases, "lr": 2e-3 if kind == "fast" else 1e-3}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            language_step(wrapped, optimizer, step)


def stages(fault: str, out: str) -> None:
    """Train a pipeline of four layers of one width, as many on each rank, or one process."""
    warnings.simplefilter("ignore")
    rank, world = rank_and_world()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    per_rank = 4 // world
    model = nn.Sequential()
    for index in range(rank * per_rank, (rank + 1) * per_rank):
        model.add_module(str(index), layers[index])
    if fault and rank == world - 1:
        model[-1].register_forward_hook(lambda _module, _given, made: made * 1.01)
    schedule: Schedule1F1B | None = None
    if world > 1:
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            torch.manual_seed(step)
            x, y = torch.randn(ROWS, 12), torch.randn(ROWS, 12)
            if schedule is None:
                F.mse_loss(model(x), y).backward()
            else:
                given = (x,) if rank == 0 else ()
                schedule.step(*given, **({"target": y} if rank == world - 1 else {}))
            optimizer.step()
            optimizer.zero_grad()


def other_rows(begins: int, out: str) -> None:
    """Train one step on eight rows from a position on, half of them on each rank."""
    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    wrapped = DDP(model) if world > 1 else model
    rows = torch.randn(2 * ROWS, 6)[begins : begins + ROWS]
    with rankscope.trace(out=out, steps="all"):
        wrapped(rows.chunk(world)[rank]).square().mean().backward()


class Averaged(nn.Module):
    """The moving average of a model's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def averaged(fault: str, out: str) -> None:
    """Train two steps and evaluate the moving average of weights behind each. `fault`: it is
    another average."""
    warnings.simplefilter("ignore")
    _, world = rank_and_world()
    model, average = language_model(), Averaged()
    wrapped = DDP(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            rows = language_step(wrapped, optimizer, step)
            with torch.no_grad():
                for own, new in zip(average.parameters(), model.parameters()):
                    own.lerp_(new, 0.9 if fault else 0.1)
                average(rows[:, :-1])


def ran(ranks: RankPool, job: Callable[..., None], kind: object, folder: Path, world: int) -> Path:
    """Run a job and return its trace."""
    if world > 1:
        return traced(ranks, job, kind, folder=folder, world=world)
    ranks.run(job, kind, str(folder), world_size=1)
    return folder


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language model in one process."""
    return ran(ranks, tokens_of, "", tmp_path_factory.mktemp("alone") / "one", 1)


def test_signs_of_gradients_that_are_zero_but_for_rounding_are_no_fault(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    report = compared(alone, ran(ranks, tokens_of, "", tmp_path, 2))
    assert [f.message for f in report.findings] == []
    assert report.verdict is Verdict.CLEAN


def test_a_learning_rate_of_biases_alone_is_found(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    report = compared(alone, ran(ranks, tokens_of, "fast", tmp_path, 2))
    first = report.origins[0]
    assert (first.phase.word, first.step) == ("params", 0)
    assert first.slot.startswith("param:")
    assert "its update is 2 times" in first.message and "other updates" in first.message


def test_parameters_that_the_reference_does_not_train_are_found(
    ranks: RankPool, tmp_path: Path
) -> None:
    frozen = ran(ranks, tokens_of, "frozen", tmp_path / "frozen", 1)
    report = compared(frozen, ran(ranks, tokens_of, "", tmp_path, 2))
    first = report.origins[0]
    assert (first.path, first.phase.word, first.step) == ("2.norm", "params", 0)
    assert "trained here" in first.message
    assert compared(frozen, frozen).verdict is Verdict.CLEAN


def test_an_update_that_the_reference_has_not_made_is_not_counted_as_agreeing(
    tmp_path: Path,
) -> None:
    """The reference steps the bias with a rate of zero; it has the same gradient in both runs."""
    traces = []
    for name in ("ref", "test"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        bias = {"params": [model.bias], "lr": 0.0 if name == "ref" else 0.1}
        optimizer = torch.optim.SGD([{"params": [model.weight]}, bias], lr=0.1)
        with rankscope.trace(out=tmp_path / name):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        traces.append(tmp_path / name)
    report = compared(*traces)
    assert [(s.reason, s.count) for s in report.skipped] == [
        ("the reference's update or its gradient is zero", 1)
    ]
    assert report.compared == report.recorded - 1


def test_parameters_that_fsdp1_does_not_show_are_no_fault_of_what_they_are_used_in(
    ranks: RankPool, alone: Path, tmp_path: Path
) -> None:
    kept = compared(alone, ran(ranks, tokens_of, "kept", tmp_path / "kept", 2))
    assert (kept.verdict, kept.findings) == (Verdict.CLEAN, ())
    flat = compared(alone, ran(ranks, tokens_of, "flat", tmp_path / "flat", 2))
    assert flat.verdict is Verdict.INCOMPLETE and not flat.origins
    assert "use_orig_params" in flat.lacks


def test_a_moving_average_that_is_first_called_behind_a_step_is_no_other_start(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = ran(ranks, averaged, "", tmp_path / "one", 1)
    report = compared(one, ran(ranks, averaged, "", tmp_path / "right", 2))
    assert [f.message for f in report.findings] == []
    other = compared(one, ran(ranks, averaged, "faster", tmp_path / "wrong", 2))
    assert other.verdict is Verdict.FAULT
    assert "model" in other.origins[0].path


@pytest.mark.parametrize("world", [2, 4])
def test_stages_of_one_width_are_other_modules_under_the_name_of_the_root(
    ranks: RankPool, world: int, tmp_path: Path
) -> None:
    one = ran(ranks, stages, "", tmp_path / "one", 1)
    report = compared(one, ran(ranks, stages, "", tmp_path / "right", world))
    assert [f.message for f in report.findings] == []
    assert report.verdict is Verdict.CLEAN
    found = compared(one, ran(ranks, stages, "scaled", tmp_path / "wrong", world))
    (first,) = found.origins
    assert (first.path, first.phase.word, first.step) == ("3", "forward", 0)
    assert tuple(first.ranks) == (world - 1,)


def test_a_rank_with_none_of_the_samples_is_named_in_its_first_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    one = ran(ranks, other_rows, 0, tmp_path / "one", 1)
    report = compared(one, ran(ranks, other_rows, ROWS // 2, tmp_path / "two", 2))
    first = report.origins[0]
    assert (first.path, first.slot, first.step) == ("", "input.0", 0)
    assert "samples" in first.message
    assert tuple(first.ranks) == (1,)
