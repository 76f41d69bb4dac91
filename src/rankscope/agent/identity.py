"""Who this process is in the job: rank, world, host, incarnation. Read from the environment, or the
process group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from rankscope.record.run import RankIdentity

__all__ = ["identify", "restarts_left"]

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""(rank, world size, local rank, local world size), by launcher; the first pair that is
set wins.
"""


def identify(
    group: tuple[int, int] | None = None, environ: Mapping[str, str] = os.environ
) -> RankIdentity:
    """Return who this process is.

    Args:
        group: (rank, world size) of the default process group once it exists; it wins over
        variables.
        environ: where the launchers' variables are looked up.
    """
    rank, world_size, local_rank, local_size = 0, 1, None, None
    for names in _RANK_VARIABLES:
        numbers = [environ.get(name, "") for name in names]
        if numbers[0].isdigit() and numbers[1].isdigit():
            rank, world_size = int(numbers[0]), int(numbers[1])
            local_rank = int(numbers[2]) if numbers[2].isdigit() else None
            local_size = int(numbers[3]) if numbers[3].isdigit() else None
            break
    if group is not None:
        rank, world_size = group
    world_size = max(world_size, rank + 1)
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_size is None else local_size,
        incarnation=int(restarts) if restarts.isdigit() else 0,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def restarts_left(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often an elastic agent may still start the ranks again; 0 without one."""
    most = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    done = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return max(0, int(most) - int(done)) if most.isdigit() and done.isdigit() else 0
