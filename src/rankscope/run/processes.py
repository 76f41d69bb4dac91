"""Processes of this host by number and start: who launched a rank, and whether that still lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

_MOST_ANCESTORS = 64


def process_name(pid: int) -> str:
    """Return a name that a later process with the same number does not have."""
    return f"{pid}:{_status(pid, 19)}"


def is_process_alive(name: str) -> bool:
    """True while the process of that name exists and has not ended (a zombie has)."""
    pid = name.partition(":")[0]
    is_there = pid.isdigit() and process_name(int(pid)) == name
    return is_there and _status(int(pid), 0) not in {"", "Z"}


def is_suspended(pid: int) -> bool:
    """True while a process is stopped (SIGSTOP, Ctrl-Z); one that a debugger holds is not."""
    return _status(pid, 0) == "T"


def started_at() -> float:
    """Return when this process was started, in seconds since the epoch by this host's clock."""
    ticks = _status(os.getpid(), 19)
    since_boot = int(ticks) / os.sysconf("SC_CLK_TCK") if ticks.isdigit() else float("inf")
    return time.time() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def launcher_of(variables: Mapping[str, str]) -> int:
    """Return the process that launched this rank: its nearest ancestor that is not of the rank.
    Shells and wrappers between the two (`torchrun --no-python bind.sh ...`) were started with the
    variables that number the rank; what stands above them all ranks of a host share."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        parent = _status(pid, 1)
        if pid <= 1 or not parent.isdigit() or not _has(pid, variables):
            break
        pid = int(parent)
    return pid


def watch_signals() -> Callable[[], bool]:
    """Outlive the terminal's Ctrl-C, which is for the ranks; note a SIGTERM."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, note)
    return lambda: bool(stops)


def _status(pid: int, field: int) -> str:
    """Return a field of /proc/PID/stat behind the command's name: 0 state, 1 parent, 19 start."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""


def _has(pid: int, variables: Mapping[str, str]) -> bool:
    """True where a process was started with all these variables; False where that is unreadable."""
    try:
        entries = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in entries for name, value in variables.items())
