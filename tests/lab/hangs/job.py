"""One rank of a job: `job.py NAME STORE OUT`, with RANK, WORLD_SIZE and a run folder."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import rankscope
from tests.lab.hangs.rows import BY_NAME

TIMEOUT_S = 5.0


def main(name: str, store: str, out: str) -> None:
    """Train, traced, until the job ends or somebody ends it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row, rank = BY_NAME[name], int(os.environ["RANK"])
    timeout = timedelta(minutes=10) if row.is_killed else timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, row.ranks),
        rank=rank,
        world_size=row.ranks,
        timeout=timeout,
    )
    rankscope.attach(out=out, steps=row.steps)
    row.program(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
