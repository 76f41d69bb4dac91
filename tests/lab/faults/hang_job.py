"""A job that gets stuck: at its third step one rank skips a branch, and the branch's collective.

    rankscope run --nproc-per-node 2 .../hang_job.py FOLDER LAYERS HIDDEN DTYPE SEED FAULTY

Tensor parallelism by hand. In one layer every rank adds a correction that is summed over a group of
its own. Each rank names the step it begins in FOLDER, and what it ends with.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults.model import cut_from, whole
from tests.lab.faults.parallel import Cut, Leave
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.tensor import one_step
from tests.lab.faults.setup import Setup, Shape, Trained, train

STEPS = 3


class Correction(nn.Module):
    """Half of the inputs' mean over all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(x.mean(0, keepdim=True), self._group) * 0.25


class Corrected(nn.Module):
    """A layer's feed-forward behind a correction that a condition may leave out."""

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.correction = Correction(group)
        self.inner = inner
        self.is_corrected = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_corrected:
            x = x + self.correction(x)
        return self.inner(x)


def main(folder: Path, setup: Setup) -> None:
    """Train; where the fault is in, never come back from the third step."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    own = dist.new_group(timeout=timedelta(minutes=10))
    model = whole(setup, Cut(dist.group.WORLD))
    trained = Trained(model, cuts=cut_from(whole(setup), model, rank, setup.ranks))
    block = model.layers[str(setup.layer)]
    block.feed_forward = Corrected(block.feed_forward, own)

    def one(step: int) -> Tensor:
        block.feed_forward.is_corrected = not (step == STEPS - 1 and setup.strikes(rank))
        (folder / f"step{step}.rank{rank}").touch()
        return one_step(setup, model, step)

    train(trained, sgd(model), one, steps=STEPS)
    (folder / f"ended.rank{rank}").write_text(str(float(trained.losses[-1])))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, layers, hidden, dtype, seed, faulty = sys.argv[1:]
    torch.set_num_threads(1)
    main(
        Path(where),
        Setup(
            shape=Shape(layers=int(layers), hidden=int(hidden)),
            dtype=dtype,
            seed=int(seed),
            is_faulty=faulty == "1",
        ),
    )
