"""Where the ranks of a host meet: the first that starts decides which run folder and which trace
folder, and starts relay and collector.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # lazy

from rankscope.agent.guard import say
from rankscope.agent.identity import placed, restarts_left
from rankscope.agent.rendezvous import (
    Rendezvous,
    agree,
    find_store,
    is_visible,
    leave_mark,
    lookup,
    publish,
)
from rankscope.capture.kernel import build as build_kernel
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.streams import RankIdentity
from rankscope.run.companions import (
    collector_command,
    ipc_address,
    relay_command,
    start_daemon,
)
from rankscope.run.folders import (
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
    write_run_header,
)
from rankscope.run.names import (
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    RELAY_LOCK_NAME,
    RELAY_LOG_NAME,
    RUN_NAME,
    START_LOCK_NAME,
)
from rankscope.run.out import (
    check_budget,
    claim_out,
    default_out,
    missing_folders,
    prepare_out,
    remove_empty,
    typed,
)
from rankscope.run.processes import launcher_of, process_name
from rankscope.settings import Settings

__all__ = ["ELASTIC_RUN", "muster"]

ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
"""Variable of every rank that an elastic agent started."""
_MUSTER_S = 45.0
_POLL_S = 0.05

_begun: Counter[str] = Counter()
"""Traces that this process has begun, by folder."""


def muster(settings: Settings, identity: RankIdentity, environ: Mapping[str, str]) -> Path:
    """Find the run folder of this host; the first rank there decides, and starts the companions."""
    base = spool_base(settings.spool)
    store = find_store(environ) if identity.world_size > 1 else None
    key = run_key(f"{_run_name(identity, environ, store)}{_which_trace(settings)}")
    above = missing_folders(base.parent)
    run_folder, lock = _wait_for_lock(base, key)
    try:
        if not (run_folder / RUN_NAME).exists():
            build_kernel()
            check_free_space(run_folder, settings.spool_bytes * identity.local_world_size)
            is_elsewhere = settings.collector not in {"", SHARED}
            check_budget(
                run_folder if is_elsewhere else settings.out or Path.cwd(),
                settings.tensor_budget if settings.tensors else None,
                ranks=identity.local_world_size,
            )  # fmt: skip
            with ExitStack() as made:  # undone where anything in here fails
                header = _decide(settings, identity, run_folder, environ, store, made)
                write_run_header(run_folder, header)
                made.pop_all()
        _ensure_companions(settings, run_folder, read_run_header(run_folder))
    finally:
        if (run_folder / RUN_NAME).exists():
            lock.release()
        else:  # refused: nothing of it stays
            lock.remove()
            remove_run_folder(run_folder)
            remove_empty(above)
    return run_folder


def _which_trace(settings: Settings) -> str:
    """Return what tells this trace from others of the same launch.

    A rank may leave one block and enter the next while another rank still finishes the first: by
    the launch alone it would join the trace that is ending. Ranks agree by counting, per trace
    folder, the traces that each of them has begun.
    """
    out = "" if settings.out is None else str(settings.out)
    begun = _begun[out]
    _begun[out] += 1
    return f":{out}:{begun}" if out or begun else ""


def _wait_for_lock(base: Path, key: str) -> tuple[Path, FolderLock]:
    deadline = time.monotonic() + _MUSTER_S
    while True:
        run_folder = host_run_folder(base, key)
        try:
            return run_folder, FolderLock(run_folder / START_LOCK_NAME, "rank that is starting")
        except (FolderBusyError, SpoolError) as error:
            is_gone = not run_folder.exists()  # with the rank before this one, which was refused
            if not (is_gone or isinstance(error, FolderBusyError)) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _run_name(identity: RankIdentity, environ: Mapping[str, str], store: Store | None) -> str:
    """Return what all ranks of this launch on this host share and no other launch does."""
    if identity.world_size == 1 and not restarts_left(environ) and not identity.incarnation:
        return f"{identity.host}:{identity.pid}:{time.time_ns()}"
    if ELASTIC_RUN in environ:  # an elastic agent may choose another port for the next life
        return f"{environ[ELASTIC_RUN]}:{_launcher(identity, environ)}"
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
    made: ExitStack,
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
    elif store is not None and ELASTIC_RUN not in environ:
        own = f"{identity.host}/{run_folder.name}"
        is_head = agree(store, "head", own) == own
    if is_head or store is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_folder.name[:8]}"
        address = settings.collector or (ipc_address(run_folder) if is_alone else SHARED)
        out = _own_out(settings, address, run_id, made)
        if store is not None:
            publish(store, Rendezvous(run_id=run_id, out=str(out), host=identity.host))
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


def _own_out(settings: Settings, address: str, run_id: str, made: ExitStack) -> Path:
    """Make the trace folder of a run that begins here, unless the collector has its own."""
    out = settings.out or default_out()
    if settings.collector not in {"", SHARED}:
        say(f"tracing to the collector at {address}")
        return out
    made.callback(remove_empty, missing_folders(out))
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
