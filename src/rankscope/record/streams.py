"""The job: who is who, which hosts, how each rank ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EndReason(str, enum.Enum):
    """How a rank's life ended, as far as its spool tells."""

    EXIT = "exit"
    """The end record was committed: the interpreter shut down in order."""
    CLOSED = "closed"
    """Tracing was closed by the program itself (`with rankscope.trace`)."""
    SWITCHED_OFF = "switched_off"
    """Repeated failures inside rankscope switched tracing off on this rank."""
    LOST = "lost"
    """The process is gone and left no end record (killed, aborted, os._exit)."""
    RUNNING = "running"
    """No end had arrived when the trace was read."""
    RAISED = "raised"
    """The end record was committed while an uncaught exception ended the program."""


MAX_RANKS = 1 << 20
"""More ranks than these no job has; a count or a rank from outside is checked against it."""
MAX_INCARNATIONS = 1 << 16
MINIMUM_LIMIT_BYTES = 64 << 10
LEAST_BLACK_BOX_BYTES = 16 * MINIMUM_LIMIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamId:
    """One rank's spool in one incarnation: `rank00003.0`."""

    rank: int
    incarnation: int

    def __post_init__(self) -> None:
        if not (0 <= self.rank < MAX_RANKS and 0 <= self.incarnation < MAX_INCARNATIONS):
            raise ValueError(f"rank {self.rank} incarnation {self.incarnation} is out of range")

    @property
    def name(self) -> str:
        """Folder and file stem; built from integers only."""
        return f"rank{self.rank:05d}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Who a traced process is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    incarnation: int
    host: str
    pid: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} outside a world of {self.world_size}: check RANK and WORLD_SIZE"
            )

    @property
    def stream(self) -> StreamId:
        """Name of this process's spool."""
        return StreamId(rank=self.rank, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group as one rank sees it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    backend: str
    description: str = ""
