"""Who this process is in the job: rank, world, host, incarnation."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.record.ranks import RankIdentity

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""(rank, world size, local rank, local world size), by launcher; the first pair set wins."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherPlace:
    """The place that a launcher's variables give this process."""

    variables: Mapping[str, str]
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


def launcher_place(environ: Mapping[str, str] = os.environ) -> LauncherPlace | None:
    """Return the place that the launcher's variables give; None where no launcher set any."""
    for variable, world, local_rank, local_size in _RANK_VARIABLES:
        rank, size = environ.get(variable, ""), environ.get(world, "")
        if not (rank.isdecimal() and size.isdecimal()) or _is_batch_script(variable, environ):
            continue
        local = environ.get(local_rank, "")
        local_count = (
            environ.get(local_size, "") if local_size else _slurm_tasks_here(environ, int(size))
        )
        return LauncherPlace(
            variables={n: environ[n] for n in (variable, local_rank) if n in environ},
            rank=int(rank),
            world_size=max(int(size), int(rank) + 1),
            local_rank=int(local) if local.isdecimal() else None,
            local_world_size=int(local_count) if local_count.isdecimal() else None,
        )
    return None


def identify(
    group: tuple[int, int] | None = None, environ: Mapping[str, str] = os.environ
) -> RankIdentity:
    """Return who this process is: as its `group` (rank, world size) says, else the variables."""
    place = launcher_place(environ)
    rank, world_size = (place.rank, place.world_size) if place else (0, 1)
    local_rank = place.local_rank if place else None
    local_size = place.local_world_size if place else None
    if group is not None and group != (rank, world_size):
        rank, world_size = group  # ranks that a task of the launcher started are not placed by it
        local_rank = local_size = None
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankIdentity(
        rank=rank,
        world_size=max(world_size, rank + 1),
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_size is None else local_size,
        incarnation=int(restarts) if restarts.isdecimal() else 0,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def restarts_left() -> int:
    """Return how often an elastic agent may still start the ranks again; 0 without one."""
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return max(0, int(limit) - int(done)) if limit.isdecimal() and done.isdecimal() else 0


def _is_batch_script(variable: str, environ: Mapping[str, str]) -> bool:
    """True in what sbatch runs outside `srun`: it has the variables of task 0, and is alone."""
    return (
        variable == "SLURM_PROCID"
        and environ.get(variable) == "0"
        and not {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"} & environ.keys()
    )


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> str:
    """Return how many tasks of a Slurm step run on this node, "" where it does not say."""
    node = environ.get("SLURM_NODEID", "")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        parts = [_TASKS.fullmatch(part.strip()) for part in environ.get(name, "").split(",")]
        if all(parts) and node.isdecimal():
            counts = [int(p[1]) for p in parts if p for _ in range(min(int(p[2] or 1), 1 << 16))]
            if sum(counts) == world_size and int(node) < len(counts):
                return str(counts[int(node)])
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        nodes = environ.get(name, "")
        if nodes.isdecimal() and int(nodes):
            return str(world_size // int(nodes)) if world_size % int(nodes) == 0 else ""
    return environ.get("SLURM_NTASKS_PER_NODE", "")
