"""What the files and folders of a trace and of a host's run are called; and the spool folder of one
host: who writes there, what the run is, whether there is room.

<spool base>/rankscope-<uid>/<run key>/        0700
    run.json        what the relay has to know, written by rename
    rank00003.0/    one folder per stream: `lock` and its segments
    companion.lock, companion.log, job-over
    launcher.lock   held by the launcher that prepared the run, for as long as it lives
    start.lock      held by one starting rank after the other where no launcher prepared it
    companion.started                  the process that such a rank started last
    step-trigger.0/ where ranks agree on the step that `at:FILE` asks for
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rankscope.errors import FolderBusyError, SpoolError, os_errors_as
from rankscope.record.ranks import MAX_INCARNATIONS, MAX_RANKS, StreamId
from rankscope.run.files import free_bytes, read_json_map, write_by_rename

# ------------------------------------------------------------------ the trace folder
TRACE_NAME = "trace.json"
TREE_NAME = "tree.json"
"""The tree for people and programs that read JSON; rankscope reads the step files."""
VALUES_NAME = "values.safetensors"
"""In a trace of format 1: the statistics of all steps."""
STEPS_FOLDER = "steps"
"""Folder of the step files, each with the columns of some whole steps."""
INDEX_NAME = "index.jsonl"
"""In the folder of step files, while the job runs: which steps are written."""
INDEX_FORMAT = "rankscope.index/2"
TENSOR_FOLDER = "tensors"
"""Folder of the chunks of full tensors, in a trace folder or in a run folder."""
COLLECTOR_LOCK_NAME = "collector.lock"
COLLECTOR_LOG_NAME = "collector.log"
STALL_FOLDER = "stalls"
"""Folder of relays' reports on a job that stands still, in trace and run folders."""
TRACE_FORMAT = "rankscope.trace/3"
TREE_FORMAT = "rankscope.tree/1"
STEPS_FORMAT = "rankscope.steps/1"
FINDINGS_NAME = "findings.jsonl"
FINDINGS_FORMAT = "rankscope.finding/1"
PARQUET_FOLDER = "parquet"
"""Folder of the dataset of `--rs-parquet`, written while the job runs."""

REPLICA_FOLDER = "spool"
"""Folder of the replicas inside a trace folder: `rank00003.0.cells`, its end marker
`rank00003.0.json`, and the files named below."""
CELLS_SUFFIX = ".cells"
SETTLED_SUFFIX = ".settled"
"""Suffix of the file that stands for the begin of a replica, beside it (`spool.replicas`)."""
RUN_ID_NAME = "run-id"
RUN_MARK_PREFIX = "run-"
"""Prefix of the mark by which other hosts recognise the head's folder."""
HOST_STATE_PREFIX = "host-"
"""Prefix of the states that relays of a shared folder write."""
STATUS_NAME = "status.json"
"""In the folder of replicas: where the ranks of a running job are. Removed with the trace's end."""
STATUS_FORMAT = "rankscope.status/1"
JOB_END_NAME = "job-end"
"""In the folder of replicas: how the job ended, as its launcher saw it."""
VANISHED_NAME = "vanished"
"""In the folder of replicas: a host of a job that holds its steps back vanished without an end."""

# ------------------------------------------------------------------ the run folder of a host
RUN_NAME = "run.json"
COMPANION_LOCK_NAME = "companion.lock"
COMPANION_LOG_NAME = "companion.log"
"""Log of a companion that gathers nothing; a gathering one logs to the trace folder."""
JOB_OVER_NAME = "job-over"
LAUNCHER_LOCK_NAME = "launcher.lock"
START_LOCK_NAME = "start.lock"
REACHED_NAME = "reached"
"""Progress of ranks that opened no spool: lines for the launcher."""
COMPANION_STARTED_NAME = "companion.started"
"""Names the companion that a rank started last, before it holds its lock."""
STEP_TRIGGER_FOLDER = "step-trigger"
"""Folder `step-trigger.<life>` in which ranks agree on a step (`agent.steps.chosen`); in the folder
of replicas if all hosts see it."""
HELD_FOLDER = "held"
"""Folder of the streams that ranks hold back (`--rs-steps last:N`), one folder a stream."""
KEPT_FOLDER = "kept"
EVENT_FOLDER = "events"
"""Folder `events.<life>` of events (`run.agreements`), beside the step-trigger folders."""
ORDER_NAME = "order.json"
"""Last order of `rankscope capture`, in the folder of replicas and in run folders."""
ORDER_SEEN_PREFIX = "order-"
"""Prefix of relays' answers to an order, beside it in the folder of replicas."""
ORDER_FOLDER = "orders"
"""Folder `orders.<life>` in which ranks agree on an order's first step, beside the answers."""
STREAM_LOCK_NAME = "lock"
"""In the folder of a stream: locked by the rank that writes the stream."""

OF_A_COLLECTOR = frozenset(
    {
        *(REPLICA_FOLDER, COLLECTOR_LOCK_NAME, COLLECTOR_LOG_NAME, TENSOR_FOLDER, STALL_FOLDER),
        *(FINDINGS_NAME, STEPS_FOLDER, PARQUET_FOLDER, RUN_NAME),
    }
)
"""Files of a trace folder that exist until its tree does."""
OF_A_RUN = (
    *(RUN_NAME, JOB_OVER_NAME, LAUNCHER_LOCK_NAME, START_LOCK_NAME, COMPANION_LOG_NAME),
    *(COMPANION_LOCK_NAME, COMPANION_STARTED_NAME, ORDER_NAME, REACHED_NAME),
)
"""Files that are removed with a run folder."""

Progress = Callable[[str, float], None]
"""Called with the work in progress, and the part of it that is done (0 to 1)."""


# ------------------------------------------------------------------ the run, and who writes
RUN_FORMAT = "rankscope.run/1"
SHARED = "shared"
"""In place of an address: the relay writes into the trace folder itself."""
_STREAM_NAME = re.compile(r"rank(\d{5,8})\.(\d{1,5})")
_TRIES = 5
_ASKED_S = 2.0
"""A process that tests a lock holds it for less than this, and counts as no holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """Contents of `run.json`."""

    run_id: str
    out: Path
    collector: str
    """Address, `SHARED`, or "" in a job of one host (`run.prepare.Collection`)."""
    world_size: int
    settings: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    """How often ranks may come back, where no rankscope launcher reports the end of the job."""
    agent: str = ""
    """The process that started the ranks of this host, and may restart them (`run.processes`); ""
    where a rankscope launcher reports the end of the job."""
    collects: int = 0
    """Ranks of the run that this host gathers; 0 where another host gathers it."""
    keeps_apart: bool = False
    """True where `out` is on this host alone, because it does not see the head's."""

    def __post_init__(self) -> None:
        counts = self.world_size - 1, self.max_restarts, self.collects
        if not self.run_id or not all(0 <= count < MAX_RANKS - 1 for count in counts):
            raise SpoolError(
                f"run {self.run_id!r} with a world of {self.world_size}: expected a name and a "
                f"world size from 1 to {MAX_RANKS - 1}"
            )


_KINDS: Final[Mapping[str, type]] = {
    **dict.fromkeys(("run_id", "out", "collector", "agent"), str),
    **dict.fromkeys(("world_size", "max_restarts", "collects"), int),
    "settings": dict,
    "keeps_apart": bool,
}


def spool_base(chosen: Path | None) -> Path:
    """The folder all runs of this user share on this host: local disk, never NFS or Lustre."""
    return (chosen or Path(tempfile.gettempdir())) / f"rankscope-{os.getuid()}"


def run_key(run_id: str) -> str:
    """A file name for a run: whatever a run id contains, only hexadecimal digits reach the disk."""
    return hashlib.blake2b(run_id.encode(), digest_size=10).hexdigest()


def host_run_folder(base: Path, key: str) -> Path:
    """Make `<base>/<key>` (0700 each, of `spool_base` and `run_key`), or take an existing one.
    Raises SpoolError if it cannot be made, belongs to another user, or is open to others."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key):
        raise SpoolError(f"run key {key!r} is not a file name; use run_key(run_id)")
    for folder in (base, base / key):
        remedy = "choose another with --rs-spool"
        with os_errors_as(SpoolError, f"{folder}: cannot be made", remedy):
            for _ in range(_TRIES):
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # it went with the last run in it
                    folder.mkdir(mode=0o700, exist_ok=True)
                    break
            status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
            raise SpoolError(
                f"{folder}: belongs to another user, is a link or is open to others "
                f"(mode {status.st_mode & 0o777:o})",
                "remove it, or choose another with --rs-spool",
            )
    return base / key


def remove_run_folder(run_folder: Path) -> None:
    """Remove a run folder that holds nothing any more, and the base if it was the last one."""
    with contextlib.suppress(OSError):  # somebody else left something there
        run_folder.rmdir()
        run_folder.parent.rmdir()


def relay_name(run_folder: Path) -> str:
    """A fixed name for this host and folder: the same after a restart."""
    place = f"{socket.gethostname()}:{run_folder.absolute()}"
    return hashlib.blake2b(place.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def find_runs(bases: Iterable[Path], run_id: str) -> list[Path]:
    """Return the run folders of one run on this host, in these spool bases."""
    folders = []
    for base in bases:
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            for folder in sorted(base.iterdir()):
                with contextlib.suppress(SpoolError):
                    if read_run_header(folder).run_id == run_id:
                        folders.append(folder)
    return folders


def stream_folder(run_folder: Path, stream: StreamId) -> Path:
    """Folder of one stream's spool."""
    return run_folder / stream.name


def segment_path(folder: Path, index: int) -> Path:
    """Path of segment `index` of a stream: `000003.cells`."""
    return folder / f"{index:06d}{CELLS_SUFFIX}"


def segment_indexes(folder: Path) -> list[int]:
    """Numbers of the segments that still exist, ascending, or SpoolError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SpoolError(f"{folder}: cannot be listed: {error.strerror}") from error
    stems = (name.removesuffix(CELLS_SUFFIX) for name in names if name.endswith(CELLS_SUFFIX))
    return sorted(int(stem) for stem in stems if len(stem) >= 6 and stem.isdecimal())


def streams(run_folder: Path) -> list[StreamId]:
    """Streams that have at least one segment, sorted; SpoolError where the folder is unreadable."""
    with os_errors_as(SpoolError, f"{run_folder}: cannot be listed"):
        names = os.listdir(run_folder)
    named = [stream for stream in map(stream_named, names) if stream is not None]
    return sorted(stream for stream in named if segment_indexes(run_folder / stream.name))


def stream_named(name: str) -> StreamId | None:
    """The stream whose folder or file stem this is, None where it is no stream's."""
    match = _STREAM_NAME.fullmatch(name)
    if match is None or int(match[1]) >= MAX_RANKS or int(match[2]) >= MAX_INCARNATIONS:
        return None
    stream = StreamId(rank=int(match[1]), incarnation=int(match[2]))
    return stream if stream.name == name else None


def write_run_header(run_folder: Path, header: RunHeader) -> None:
    """Write `run.json`, or raise SpoolError."""
    fields = {"format": RUN_FORMAT, **asdict(header), "out": str(header.out)}
    write_by_rename(run_folder / RUN_NAME, json.dumps(fields, indent=1) + "\n")


def read_run_header(run_folder: Path) -> RunHeader:
    """Read `run.json`; raise SpoolError where it is missing, damaged, or of another format."""
    path = run_folder / RUN_NAME
    fields = read_json_map(path)
    if fields.get("format") != RUN_FORMAT:
        raise SpoolError(f"{path}: format {fields.get('format')!r}, expected {RUN_FORMAT!r}")
    values = {name: fields[name] for name in _KINDS if name in fields}
    for name, value in values.items():
        if type(value) is not _KINDS[name]:
            raise SpoolError(f"{path}: {name} is {value!r}, expected {_KINDS[name].__name__}")
    values["settings"] = {str(name): str(text) for name, text in fields.get("settings", {}).items()}
    try:
        return RunHeader(**{**values, "out": Path(values["out"])})
    except (KeyError, TypeError) as error:
        raise SpoolError(f"{path}: lacks what a run needs: {error}") from error


def mark_job_over(run_folder: Path) -> None:
    """Say that no further incarnation of any rank of this host will come, or raise SpoolError."""
    write_by_rename(run_folder / JOB_OVER_NAME, "")


def check_free_space(folder: Path, needed_bytes: int, need: str = "", remedy: str = "") -> None:
    """Raise SpoolError for a disk without room; `need` and `remedy` are by default of spools."""
    free = free_bytes(folder)
    if free < needed_bytes:
        need = need or f"needs {needed_bytes >> 20} MiB for the spools"
        remedy = remedy or "choose another disk with --rs-spool or less with --rs-spool-bytes"
        raise SpoolError(f"{folder}: {need}, {free >> 20} MiB are free", remedy)


class FolderLock:
    """An advisory lock (flock) that one process at a time holds on a folder."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path, holder: str) -> None:
        """Lock the file at `path`; `holder` names its user for the message. Raises FolderBusyError
        if another process holds it, SpoolError if it cannot be made."""
        self._path = path
        self._descriptor = -1
        deadline = time.monotonic() + _ASKED_S
        while self._descriptor < 0:
            try:
                self._descriptor = _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                raise FolderBusyError(
                    f"{path.parent}: another {holder} is at work there; one is enough, "
                    f"wait for it or give this one another folder"
                ) from error
            except OSError as error:
                raise SpoolError(f"{path}: cannot be made: {error.strerror}") from error
            if not self.is_in_place():  # whoever held it removed the file: this keeps nobody out
                self.release()
                if time.monotonic() > deadline:
                    raise SpoolError(f"{path}: is not what was opened under that name")

    def is_in_place(self) -> bool:
        """True where the file that is locked is the one at its path, and not gone or another's."""
        try:
            locked, at_path = os.fstat(self._descriptor), os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(locked, at_path)

    def remove(self) -> None:
        """Give the lock up and remove its file; whoever waits for it makes a new one."""
        if self._descriptor >= 0 and self.is_in_place():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.release()

    def release(self) -> None:
        """Give the lock up; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def is_held(path: Path) -> bool:
    """True while some process visible to this one holds the FolderLock at `path`. Makes no lock
    file, and needs no right to write."""
    try:
        os.close(_locked(path, os.O_RDONLY, fcntl.LOCK_SH))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _locked(path: Path, flags: int, lock: int) -> int:
    descriptor = os.open(path, os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
