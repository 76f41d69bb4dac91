"""The training of examples/ddp.py, begun in the ways that torchrun knows nothing of.

launches_job.py spawn|fork|forkserver     the ranks are children, only their group knows them
launches_job.py variables RANK SIZE       one rank, told by a launcher's two variables
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from gpt import Sizes, batch, build, loss_of

SIZES = Sizes()


def train(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(build(SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        inputs, targets = batch(SIZES, step, rank, world_size)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    del model, optimizer  # a group that goes with its model can hang: see docs/questions.md
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "variables":
        train(*(int(os.environ[name]) for name in sys.argv[2:4]))
    else:
        mp.start_processes(train, (2,), nprocs=2, start_method=sys.argv[1])
