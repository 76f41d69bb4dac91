"""How a job ended, as its launcher saw it: a note in the trace folder, which all hosts may see.

A rank that a signal ends writes no more, and one that Ctrl-C ends wrote that it raised. Whether the
job failed or was cancelled its launcher alone knows. The first launcher of a run that ends says it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope.run.eventboard import agree, agreed
from rankscope.run.filenames import JOB_END_NAME, REPLICA_FOLDER
from rankscope.run.stallrecords import stalls_in


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What is known beside the records."""

    how: str = ""
    """The name of the signal that the launcher got, "failed", "returned", or "" where none said."""
    at_ns: int = 0
    """Wall clock of that."""
    has_stood: bool = False
    """A host had noticed that none of its ranks moved, and they did not go on before that."""

    @property
    def signal(self) -> str:
        """The signal that ended the job; "" for none that is known."""
        return self.how if self.how.startswith("SIG") else ""


def signal_of(error: BaseException | None) -> str:
    """Return the name of the signal that an exception stands for, "" for none."""
    number = getattr(error, "sigval", None)  # of torch's SignalException
    return "SIGINT" if isinstance(error, KeyboardInterrupt) else getattr(number, "name", "")


def note_job_end(out: Path, error: BaseException | None) -> None:
    """Note what a launcher saw; `error` left it, None where the job returned."""
    how = signal_of(error) or "failed"
    if error is None or (isinstance(error, SystemExit) and not error.code):
        how = "returned"
    with contextlib.suppress(OSError):  # the folder may be gone, or full: then nobody says it
        agree(out / REPLICA_FOLDER, JOB_END_NAME, f"{how} {time.time_ns()}")


def job_end(folders: Iterable[Path]) -> JobEnd:
    """Return what is noted in trace folders of one run."""
    places = [*folders]
    notes = (agreed(folder / REPLICA_FOLDER, JOB_END_NAME) for folder in places)
    how, _, at = next(filter(None, notes), "").partition(" ")
    at_ns = int(at) if at.isascii() and at.isdigit() else time.time_ns()
    stood = [
        stall.noticed_ns < at_ns and (not stall.over_ns or stall.over_ns > at_ns or stall.is_by_end)
        for folder in places
        for stall in stalls_in(folder)
    ]
    return JobEnd(how=how, at_ns=at_ns if how else 0, has_stood=any(stood))
