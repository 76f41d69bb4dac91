"""How far ranks came that opened no spool: for the line that says why nothing was traced.

The file `reached` in the run folder has lines `<rank> <pid> <stage> <text>`, each appended in one
call. `rankscope_launcher.startup` writes the first two stages itself: it imports nothing of this.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rankscope.run.filenames import REACHED_NAME

__all__ = ["Reached", "Stage", "reached_by_ranks", "tell_reached"]

_MOST_CHARACTERS = 400


class Stage(Enum):
    """How far a process of a rank came, the least first."""

    PYTHON = "python"
    """A Python that has rankscope began."""
    NO_TORCH = "no-torch"
    """That Python ended and had not imported torch."""
    TORCH = "torch"
    """torch was imported, so the first call of a module will be seen."""
    NO_CALL = "no-call"
    """That process ended and had called no module."""
    UNSELECTED = "unselected"
    """The rank called a module, and `--rs-ranks` leaves the rank out."""
    REFUSED = "refused"
    """Tracing could not begin; the text says why."""


_ORDER = {stage: place for place, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """How far one process of a rank came."""

    rank: int
    pid: int
    stage: Stage
    text: str
    """Of the exception that ended the process, or why tracing could not begin."""


def tell_reached(run_folder: str, stage: Stage, text: str = "") -> None:
    """Note how far this process came, under the number that torchrun gave to its rank."""
    line = f"{os.environ.get('RANK', '')} {os.getpid()} {stage.value} {' '.join(text.split())}"
    with contextlib.suppress(OSError):  # a full disk: the last word is less exact then
        descriptor = os.open(
            f"{run_folder}/{REACHED_NAME}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        os.write(descriptor, line[:_MOST_CHARACTERS].encode(errors="replace") + b"\n")
        os.close(descriptor)


def reached_by_ranks(run_folder: Path) -> list[Reached]:
    """Return the furthest that each rank came, by rank. Processes that a rank starts are told under
    its number too, so the last line is not the rank's own word."""
    furthest: dict[int, Reached] = {}
    with contextlib.suppress(OSError):
        for line in (run_folder / REACHED_NAME).read_text(errors="replace").splitlines():
            rank, pid, word, text = [*line.split(" ", 3), "", "", ""][:4]
            with contextlib.suppress(ValueError):
                told = Reached(rank=int(rank), pid=int(pid), stage=Stage(word), text=text)
                before = furthest.get(told.rank, told)
                if _ORDER[told.stage] >= _ORDER[before.stage]:
                    furthest[told.rank] = told
    return [furthest[rank] for rank in sorted(furthest)]
