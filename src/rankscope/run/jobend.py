"""How a job ended, as its launcher saw it: a note in the trace folder, which all hosts may see.

A rank that a signal ends writes no more, and one that Ctrl-C ends wrote that it raised. Whether the
job failed or was cancelled, and which rank a signal killed before others were ended because of it,
its launcher alone knows. The first launcher of a run that ends says it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope.run.eventboard import agree, agreed
from rankscope.run.filenames import JOB_END_NAME, REPLICA_FOLDER
from rankscope.run.stallrecords import stalls_in

_OF_A_FAULT: Final = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
"""Not those that end a job or its ranks from outside; nor SIGABRT, with which NCCL and gloo leave
where they waited too long."""
_MOST_NAMED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What is known beside the records."""

    how: str = ""
    """The name of the signal that the launcher got, "failed", "returned", or "" where none said."""
    at_ns: int = 0
    killed: Mapping[int, str] = field(default_factory=dict)
    """{rank: name of the signal} of ranks that went first, killed by a signal that nobody sends
    because others failed or waited."""
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


def has_failed(error: BaseException | None) -> bool:
    """True for what leaves torchrun where a job fails; an exit with code 0 is none."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def note_job_end(out: Path, error: BaseException | None) -> None:
    """Note what a launcher saw; `error` left it, None where the job returned."""
    how = signal_of(error) or ("failed" if has_failed(error) else "returned")
    killed = [
        f"{rank}={failure.signal_name()}"
        for rank, failure in sorted(first_failures(error).items())
        if -failure.exitcode in _OF_A_FAULT
    ]
    with contextlib.suppress(OSError):  # the folder may be gone, or full: then nobody says it
        text = " ".join([how, str(time.time_ns()), *killed[:_MOST_NAMED]])
        agree(out / REPLICA_FOLDER, JOB_END_NAME, text)


def first_failures(error: BaseException | None) -> dict[int, Any]:
    """Return {rank: failure} of the first second, as torch's ChildFailedError says."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    earliest = min((each.timestamp for each in failures.values()), default=0)
    return {rank: each for rank, each in failures.items() if each.timestamp == earliest}


def job_end(folders: Iterable[Path]) -> JobEnd:
    """Return what is noted in trace folders of one run."""
    places = [*folders]
    notes = (agreed(folder / REPLICA_FOLDER, JOB_END_NAME) for folder in places)
    how, at, *killed = (*next(filter(None, notes), "").split(" "), "")
    at_ns = int(at) if at.isascii() and at.isdigit() else time.time_ns()
    named = (each.partition("=") for each in killed)
    stood = [
        stall.noticed_ns < at_ns and (not stall.over_ns or stall.over_ns > at_ns or stall.is_by_end)
        for folder in places
        for stall in stalls_in(folder)
    ]
    return JobEnd(
        how=how,
        at_ns=at_ns if how else 0,
        killed={int(rank): name for rank, _, name in named if rank.isascii() and rank.isdigit()},
        has_stood=any(stood),
    )
