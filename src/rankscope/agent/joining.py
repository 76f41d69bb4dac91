"""Joining the run: which run folder, which trace folder, who starts relay and collector,
who waits.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # lazy

import rankscope
from rankscope.agent.guard import say
from rankscope.agent.identity import identify, placed, restarts_left
from rankscope.agent.keeping import keeper_of_run, make_recorder
from rankscope.agent.meeting import (
    Meeting,
    agree,
    agree_on_life,
    find_agents_store,
    find_store,
    is_visible,
    leave_mark,
    lookup,
    publish,
)
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import Opened
from rankscope.agent.settings import Settings
from rankscope.capture.kernel import build as build_kernel
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.run import EndReason, RankIdentity, StreamId
from rankscope.spool.cells import FORMAT_VERSION
from rankscope.spool.companions import (
    collector_command,
    ipc_address,
    relay_command,
    start_daemon,
)
from rankscope.spool.folder import (
    COLLECTOR_LOCK_NAME,
    MEETING_NAME,
    MUSTER_LOCK_NAME,
    RELAY_LOCK_NAME,
    RELAY_LOG_NAME,
    SHARED,
    FolderLock,
    RunHeader,
    check_free_space,
    host_run_folder,
    is_held,
    read_run_header,
    remove_run_folder,
    run_key,
    spool_base,
    stream_folder,
    streams,
    write_run_header,
)
from rankscope.spool.lock import is_alive
from rankscope.spool.outfolder import (
    COLLECTOR_LOG_NAME,
    announced,
    check_budget,
    claim_out,
    default_out,
    prepare_out,
    typed,
)
from rankscope.spool.processes import launcher_of, process_name, started_at
from rankscope.spool.writer import SpoolWriter

__all__ = ["RUN_FOLDER_VARIABLE", "Joined", "define_rank", "join_run", "who_am_i"]

RUN_FOLDER_VARIABLE = "RANKSCOPE_RUN_FOLDER"
"""Set by a launcher that has prepared the run folder and started relay and collector itself."""
_ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
"""Variable of every rank that an elastic agent started."""
_MUSTER_S = 45.0
_POLL_S = 0.05
_ENVIRONMENT_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank that takes part in a run."""

    opened: Opened
    out: Path
    finish_seconds: float
    collector: str
    """Address of the collector that writes the tree elsewhere, empty where it is in `out`."""
    must_wait: bool
    """True on the one rank that speaks for the run, where no launcher waits for the tree."""

    def wait_for_tree(self, reason: EndReason) -> None:
        """Poll for `trace.json`, at most `finish_seconds`; the end record is committed by now.

        Where an elastic agent may start the ranks again nobody waits: whether it will is known once
        they are all gone. Nor after an exception: ranks that hang in a collective only learn of it
        when this process is gone.
        """
        if not self.must_wait:
            return
        if self.collector:
            say(f"records go to the collector at {self.collector}, which writes the tree")
            return
        if restarts_left() or (reason is EndReason.RAISED and self.opened.identity.world_size > 1):
            say(f"the trace follows in {self.out}; read it then: {typed('show', self.out)}")
            return
        deadline = time.monotonic() + self.finish_seconds
        while not (self.out / "trace.json").exists():
            if time.monotonic() > deadline:
                places = (self.opened.writer.folder.parent, self.out)
                say(
                    f"no tree in {self.out} after {self.finish_seconds:g} s; build it from the "
                    f"records: {typed('recover', *places, out=f'{self.out}-recovered')}"
                )
                return
            time.sleep(_POLL_S)
        say(announced(self.out))


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
    is_selected = settings.ranks is None or identity.rank in settings.ranks
    prepared = environ.get(RUN_FOLDER_VARIABLE)
    if not is_selected:
        if not prepared and identity.rank == 0 and settings.traced_of(identity.world_size):
            _muster(settings, identity, environ)  # the head's collector, for the ranks that are
        return None
    run_folder = Path(prepared) if prepared else _muster(settings, identity, environ)
    header = read_run_header(run_folder)
    earlier = [one for one in streams(run_folder) if one.rank == identity.rank]
    if any(is_alive(stream_folder(run_folder, one)) for one in earlier):
        return None  # a child that inherited RANK
    identity = replace(identity, incarnation=_life(identity, earlier, environ))
    while (folder := stream_folder(run_folder, identity.stream)).exists():
        identity = replace(identity, incarnation=identity.incarnation + 1)
    writer = SpoolWriter(folder, limit_bytes=settings.spool_bytes)
    recorder = make_recorder(writer, settings)
    define_rank(recorder, identity, header.run_id, settings)
    speaks = identity.rank == min(settings.ranks or (0,))
    return Joined(
        opened=Opened(
            identity=identity,
            writer=writer,
            recorder=recorder,
            meeting_place=_meeting_place(settings, identity, run_folder, header),
            keeper=keeper_of_run(settings, recorder, identity, run_folder, header),
            is_launched=bool(prepared),
        ),
        out=header.out,
        finish_seconds=settings.finish_seconds,
        collector="" if settings.collector == SHARED else settings.collector,
        must_wait=not prepared and speaks and not header.keeps_apart,
    )


def _life(identity: RankIdentity, earlier: Sequence[StreamId], environ: Mapping[str, str]) -> int:
    """Return the number of this life of the rank: on several hosts the one that they agree on.

    Where they cannot, it is what the agent of this host counts, or the next that has no records
    here: two programs one after the other, or a restart that another host began.
    """
    free = max((one.incarnation + 1 for one in earlier), default=0)
    if _ELASTIC_RUN in environ and identity.world_size > identity.local_world_size:
        store = find_agents_store(environ)
        if store is not None:
            agreed = agree_on_life(store, at_least=free, started_at=started_at())
            if agreed is not None:
                return agreed
    return max(identity.incarnation, free)


def _meeting_place(
    settings: Settings, identity: RankIdentity, run_folder: Path, header: RunHeader
) -> Path | None:
    """Return the folder in which the traced ranks agree on a step: all of them see it."""
    if settings.traced_of(identity.world_size) == 1:
        return None
    seen_by_all = header.out / "spool" if header.collector == SHARED else run_folder
    return seen_by_all / f"{MEETING_NAME}.{identity.incarnation}"


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
    store = find_store(environ) if identity.world_size > 1 else None
    key = run_key(_run_name(identity, environ, store))
    run_folder, lock = _wait_for_lock(base, key)
    try:
        if not (run_folder / "run.json").exists():
            build_kernel()
            check_free_space(run_folder, settings.spool_bytes * identity.local_world_size)
            is_elsewhere = settings.collector not in {"", SHARED}
            check_budget(
                run_folder if is_elsewhere else settings.out or Path.cwd(),
                settings.tensor_budget if settings.tensors else None,
                ranks=identity.local_world_size,
            )  # fmt: skip
            header = _decide(settings, identity, run_folder, environ, store)
            write_run_header(run_folder, header)
        _ensure_companions(settings, run_folder, read_run_header(run_folder))
    finally:
        if (run_folder / "run.json").exists():
            lock.release()
        else:  # refused: nothing of it stays
            lock.remove()
            remove_run_folder(run_folder)
    return run_folder


def _wait_for_lock(base: Path, key: str) -> tuple[Path, FolderLock]:
    deadline = time.monotonic() + _MUSTER_S
    while True:
        run_folder = host_run_folder(base, key)
        try:
            return run_folder, FolderLock(run_folder / MUSTER_LOCK_NAME, "rank that is starting")
        except (FolderBusyError, SpoolError) as error:
            is_gone = not run_folder.exists()  # with the rank before this one, which was refused
            if not (is_gone or isinstance(error, FolderBusyError)) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _run_name(identity: RankIdentity, environ: Mapping[str, str], store: Store | None) -> str:
    """Return what all ranks of this launch on this host share and no other launch does."""
    if identity.world_size == 1 and not restarts_left(environ) and not identity.incarnation:
        return f"{identity.host}:{identity.pid}:{time.time_ns()}"
    if _ELASTIC_RUN in environ:  # an elastic agent may choose another port for the next life
        return f"{environ[_ELASTIC_RUN]}:{_launcher(identity, environ)}"
    at = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    name = ":".join([*(environ.get(name, "") for name in at), _launcher(identity, environ)])
    if store is None:
        return name
    # ranks that no launcher placed (one started the other, or somebody by hand) agree in the store
    own = name if _is_placed(identity, environ) else f"{name}:{uuid.uuid4().hex}"
    return agree(store, f"run on {identity.host}", own)


def _launcher(identity: RankIdentity, environ: Mapping[str, str]) -> str:
    """Name the process that started the ranks of this host."""
    found = placed(environ)
    if found is None or found.rank != identity.rank:
        return process_name(os.getppid())
    return process_name(launcher_of(found.variables))


def _is_placed(identity: RankIdentity, environ: Mapping[str, str]) -> bool:
    """True where a launcher's variables say where on its host this rank stands."""
    found = placed(environ)
    return (
        found is not None
        and (found.rank, found.world_size) == (identity.rank, identity.world_size)
        and found.local_rank is not None
        and found.local_world_size is not None
    )


def _decide(
    settings: Settings,
    identity: RankIdentity,
    run_folder: Path,
    environ: Mapping[str, str],
    store: Store | None,
) -> RunHeader:
    """Choose the trace folder and how records travel; on several hosts the head's word counts.

    The head is the host of rank 0 under an elastic agent, which counts the ranks of a host in a
    row; else the host that asks first.
    """
    is_alone = identity.local_world_size >= identity.world_size and (
        identity.world_size == 1 or _is_placed(identity, environ)
    )
    is_head = identity.rank == identity.local_rank
    if is_alone:
        store = None
    elif store is not None and _ELASTIC_RUN not in environ:
        own = f"{identity.host}/{run_folder.name}"
        is_head = agree(store, "head", own) == own
    if is_head or store is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_folder.name[:8]}"
        address = settings.collector or (ipc_address(run_folder) if is_alone else SHARED)
        out = _own_out(settings, address, run_id)
        if store is not None:
            publish(store, Meeting(run_id=run_id, out=str(out), host=identity.host))
        collects = settings.traced_of(identity.world_size)
        return _header(
            settings, identity, environ, run_id=run_id, out=out, address=address,
            collects=0 if settings.collector not in {"", SHARED} else collects,
        )  # fmt: skip
    meeting = lookup(store)
    if meeting is None:
        raise SpoolError(
            "the head host did not publish its trace folder within 30 s: "
            "is RANKSCOPE set on every host?"
        )
    out, run_id = Path(meeting.out), meeting.run_id
    if settings.collector not in {"", SHARED} or is_visible(out, run_id):
        return _header(
            settings, identity, environ, run_id=run_id, out=out,
            address=settings.collector or SHARED,
        )  # fmt: skip
    out = prepare_out(out.with_name(f"{out.name}-{identity.host}-{run_folder.name[:8]}"))
    say(
        f"the trace folder of {meeting.host} is not visible here: the records of this host go to "
        f"{out}; merge them afterwards: {typed('recover', meeting.out, out, out='MERGED')}"
    )
    first = identity.rank - identity.local_rank
    here = range(first, first + identity.local_world_size)
    return _header(
        settings, identity, environ, run_id=run_id, out=out, address=SHARED, keeps_apart=True,
        collects=len(here) if settings.ranks is None else len({*here} & {*settings.ranks}),
    )  # fmt: skip


def _own_out(settings: Settings, address: str, run_id: str) -> Path:
    """Make the trace folder of a run that begins here, unless the collector has its own."""
    out = settings.out or default_out()
    if settings.collector not in {"", SHARED}:
        say(f"tracing to the collector at {address}")
        return out
    if address == SHARED:
        leave_mark(claim_out(out), run_id)
    else:
        prepare_out(out)
    say(f"tracing into {out}")
    return out


def _header(
    settings: Settings,
    identity: RankIdentity,
    environ: Mapping[str, str],
    *,
    run_id: str,
    out: Path,
    address: str,
    collects: int = 0,
    keeps_apart: bool = False,
) -> RunHeader:
    return RunHeader(
        run_id=run_id,
        out=out,
        collector=address,
        world_size=identity.world_size,
        settings=settings.as_text(),
        max_restarts=identity.incarnation + restarts_left(environ),
        agent=_launcher(identity, environ) if restarts_left(environ) else "",
        collects=collects,
        keeps_apart=keeps_apart,
    )


def _ensure_companions(settings: Settings, run_folder: Path, header: RunHeader) -> None:
    """Start the relay of this host, and the collector if it is this host's, where none is there."""
    if not is_held(run_folder / RELAY_LOCK_NAME):
        start_daemon(relay_command(run_folder), run_folder / RELAY_LOG_NAME, run_folder)
    if not header.collects or is_held(header.out / COLLECTOR_LOCK_NAME):
        return
    command = collector_command(
        header.out,
        bind=[] if header.collector == SHARED else [header.collector],
        world_size=header.world_size,
        traced_ranks=header.collects,
        keep_spool=settings.keep_spool or header.keeps_apart,
        drain_seconds=settings.drain_seconds,
        finish_seconds=settings.finish_seconds,
    )
    start_daemon(command, header.out / COLLECTOR_LOG_NAME, run_folder)
