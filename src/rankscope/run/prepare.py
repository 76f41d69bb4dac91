"""How the launcher, the first rank, or one process that traces a block prepare a run on one host:
they make the trace folder and the host's run folder once the disks have room for what ranks may
write, and say in `run.json` where the records are collected.

A trace folder that holds something is not used: a run beside it takes a sibling, `DIR-2`, `DIR-3`
... Whoever chooses makes `spool/` in it, with the run's mark inside, in one rename: of two jobs
that begin at once one gets the folder, and other hosts of the run know it by the mark.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope.errors import FolderError, KeysError
from rankscope.run import folders as names
from rankscope.run.connection import CurveKeys, check_address, is_tcp, read_keys
from rankscope.run.files import check_folder_found
from rankscope.run.folders import (
    REPLICA_FOLDER,
    SHARED,
    RunHeader,
    check_free_space,
    host_run_folder,
    spool_base,
    write_run_header,
)
from rankscope.run.processes import is_process_alive, process_name
from rankscope.settings import Settings


def default_out() -> Path:
    """Return `rankscope-<time>` in the working folder; raise FolderError where that is gone."""
    try:
        folder = Path.cwd()
    except OSError as error:
        raise FolderError(
            f"the working folder is gone ({error.strerror}): name the trace folder with --rs-out"
        ) from error
    return folder / time.strftime("rankscope-%Y%m%d-%H%M%S")


_JOB_ID_VARIABLES = (
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID"),
    *("AWS_BATCH_JOB_ID", "KUBEFLOW_TRAINING_JOB_ID", "RAY_JOB_ID", "JOB_ID"),
)
"""Variables of schedulers; Grid Engine's JOB_ID is last, for its name is not specific."""
_DEAD_S = 30.0
"""A run is dead after this time without a relay's state: relays write one a second."""
_POLL_S = 0.1
_CLAIM_PREFIX = ".claim-"
_TRIES = 1000


def named_out(out: Path, run_id: str) -> Path:
    """Return a trace folder's name with the scheduler's job id, else `run_id`, in place of `%j`."""
    job = next((os.environ[n] for n in _JOB_ID_VARIABLES if os.environ.get(n)), run_id)
    return Path(str(out).replace("%j", re.sub(r"[^\w.\[\]-]", "_", job)))


def take_out(
    out: Path, run_id: str, *, maker: str, is_shared: bool = False
) -> tuple[Path, list[Path]]:
    """Take the trace folder of a run, or raise FolderError: `out`, or where that is taken the next
    free sibling. Return it, and what was made now, the innermost first: nothing where another host
    chose.

    `maker` is the process (`run.processes`) that lives as long as this host may start ranks; ""
    where nobody else will look for the folder, which stays empty then. `is_shared`: every host of
    the run takes a folder; the first one chooses, the others take that with the run's youngest
    mark.
    """
    text = f"{socket.gethostname()} {maker}"
    for number in range(_TRIES):
        path = free_out(out, is_shared=is_shared)
        # asked afterwards: a sibling that another host has claimed by now is not passed over
        chosen = _chosen_before(out, run_id) if is_shared else None
        if chosen is not None:
            return prepare_out(chosen, is_shared=True), []
        new_folders = missing_folders(path)
        try:
            prepare_out(path, is_shared=is_shared)
            if not maker:
                return path, new_folders
            if _claim(path, f"{names.RUN_MARK_PREFIX}{run_id}", text):
                return path, [path / names.REPLICA_FOLDER, *new_folders]
        except FolderError:  # another job may have been quicker by the blink of an eye
            remove_empty(new_folders)
            if number > 1 and _is_free(path, is_shared=is_shared):
                raise
        except OSError as error:
            remove_empty(new_folders)
            raise FolderError(
                f"{path} cannot be written ({error.strerror}): see --rs-out"
            ) from error
    raise FolderError(f"{out}: other jobs took its siblings meanwhile; give another --rs-out")


def _names(path: Path) -> set[str]:
    """Return what is in a folder, but for claims that are being made."""
    return {name for name in os.listdir(path) if not name.startswith(_CLAIM_PREFIX)}


def _is_free(path: Path, *, is_shared: bool) -> bool:
    """True for a folder that is not there, or empty, or where a collector waits for all hosts."""
    try:
        entries, replicas = _names(path), path / names.REPLICA_FOLDER
        if is_shared and names.COLLECTOR_LOCK_NAME in entries and entries <= names.OF_A_COLLECTOR:
            return not replicas.is_dir() or not _names(replicas)
    except OSError:
        return True  # whoever takes it says what is wrong
    return not entries


def free_out(out: Path, *, is_shared: bool = False) -> Path:
    """Return the folder that a run would take; `is_shared` as of `take_out`."""
    if not out.name:
        raise FolderError(f"{out}: is not a name for a trace folder; give another with --rs-out")
    if _is_free(out, is_shared=is_shared):
        return out
    siblings = (out.with_name(f"{out.name}-{number}") for number in itertools.count(2))
    return next(
        path for path in siblings if not os.path.lexists(path) or (is_shared and _is_begun(path))
    )


def _is_begun(path: Path) -> bool:
    """True for a folder of this user without a claim: of two hosts that make one, one gets it."""
    try:
        return path.lstat().st_uid == os.geteuid() and not _names(path)
    except OSError:
        return False


def _claim(path: Path, mark: str, text: str) -> bool:
    """Leave a run's mark in a folder, or raise OSError; False where another run was quicker."""
    draft = Path(tempfile.mkdtemp(prefix=_CLAIM_PREFIX, dir=path))  # 0700
    try:
        (draft / mark).write_text(text)
        draft.rename(path / names.REPLICA_FOLDER)  # refused unless that is missing or empty
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # relays wait for room
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _chosen_before(out: Path, run_id: str) -> Path | None:
    """Return the folder that this run has taken already, by its youngest mark; None for none.

    A run that died may have had the same name. A mark of this host counts while the process that
    left it lives, one of another host once a relay is seen to write its state beside it."""
    family = re.compile(rf"{re.escape(out.name)}(-\d+)?")
    mark = Path(names.REPLICA_FOLDER, f"{names.RUN_MARK_PREFIX}{run_id}")
    states: dict[Path, list[str]] = {}
    deadline = time.monotonic() + _DEAD_S
    while True:
        try:
            if not out.parent.exists():
                return None
            marks = [out.with_name(n) / mark for n in os.listdir(out.parent) if family.fullmatch(n)]
            marks = [path for path in marks if path.exists()]
            marks = [path for path in marks if not (path.parents[1] / names.TRACE_NAME).exists()]
            if not marks:
                return None
            latest = max(marks, key=lambda path: path.stat().st_mtime)
            host, _, maker = latest.read_text().partition(" ")
            if host == socket.gethostname():
                return latest.parents[1] if is_process_alive(maker) else None
            states_there = sorted(latest.parent.glob(f"{names.HOST_STATE_PREFIX}*.json"))
            written = [path.read_text() for path in states_there]
        except OSError:  # of a folder that goes just now, or of one that says so when it is taken
            latest, written = mark, []
        # only a living relay changes its state: two readings that differ prove the run alive
        if states.setdefault(latest, written) != written:
            return latest.parents[1]
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)


def is_visible(out: Path, run_id: str) -> bool:
    """True where this host sees the head's folder itself, not one of its own of that name."""
    replicas = out / names.REPLICA_FOLDER
    try:
        is_writable = os.access(replicas, os.W_OK | os.X_OK)
        return is_writable and (replicas / f"{names.RUN_MARK_PREFIX}{run_id}").exists()
    except OSError:
        return False


def prepare_out(path: Path, option: str = "--rs-out", *, is_shared: bool = False) -> Path:
    """Make a trace folder (0700, with its parents), or take an empty one, or with `is_shared` one
    in which others of the run have begun. Raises FolderError, which names `option`, for another
    folder."""
    try:
        is_new = not path.exists()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _names(path) <= (names.OF_A_COLLECTOR if is_shared else frozenset()):
            raise FolderError(f"{path} is not empty: give a new folder with {option}, or remove it")
        if not is_new:
            check_folder_found(path, option)
    except FileExistsError:
        raise FolderError(
            f"{path} is a file, not a folder: give another name with {option}"
        ) from None
    except OSError as error:
        raise FolderError(
            f"{path} cannot be made or read ({error.strerror}): "
            f"give a folder you may write with {option}"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{path} cannot be written: give a folder you may write with {option}")
    return path


def missing_folders(path: Path) -> list[Path]:
    """Return which of a folder and its parents do not exist yet, the innermost first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def command_text(command: str, *places: str | Path, out: str | Path | None = None) -> str:
    """Return a command that reads these folders as a shell takes it; `out` follows `--out`."""
    words = ["rankscope", command, *places, *(["--out", out] if out is not None else [])]
    return shlex.join(map(str, words))


def recover_command(*places: str | Path, out: str | Path) -> str:
    """Return the command that builds a trace, beside `out`, of the records in these folders."""
    return command_text("recover", *places, out=f"{out}-recovered")


QUIET = "nothing happened, so there is no trace"


def announcement(
    out: Path, typed_out: str | None = None, *, is_complete: bool = True, remark: str = ""
) -> str:
    """Return the line that reports a finished trace, the same wherever it is printed; `typed_out`
    is the folder as typed in a command here; `is_complete`: all records of all ranks exist, and
    every rank ended in order; `remark`: text in front of that."""
    typed_out = typed_out or str(out)
    if remark:
        return f"{remark}; what there is lies in {out}: {command_text('verify', typed_out)}"
    if is_complete:
        return f"trace in {out}; read it: {command_text('show', typed_out)}"
    return f"trace in {out}, incomplete: {command_text('verify', typed_out)}"


@dataclass(frozen=True, slots=True)
class Collection:
    """How the records of a run are collected: one of three ways."""

    address: str
    """"" for a job on this host alone; `SHARED` where every host writes into the trace folder
    itself; else the address of a collector that was started separately, with a trace folder of
    its own."""

    @classmethod
    def of_setting(cls, setting: str, *, is_one_host: bool = True) -> Collection:
        """Return what the setting `collector` asks for; "" means whatever all hosts can reach."""
        return cls(setting or ("" if is_one_host else SHARED))

    @classmethod
    def of_run(cls, header: RunHeader) -> Collection:
        """Return the collection that `run.json` names."""
        return cls(header.collector)

    def check(self, keys: Path | None) -> CurveKeys | None:
        """Check, before anything is made, that records may be sent there; return the keys for that.
        Raises BindError for the address, KeysError for the keys."""
        if keys is not None and not is_tcp(self.address):
            raise KeysError(
                f"{keys}: keys are those of a collector on TCP, and none is named",
                "name it with --rs-collector tcp://HOST:PORT, or leave out --rs-keys",
            )
        curve_keys = None if keys is None else read_keys(keys, is_collector=False)
        if self.is_elsewhere:
            check_address(self.address, has_keys=keys is not None)
        return curve_keys

    @property
    def is_shared(self) -> bool:
        """True where every host writes into the trace folder by itself."""
        return self.address == SHARED

    @property
    def is_elsewhere(self) -> bool:
        """True where the trace folder is the collector's affair, maybe on another host."""
        return self.address not in ("", SHARED)

    def announcement(self, out: Path, asked: Path | None = None) -> str:
        """Return the line that announces a run; `asked`: the folder that was asked for."""
        if self.is_elsewhere:
            return f"tracing to the collector at {self.address}"
        return f"{asked} is not empty: tracing into {out}" if asked else f"tracing into {out}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Requirements of a run on this host."""

    run_id: str
    key: str
    collection: Collection
    world_size: int
    local_ranks: int
    settings: Settings
    """Settings of the run; `out` may contain `%j`, or be None for a folder of a new name."""
    max_restarts: int = 0
    agent: str = ""
    collects: int = 0
    keeps_apart: bool = False
    """These four stand in `run.json` as they are (`RunHeader`)."""
    is_joined: bool = False
    """The trace folder exists: the run's head host made it."""
    has_relay: bool = True
    """False for one process that reads its own spool, so that nobody would read `run.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run as it was prepared on this host."""

    out: Path
    run_folder: Path
    collection: Collection
    announcement: str
    new_folders: Sequence[Path]
    undo: ExitStack

    def remove(self) -> None:
        """Remove the run folder with all in it, and what else was made and is empty."""
        shutil.rmtree(self.run_folder, ignore_errors=True)
        self.undo.close()


def _remove_made(new_folders: Sequence[Path]) -> None:
    if new_folders and new_folders[0].name == REPLICA_FOLDER:
        shutil.rmtree(new_folders[0], ignore_errors=True)
    remove_empty(new_folders)


def prepare_run(
    request: RunRequest, announce: Callable[[Path, str], object] = lambda out, line: None
) -> PreparedRun:
    """Make the trace folder and the run folder of a run; start nothing. `announce` is called with
    the trace folder once it is usable, before `run.json` admits other ranks. Raises FolderError or
    SpoolError if a folder is unusable or a disk full, and then leaves nothing behind."""
    with ExitStack() as undo:
        collection, settings = request.collection, request.settings
        base = spool_base(settings.spool)
        # the others need no room; which of them this host has is not known, so all of its ranks
        traced_ranks = settings.traced_of(request.world_size)
        local_ranks = min(request.local_ranks, traced_ranks)
        check_free_space(base, settings.spool_bytes * local_ranks)
        asked = out = named_out(settings.out or default_out(), request.run_id)
        is_of_all = collection.is_shared and not request.keeps_apart
        if settings.tensors and settings.tensor_budget is not None:
            place = base if collection.is_elsewhere else out
            ranks = traced_ranks if is_of_all else local_ranks
            share = f"{settings.tensor_budget >> 20} MiB of full tensors each"
            check_free_space(
                place,
                settings.tensor_budget * ranks,
                f"{ranks} ranks may keep {share}",
                "give less with --rs-tensor-budget, or another disk with --rs-out",
            )
        undo.callback(remove_empty, missing_folders(base / request.key))
        run_folder = host_run_folder(base, request.key)
        new_folders: Sequence[Path] = ()
        if not (collection.is_elsewhere or request.is_joined):
            maker = request.agent or process_name(os.getpid()) if request.has_relay else ""
            out, new_folders = take_out(asked, request.run_id, maker=maker, is_shared=is_of_all)
            undo.callback(_remove_made, new_folders)
            settings = replace(settings, out=out)
        announcement = collection.announcement(out, None if out == asked else asked)
        if settings.steps.last:
            announcement += ", once something happens"
        announce(out, announcement)
        if request.has_relay:
            header = RunHeader(
                run_id=request.run_id,
                out=out,
                collector=collection.address,
                world_size=request.world_size,
                settings=settings.as_text(),
                max_restarts=request.max_restarts,
                agent=request.agent,
                collects=request.collects,
                keeps_apart=request.keeps_apart,
            )
            write_run_header(run_folder, header)
        return PreparedRun(
            out=out,
            run_folder=run_folder,
            collection=collection,
            announcement=announcement,
            new_folders=new_folders,
            undo=undo.pop_all(),
        )
