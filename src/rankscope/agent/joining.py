"""Joining the run: which run folder, which trace folder, who starts the relay and the collector, who waits."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import rankscope
from rankscope.agent.guard import say
from rankscope.agent.identity import identify
from rankscope.agent.meeting import Meeting, find_store, lookup, publish
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import Opened
from rankscope.agent.settings import Settings
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.run import RankIdentity
from rankscope.spool.cells import FORMAT_VERSION
from rankscope.spool.companions import (
    collector_command,
    ipc_address,
    relay_command,
    start_daemon,
)
from rankscope.spool.folder import (
    RELAY_LOCK_NAME,
    RELAY_LOG_NAME,
    SHARED,
    FolderLock,
    RunHeader,
    check_free_space,
    host_run_folder,
    read_run_header,
    run_key,
    spool_base,
    stream_folder,
    write_run_header,
)
from rankscope.spool.lock import is_alive
from rankscope.spool.outfolder import default_out, prepare_out
from rankscope.spool.writer import SpoolWriter

__all__ = ["RUN_FOLDER_VARIABLE", "Joined", "define_rank", "join_run", "who_am_i"]

RUN_FOLDER_VARIABLE = "RANKSCOPE_RUN_FOLDER"
"""Set by a launcher that has prepared the run folder and started relay and collector itself."""
_MUSTER_S = 45.0
_POLL_S = 0.05
_ENVIRONMENT_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank that takes part in a run."""

    opened: Opened
    out: Path
    finish_seconds: float
    must_wait: bool
    """True on rank 0 where no launcher waits for the tree."""

    def wait_for_tree(self) -> None:
        """Poll for `trace.json`, at most `finish_seconds`; the end record is committed by now."""
        if not self.must_wait:
            return
        deadline = time.monotonic() + self.finish_seconds
        while not (self.out / "trace.json").exists():
            if time.monotonic() > deadline:
                say(
                    f"the tree is not there after {self.finish_seconds:g} s; build it with: rankscope recover {self.out}"
                )
                return
            time.sleep(_POLL_S)
        say(f"trace in {self.out}: rankscope show {self.out}")


def who_am_i() -> RankIdentity:
    """Return who this process is; the process group wins once it exists."""
    group = None
    if dist.is_available() and dist.is_initialized():
        group = (dist.get_rank(), dist.get_world_size())
    return identify(group)


def join_run(settings: Settings, environ: Mapping[str, str] = os.environ) -> Joined | None:
    """Open this rank's spool in the run it belongs to.

    Returns:
        None where this process is not to be traced: its rank is not selected, or a parent process
        traces under the same rank.

    Raises:
        RankscopeError: the spool or the trace folder cannot be used.
    """
    identity = who_am_i()
    if settings.ranks is not None and identity.rank not in settings.ranks:
        return None
    prepared = environ.get(RUN_FOLDER_VARIABLE)
    run_folder = Path(prepared) if prepared else _muster(settings, identity, environ)
    header = read_run_header(run_folder)
    folder = stream_folder(run_folder, identity.stream)
    if folder.exists() and is_alive(folder):
        return None  # a child that inherited RANK
    writer = SpoolWriter(folder, limit_bytes=settings.spool_bytes)
    recorder = Recorder(writer)
    define_rank(recorder, identity, header.run_id, settings)
    return Joined(
        opened=Opened(identity=identity, writer=writer, recorder=recorder),
        out=header.out,
        finish_seconds=settings.finish_seconds,
        must_wait=not prepared and identity.rank == 0,
    )


def define_rank(
    recorder: Recorder, identity: RankIdentity, run_id: str, settings: Settings
) -> None:
    """Write the first record of a stream: who, where, with what."""
    recorder.define(
        "rank",
        format=FORMAT_VERSION,
        run_id=run_id,
        rank=identity.rank,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        local_world_size=identity.local_world_size,
        incarnation=identity.incarnation,
        host=identity.host,
        pid=identity.pid,
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        versions={
            "rankscope": rankscope.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        argv=[text[:500] for text in sys.argv[:50]],
        settings=settings.as_text(),
        environment={name: os.environ[name] for name in _ENVIRONMENT_SHOWN if name in os.environ},
    )


def _muster(settings: Settings, identity: RankIdentity, environ: Mapping[str, str]) -> Path:
    """Find the run folder of this host; the first rank there decides, and starts the companions."""
    base = spool_base(settings.spool)
    run_folder = host_run_folder(base, run_key(_run_name(identity, environ)))
    lock = _wait_for_lock(run_folder / "muster.lock")
    try:
        if not (run_folder / "run.json").exists():
            check_free_space(run_folder, settings.spool_bytes * identity.local_world_size)
            write_run_header(run_folder, _decide(settings, identity, run_folder, environ))
        _ensure_companions(settings, identity, run_folder, read_run_header(run_folder))
    finally:
        lock.release()
    return run_folder


def _wait_for_lock(path: Path) -> FolderLock:
    deadline = time.monotonic() + _MUSTER_S
    while True:
        try:
            return FolderLock(path, "rank that is starting")
        except FolderBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _run_name(identity: RankIdentity, environ: Mapping[str, str]) -> str:
    """Return what all ranks of this launch on this host share and no other launch does."""
    if identity.world_size == 1:
        return f"{identity.host}:{identity.pid}:{time.time_ns()}"
    parent = os.getppid()
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return ":".join([*(environ.get(name, "") for name in names), str(parent), _start_time(parent)])


def _start_time(pid: int) -> str:
    """Return when a process started, so that a process id used again is another run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _decide(
    settings: Settings, identity: RankIdentity, run_folder: Path, environ: Mapping[str, str]
) -> RunHeader:
    """Choose the trace folder and how records travel; on several hosts the head's word counts."""
    is_head = identity.rank == identity.local_rank
    is_alone = identity.local_world_size >= identity.world_size
    store = None if is_alone else find_store(environ)
    if is_head or store is None:
        out = prepare_out(settings.out or default_out())
        say(f"tracing into {out}")
        address = settings.collector or ipc_address(run_folder)
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_folder.name[:8]}"
        if store is not None:
            publish(
                store,
                Meeting(run_id=run_id, out=str(out), host=socket.gethostname(), address=address),
            )
        if not is_alone and not settings.collector:
            address = SHARED
            (out / "spool").mkdir(mode=0o700, exist_ok=True)
        return RunHeader(
            run_id=run_id,
            out=out,
            collector=address,
            world_size=identity.world_size,
            settings=settings.as_text(),
        )
    meeting = lookup(store)
    if meeting is None:
        raise SpoolError(
            "the head host did not publish its trace folder within 30 s: is RANKSCOPE set on every host?"
        )
    out = Path(meeting.out)
    if not (out / "spool").is_dir():
        out = prepare_out(out.with_name(f"{out.name}-{identity.host}"))
        say(
            f"the head's trace folder is not visible here; this host keeps its records in {out}: merge with rankscope recover"
        )
    return RunHeader(
        run_id=meeting.run_id, out=out, collector=settings.collector or SHARED, world_size=identity.world_size,
        settings=settings.as_text(),
    )  # fmt: skip


def _ensure_companions(
    settings: Settings, identity: RankIdentity, run_folder: Path, header: RunHeader
) -> None:
    """Start the relay of this host, and on the head host the collector, where none is at work."""
    if not _is_held(run_folder / RELAY_LOCK_NAME):
        start_daemon(relay_command(run_folder), run_folder / RELAY_LOG_NAME)
    if (
        identity.rank != identity.local_rank
        or settings.collector
        or _is_held(header.out / "collector.lock")
    ):
        return
    command = collector_command(
        header.out,
        bind=[] if header.collector == SHARED else [header.collector],
        world_size=header.world_size,
        keep_spool=settings.keep_spool,
        drain_seconds=settings.drain_seconds,
        finish_seconds=settings.finish_seconds,
    )
    start_daemon(command, run_folder / "collector.log")


def _is_held(path: Path) -> bool:
    try:
        FolderLock(path, "process").release()
    except FolderBusyError:
        return True
    return False
