"""The trainings into which failures are put, and the ways in which they are traced.

A training builds all it uses and returns what counts. It goes through what has code of its own in a
rank: several optimizers, a closure, checkpointing, a gradient scaler, hooks of the program, frozen
and late parameters, an exception that the program catches, copies, evaluation, collectives.
"""

from __future__ import annotations

import atexit
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WAYS", "Way", "prepare_run_folder"]

WORLD = 2


class Layer(nn.Module):
    """Two linears with dropout, run again in backward where asked."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.down(torch.relu(self.up(x)))) * self.mask


class Toy(nn.Module):
    """Layers of which one is checkpointed, and a head that may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, refuse: bool = False) -> dict[str, torch.Tensor]:
        x = self.layers[0](x, scale=0.5)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        if refuse:
            raise ValueError("the program's own")
        return {"logits": self.head(self.norm(x))}


def _double(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output * 2


def training() -> Any:
    """Train one small model in one process."""
    model = Toy()
    model.layers[0].up.register_forward_hook(_double)
    model.layers[0].down.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    main = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(main, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    criterion = nn.MSELoss()
    losses = []
    for step in range(3):
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=step == 1)
            loss = criterion(model(x)["logits"], torch.zeros(4, 3))
            (scaler.scale(loss) if step < 2 else loss).backward()
            losses.append(loss.item())
        if step < 2:
            scaler.step(main)
            scaler.update()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            main.step()
        other.step()
        main.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(torch.randn(2, 8))["logits"].float().sum().item())
        model.train()
        try:
            model(torch.randn(2, 8), refuse=True)
        except ValueError as error:
            losses.append(str(error))
    try:
        sys.exit(3)
    except SystemExit as error:
        losses.append(error.code)
    twin = copy.deepcopy(model)
    torch.save(twin.state_dict(), io.BytesIO())
    line = nn.Linear(3, 1)
    solver = torch.optim.LBFGS(line.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = line(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    losses.append(solver.step(closure).item())
    return model, twin, line, main, losses


def training_of_ranks() -> Any:
    """Train on two ranks: DDP, and collectives of each way to issue them."""
    import torch.distributed._functional_collectives as functional

    rank = dist.get_rank()
    model = Toy()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    results = []
    for _ in range(2):
        torch.manual_seed(100 + rank)
        with parallel.no_sync():
            parallel(torch.randn(4, 8))["logits"].square().mean().backward()
        loss = parallel(torch.randn(4, 8))["logits"].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        gathered = [torch.empty(1) for _ in range(WORLD)]
        dist.all_gather(gathered, total.reshape(1))
        work = dist.broadcast(total, 0, async_op=True)
        work.wait()
        waited = functional.wait_tensor(functional.all_reduce(total, "sum", dist.group.WORLD))
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(total, 0)
        results.append([loss, total, gathered, waited])
    return model, optimizer, results


class Way:
    """How one training is traced in a process of its own."""

    @property
    def starts_companions(self) -> bool:
        """True where a rank starts a relay and a collector."""
        return not self.is_prepared and self.settings == ON

    def __init__(
        self,
        body: Callable[[], Any],
        traced: Callable[[Path], Any],
        world: int = 1,
        is_prepared: bool = False,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.body, self.traced = body, traced
        self.world = world
        self.is_prepared = is_prepared
        """A launcher has made the run folder."""
        self.settings = settings or {}
        """Variables of the process."""


@contextmanager
def _block(folder: Path) -> Iterator[None]:
    import rankscope

    with rankscope.trace(out=folder / "trace", spool=folder / "spool", tensors="layers.0*:output"):
        yield


@contextmanager
def _armed(folder: Path) -> Iterator[None]:
    """As the start-up file does."""
    from rankscope_launcher.startup import install

    os.environ["RANKSCOPE"] = "1"
    os.environ["RANKSCOPE_SPOOL"] = str(folder / "spool")
    os.environ.setdefault("RANKSCOPE_OUT", str(folder / "trace"))
    install()
    try:
        yield
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()


@contextmanager
def _attached(folder: Path) -> Iterator[None]:
    import rankscope

    rankscope.attach(out=folder / "trace", spool=folder / "spool", steps="1")
    try:
        yield
        rankscope.step()
    finally:
        atexit._run_exitfuncs()


@contextmanager
def _called_back(folder: Path) -> Iterator[None]:
    from rankscope.integrations.training import TracedTraining

    traced = TracedTraining({"out": folder / "trace", "spool": folder / "spool"})
    traced.begin()
    try:
        yield
        traced.step()
    finally:
        traced.end()


ON = {"RANKSCOPE_FINISH_SECONDS": "20"}
WAYS = {
    "block": Way(training, _block),
    "rank": Way(training_of_ranks, _armed, world=WORLD, is_prepared=True),
    "held": Way(
        training, _armed, is_prepared=True,
        settings={"RANKSCOPE_STEPS": "last:2,watch:head:output"},
    ),
    "alone": Way(training, _armed, settings=ON),
    "attached": Way(training, _attached, settings=ON),
    "block of ranks": Way(training_of_ranks, _block, world=WORLD, settings=ON),
    "callback": Way(training, _called_back, settings=ON),
}  # fmt: skip


def prepare_run_folder(folder: Path, way: Way) -> dict[str, str]:
    """Do what a launcher does before it starts ranks; return their variables."""
    from rankscope.run.prepare import Collection, RunRequest, prepare_run
    from rankscope.settings import settings_from

    own = {"out": folder / "trace", "spool": folder / "spool", "spool_bytes": 1 << 24}
    request = RunRequest(
        run_id=folder.name, key="key", collection=Collection(""), world_size=way.world,
        local_ranks=way.world, settings=settings_from(own, way.settings),
    )  # fmt: skip
    prepared = prepare_run(request)
    return {"RANKSCOPE_RUN_FOLDER": str(prepared.run_folder)}
