"""Processes of this host: who launched a rank and whether that still lives, and how a host's
companion is started from a process that must know neither sockets nor threads.

A companion is a child of the wrapper, or a daemon of an unchanged script (`start_daemon`).

A rank holds a POSIX record lock on its stream folder for as long as it lives. The kernel drops such
a lock however the process ends, and a forked child does not inherit it. Asking whether a stream is
alive never takes the lock (`F_GETLK`), and never opens the file in the process that holds it:
closing any descriptor of a file drops all its POSIX locks in that process. The program may do just
that (`os.closerange`), so the file also names the process, and whoever is named there and lives is
alive.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import importlib.util
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rankscope.errors import SpoolError, os_errors_as
from rankscope.run.files import OwnFile, above_standard_streams, open_own_log
from rankscope.run.folders import (
    COMPANION_LOCK_NAME,
    HELD_FOLDER,
    LAUNCHER_LOCK_NAME,
    RUN_NAME,
    START_LOCK_NAME,
    STREAM_LOCK_NAME,
    RunHeader,
    is_held,
    stream_folder,
    streams,
)
from rankscope.settings import Settings, settings_of_run

_MOST_ANCESTORS = 64


def process_name(pid: int) -> str:
    """Return a name that a later process with the same number does not have."""
    # the time of its start beside the number: numbers are given again
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
    """Return the process that launched this rank: its nearest ancestor outside the rank. Shells and
    wrappers between the two (`torchrun --no-python bind.sh ...`) were started with the variables
    that number the rank; processes above them are shared by all ranks of a host."""
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


_FORGOTTEN_IN_CHILDREN: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def forget_in_children(owner: Any) -> None:
    """Have `owner.forget_in_child` called in every forked child, as long as the owner lives."""
    _FORGOTTEN_IN_CHILDREN.add(owner)


def _forget_all() -> None:
    for owner in list(_FORGOTTEN_IN_CHILDREN):
        owner.forget_in_child()


os.register_at_fork(after_in_child=_forget_all)  # once: what is registered stays for good


def _status(pid: int, field: int) -> str:
    """Return a field of /proc/PID/stat behind the command's name: 0 state, 1 parent, 19 start."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return ""


def _has(pid: int, variables: Mapping[str, str]) -> bool:
    """True if a process was started with all these variables; False if that is unreadable."""
    try:
        entries = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in entries for name, value in variables.items())


GROWS_FROM_BYTES = 64 << 20
"""Bytes of records from which on the tree grows during the job; below, it is built at the end."""
TREE_TROUBLE = "!"
"""Stands in place of PART before each line that says why there is no tree."""
_START_S = 10.0


class ExitOutcome(enum.IntEnum):
    """Any other code, a signal's above all: it was killed, and starting it again goes on."""

    DONE = 0
    REFUSED = 2
    """It could not start: another companion is at work, or a folder or address is unusable."""
    UNFINISHED = 3
    """It gave up, and starting it again would not help: the records are kept."""
    NO_ROOM = 4
    """The trace folder could not be written: the records are kept."""
    REJECTED = 5
    """The collector gathers another run: the records are kept."""
    STRANGE = 6
    """The keys of collector and relay do not match: the records are kept."""


def companion_command(run_folder: Path) -> list[str]:
    """The command of a host's companion: all else stands in `run.json`."""
    return [sys.executable, "-m", "rankscope.companion", "--run-folder", str(run_folder)]


def reader_command(run_folder: Path) -> list[str]:
    """The command that goes with a running job step by step, as long as this process lives."""
    return _child("--run-folder", run_folder)


def tree_command(out: Path, *, keep_spool: bool) -> list[str]:
    """The command that builds the tree while this process lives; it prints lines of `PART WHAT`.
    The run folder may be gone by then."""
    return [*_child("--build-tree", out), *(["--keep-spool"] if keep_spool else [])]


def dataset_command(out: Path) -> list[str]:
    """The command that writes what the Parquet dataset lacks of a trace that is finished."""
    return _child("--finish-dataset", out)


def settings_of_gathering(header: RunHeader) -> Settings:
    """The settings by which the companion of the head host, and its children, gather a run. Hosts
    that keep their records apart keep them for `recover`, whose trace has the dataset. Raises
    SettingError if one cannot be read."""
    settings = settings_of_run(header.settings)
    return replace(
        settings,
        keep_spool=settings.keep_spool or header.keeps_apart,
        parquet=settings.parquet and not header.keeps_apart and not dataset_trouble(),
    )


def dataset_trouble() -> str:
    """Return why no Parquet dataset can be written, "" where one can."""
    if importlib.util.find_spec("pyarrow") is None:
        return "no Parquet dataset: pyarrow is missing; pip install 'rankscope[parquet]'"
    return ""


def metrics_trouble(port: int) -> str:
    """Return why a collector cannot serve metrics on this port, "" where it can."""
    if importlib.util.find_spec("prometheus_client") is None:
        return "no metrics: prometheus-client is missing; pip install 'rankscope[metrics]'"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"no metrics: port {port} cannot be used: {error.strerror}"
    return ""


def companion_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a companion: no RANKSCOPE variables, so that it never traces itself; no
    rank variables; no working directory of the job on the module path, whose entries are made
    absolute because a companion works elsewhere; one thread for numpy; this package, wherever it
    was imported from."""
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONINSPECT")
    variables = {
        name: value
        for name, value in environ.items()
        if name != "RANKSCOPE" and not name.startswith("RANKSCOPE_") and name not in left_out
    }
    entries = variables.get("PYTHONPATH", "").split(os.pathsep)
    path = [os.path.abspath(entry) for entry in entries if entry]
    package_root = str(Path(__file__).resolve().parents[2])
    if package_root not in path:
        path.append(package_root)
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(path),
        # the job's folder may hold a numpy.py of its own
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # a thread would have megabytes of its own
    }


def start_child(
    command: Sequence[str], out: Path, *, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start one of the commands above beside the companion, in a session of its own and in the
    trace folder; its errors go into the companion's log. Raises OSError if it cannot be started."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=companion_environment(),
        cwd=out,
        start_new_session=True,
    )


class ChildWatch:
    """Kills a child that stays suspended: the companion would wait for it in vain."""

    _SUSPENDED_S: Final = 10.0

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Watch from now on."""
        self.process, self._ran_at = process, time.monotonic()

    def poll(self) -> int | None:
        """Return the exit code, None while the child lives; called several times a second."""
        code, now = self.process.poll(), time.monotonic()
        if code is None and not is_suspended(self.process.pid):
            self._ran_at = now
        # killed and not continued: whoever stopped it had a reason, and the companion starts
        # another
        elif code is None and now - self._ran_at > self._SUSPENDED_S:
            self.process.kill()
        return code


def start_daemon(command: Sequence[str], log: Path, folder: Path) -> str:
    """Start `command` as nobody's child: own session, stdio to `log`, no inherited descriptor.
    Return its name (`run.processes`), or raise SpoolError.

    It works in `folder`, which `-m` puts on the module path of Python 3.10: give one that only this
    user writes. An open descriptor of the job's would keep its readers waiting (`torchrun | cat`).
    The shell forks the daemon and is reaped here: the rank never has a child it does not know.
    """
    # descriptor 3 takes the daemon's number back to us; all else goes to the log
    line = f"exec 3>&1 >&2; {shlex.join(command)} 3>&- & echo $! >&3"
    output = -1
    try:
        output = open_own_log(log)
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env=companion_environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            close_fds=True,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpoolError(f"{shlex.join(command)}: cannot be started: {error}; see {log}") from error
    finally:
        if output >= 0:
            os.close(output)
    if done.returncode:
        outcome = f"the shell ended with {done.returncode}"
        raise SpoolError(f"{shlex.join(command)}: {outcome}; see {log}")
    return process_name(int(done.stdout))


def start_extras(daemons: Iterable[tuple[Sequence[str], Path]]) -> list[str]:
    """Start daemons that a run can do without, each given with its log; return what went wrong."""
    complaints = []
    for command, log in daemons:
        try:
            start_daemon(command, log, log.parent)
        except SpoolError as error:
            complaints.append(str(error))
    return complaints


def _child(work: str, folder: Path) -> list[str]:
    module, parent = "rankscope.companion.running", str(os.getpid())
    return [sys.executable, "-m", module, work, str(folder), "--parent", parent]


# ---- who is alive --------------------------------------------------------------------------------

_RETRY_S = 0.2
_FLOCK = struct.Struct("@hhqqi")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""

_locks_here: dict[tuple[int, int], int] = {}
"""(device, inode) of every lock file held by this process, and the process id that locked it."""


class StreamLock:
    """The life of one stream, held from construction to `release` or the end of the process."""

    __slots__ = ("_file", "_path", "_pid")

    def __init__(self, folder: Path) -> None:
        """Lock `folder`. Raises SpoolError if another writer holds it or the file cannot
        be made."""
        self._path = path = folder / STREAM_LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._pid = os.getpid()
        if _is_held_here(path):
            raise SpoolError(
                f"{folder}: this process already writes this stream; close that writer"
            )
        with os_errors_as(SpoolError, f"{path}: cannot be made"):
            descriptor = above_standard_streams(os.open(path, flags, 0o600))
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > deadline:
                    os.close(descriptor)
                    raise SpoolError(
                        f"{folder}: another process writes this stream; a rank may run once per "
                        f"incarnation, so a child that inherited RANK must not trace"
                    ) from error
            time.sleep(0.01)
        self._file: OwnFile | None = OwnFile(descriptor)
        # this process must never open the file again: to close that would drop the lock
        _locks_here[self._file.identity] = self._pid
        with contextlib.suppress(OSError):  # a full disk: the lock alone tells
            os.ftruncate(descriptor, 0)
            # the second witness: a program that closes all its descriptors loses the lock and lives
            # on
            os.pwrite(descriptor, process_name(self._pid).encode(), 0)

    def release(self) -> None:
        """Give the lock up. Does nothing in a forked child, nor the second time."""
        file, self._file = self._file, None
        # a forked child has no lock to give up, and must not empty its parent's file
        if file is not None and self._pid == os.getpid():
            _locks_here.pop(file.identity, None)
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            file.close()


def is_alive(folder: Path) -> bool:
    """True while the process that writes this stream folder lives, and has not released its lock.

    Takes no lock itself.
    """
    path = folder / STREAM_LOCK_NAME
    if _is_held_here(path):
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)  # not known: nobody is called dead
    try:
        # asks for the holder: to take the lock for a moment could make a rank fail to
        # start
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0).ljust(32, b"\0")
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        name = os.pread(descriptor, 64, 0).decode(errors="replace")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if _FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK:
        return True
    return is_process_alive(name) and name != process_name(os.getpid())  # itself, before an exec


def is_abandoned(run_folder: Path) -> bool:
    """True for a host's run folder in which nobody is at work: no rank, relay or launcher.

    Without `run.json` it is that of one process that traced itself, once there are records.
    """
    places = [place for place in (run_folder, run_folder / HELD_FOLDER) if place.is_dir()]
    stream_folders = [stream_folder(place, stream) for place in places for stream in streams(place)]
    if not stream_folders and not (run_folder / RUN_NAME).is_file():
        return False
    locks = (LAUNCHER_LOCK_NAME, COMPANION_LOCK_NAME, START_LOCK_NAME)
    return not any(is_held(run_folder / name) for name in locks) and not any(
        is_alive(folder) for folder in stream_folders
    )


def _is_held_here(path: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return _locks_here.get((status.st_dev, status.st_ino)) == os.getpid()
