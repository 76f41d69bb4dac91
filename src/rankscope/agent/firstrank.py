"""The first rank that starts on a host without a launcher of ours prepares the run there: the hosts
agree on one trace folder through the job's store, and the rank starts the host's companion.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # lazy

from rankscope.agent.guard import say
from rankscope.agent.identity import launcher_place, restarts_left
from rankscope.capture.device.fusedcache import compilers_of_host
from rankscope.capture.kernel import prepare as prepare_kernel
from rankscope.capture.torch_internals.distributed import default_store
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.ranks import RankIdentity
from rankscope.run.files import write_by_rename
from rankscope.run.folders import (
    COLLECTOR_LOG_NAME,
    COMPANION_LOCK_NAME,
    COMPANION_LOG_NAME,
    COMPANION_STARTED_NAME,
    RUN_NAME,
    SHARED,
    START_LOCK_NAME,
    FolderLock,
    RunHeader,
    host_run_folder,
    is_held,
    read_run_header,
    remove_run_folder,
    run_key,
    spool_base,
)
from rankscope.run.prepare import (
    Collection,
    RunRequest,
    command_text,
    is_visible,
    missing_folders,
    prepare_run,
    remove_empty,
)
from rankscope.run.processes import (
    companion_command,
    dataset_trouble,
    is_process_alive,
    launcher_of,
    metrics_trouble,
    process_name,
    start_daemon,
    start_extras,
)
from rankscope.settings import Settings

_PREFIX = "rankscope"
_KEY = "rendezvous"
_LIFE = "life"
_CONNECT = timedelta(seconds=10)
_WAIT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The head host's message to the other hosts."""

    run_id: str
    out: str
    host: str


def find_store() -> Store | None:
    """Return the job's store: the launching agent's, which every rank finds, else the group's."""
    store = find_agents_store()
    if store is None and dist.is_available() and dist.is_initialized():
        store = default_store()
    return store


def find_agents_store() -> Store | None:
    """Return the store of the launching elastic agents, which outlives the ranks; None without."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address and port.isdecimal():
        try:
            return TCPStore(address, int(port), is_master=False, timeout=_CONNECT)
        except (RuntimeError, ValueError):  # no store there: perhaps there is a process group
            pass
    return None


def agree(store: Store, key: str, value: str) -> str:
    """Return the first text put under this key. Raises SpoolError if the store does not answer."""
    return _compared(store, key, "", value) or value


def _compared(store: Store, key: str, expected: str, proposed: str) -> str:
    try:
        stored = PrefixStore(_PREFIX, store).compare_set(key, expected, proposed)
    except RuntimeError as error:
        raise SpoolError(f"the job's store does not answer, or cannot compare: {error}") from error
    return bytes(stored).decode()


def agree_on_life(store: Store, *, at_least: int, started_at: float) -> int:
    """Return the number of the life that all ranks of this round of the job have.

    Agents count restarts each for itself. But all ranks of a round are started before the first of
    them calls a module, and those of the next round after: a rank that finds a life which began
    before its own process (`started_at`, by the host's clock) begins the next. `at_least`: the
    first life of this rank without records on this host. Raises SpoolError without an answer.
    """
    # compare and set, until what stands there is a life that began after this process
    expected, proposed = "", f"{at_least} {time.time()!r}"
    while True:
        stored = _compared(store, _LIFE, expected, proposed)
        life, _, began_at = stored.partition(" ")
        if int(life) >= at_least and float(began_at) >= started_at:
            return int(life)
        expected, proposed = stored, f"{max(at_least, int(life) + 1)} {time.time()!r}"


def publish(store: Store, rendezvous: Rendezvous, which: str) -> None:
    """Tell every host of the job; `which` of its traces this is about."""
    PrefixStore(_PREFIX, store).set(_KEY + which, json.dumps(asdict(rendezvous)))


def lookup(store: Store, which: str) -> Rendezvous | None:
    """Return what the head host published, None where it does not within half a minute."""
    try:
        prefixed = PrefixStore(_PREFIX, store)
        prefixed.wait([_KEY + which], _WAIT)
        return Rendezvous(**json.loads(prefixed.get(_KEY + which)))
    except (RuntimeError, ValueError, TypeError):  # torch's timeouts are RuntimeErrors
        return None


ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
_SHARED_BY_HOSTS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    ELASTIC_RUN,
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
)
"""Variables by which hosts without a store know that they start one run."""
_START_S = 45.0
_POLL_S = 0.05

_begun_traces: Counter[str] = Counter()


def find_or_prepare_run(settings: Settings, identity: RankIdentity) -> Path:
    """Return the run folder of this host; the first rank to ask prepares it and its companion.
    Raises RankscopeError if the run cannot be prepared, or the preparing rank gets stuck."""
    base = spool_base(settings.spool)
    store = find_store() if identity.world_size > 1 else None
    which = _which_trace(settings)
    key = run_key(f"{_run_name(identity, store)}{which}")
    # noted before the lock makes them: a refused run leaves no folder behind
    above = missing_folders(base.parent)
    run_folder, lock = _wait_for_lock(base, key)
    try:
        if not (run_folder / RUN_NAME).exists():
            prepare_kernel(say)
            start_extras(compilers_of_host())  # without them torch operations take the digests
            _prepare(settings, identity, run_folder, store, which)
        # under the lock: two ranks that come at once would start two companions
        _ensure_companion(settings, run_folder, read_run_header(run_folder))
    finally:
        if (run_folder / RUN_NAME).exists():
            lock.release()
        else:  # refused: nothing of it stays
            lock.remove()
            remove_run_folder(run_folder)
            remove_empty(above)
    return run_folder


def _which_trace(settings: Settings) -> str:
    """Return a name for this trace among those of the same launch. A rank may enter the next block
    while another still finishes the first, whose trace it must not join. So each rank counts its
    traces per trace folder."""
    out = "" if settings.out is None else str(settings.out)
    begun = _begun_traces[out]
    _begun_traces[out] += 1
    return f":{out}:{begun}" if out or begun else ""


def _wait_for_lock(base: Path, key: str) -> tuple[Path, FolderLock]:
    deadline = time.monotonic() + _START_S
    while True:
        run_folder = host_run_folder(base, key)
        try:
            return run_folder, FolderLock(run_folder / START_LOCK_NAME, "rank that is starting")
        except (FolderBusyError, SpoolError) as error:
            is_gone = not run_folder.exists()  # with the rank before this one, which was refused
            if not (is_gone or isinstance(error, FolderBusyError)) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _run_name(identity: RankIdentity, store: Store | None) -> str:
    """Return what all ranks of this launch on this host share and no other launch does."""
    if identity.world_size == 1 and not restarts_left() and not identity.incarnation:
        # with the time: the system gives numbers of processes again, and a later process is another
        # launch
        return f"{identity.host}:{identity.pid}:{time.time_ns()}"
    if ELASTIC_RUN in os.environ:  # an elastic agent may choose another port for the next life
        return f"{os.environ[ELASTIC_RUN]}:{_launcher(identity)}"
    at = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    name = ":".join([*(os.environ.get(name, "") for name in at), _launcher(identity)])
    if store is None:
        return name
    # ranks that no launcher placed (one started the other, or somebody by hand) agree in the store
    proposal = name if _is_placed(identity) else f"{name}:{uuid.uuid4().hex}"
    return agree(store, f"run on {identity.host}", proposal)


def _starter(identity: RankIdentity) -> str:
    if identity.world_size == 1 and not restarts_left():
        return process_name(identity.pid)  # what started it may be a shell
    return _launcher(identity)


def _launcher(identity: RankIdentity) -> str:
    place = launcher_place()
    if place is None or place.rank != identity.rank:
        return process_name(os.getppid())
    return process_name(launcher_of(place.variables))


def _is_placed(identity: RankIdentity) -> bool:
    place = launcher_place()
    return (
        place is not None
        and (place.rank, place.world_size) == (identity.rank, identity.world_size)
        and place.local_rank is not None
        and place.local_world_size is not None
    )


def _prepare(
    settings: Settings, identity: RankIdentity, run_folder: Path, store: Store | None, which: str
) -> None:
    """Prepare the run; on several hosts the head chooses the trace folder for all. Under an elastic
    agent, which numbers the ranks of a host in a row, the head is rank 0's host; else the first
    host to ask."""
    is_alone = identity.local_world_size >= identity.world_size and (
        identity.world_size == 1 or _is_placed(identity)
    )
    is_head = identity.rank == identity.local_rank
    if is_alone:
        store = None
    elif store is not None and ELASTIC_RUN not in os.environ:
        proposal = f"{identity.host}/{run_folder.name}"
        is_head = agree(store, f"head{which}", proposal) == proposal
    collection = Collection.of_setting(settings.collector, is_one_host=is_alone)
    collection.check(settings.keys)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_folder.name[:8]}"
    if store is None and not is_alone:  # every host comes to this name by itself
        run_id = run_key(":".join(os.environ.get(name, "") for name in _SHARED_BY_HOSTS) + which)
    request = RunRequest(
        run_id=run_id,
        key=run_folder.name,
        collection=collection,
        world_size=identity.world_size,
        local_ranks=identity.local_world_size,
        settings=settings,
        max_restarts=identity.incarnation + restarts_left(),
        agent=_starter(identity),
        collects=0 if collection.is_elsewhere else settings.traced_of(identity.world_size),
    )
    if not (is_head or store is None):
        _prepare_beside_head(request, identity, settings, store, which)
        return

    def announce(out: Path, line: str) -> None:
        say(line)
        if store is not None:
            head = Rendezvous(run_id=run_id, out=str(out), host=identity.host)
            publish(store, head, which)

    prepare_run(request, announce)


def _prepare_beside_head(
    request: RunRequest, identity: RankIdentity, settings: Settings, store: Store, which: str
) -> None:
    """Prepare this host's part of a run that began on the head host."""
    head = lookup(store, which)
    if head is None:
        raise SpoolError(
            "the head host did not publish its trace folder within 30 s: "
            "is RANKSCOPE set on every host?"
        )
    out = Path(head.out)
    request = replace(
        request, run_id=head.run_id, settings=replace(settings, out=out), collects=0, is_joined=True
    )
    if request.collection.is_elsewhere or is_visible(out, head.run_id):
        prepare_run(request)
        return
    first = identity.rank - identity.local_rank
    local_ranks = range(first, first + identity.local_world_size)
    own_out = out.with_name(f"{out.name}-{identity.host}-{request.key[:8]}")
    request = replace(
        request,
        collection=Collection(SHARED),
        settings=replace(settings, out=own_out),
        is_joined=False,
        keeps_apart=True,
        collects=len({*local_ranks} & {*(settings.ranks or local_ranks)}),
    )

    def announce(folder: Path, line: str) -> None:
        merge = command_text("recover", head.out, folder, out="MERGED")
        say(
            f"the trace folder of {head.host} is not visible here: the records of this host go to "
            f"{folder}; merge them afterwards: {merge}"
        )

    prepare_run(request, announce)


def _ensure_companion(settings: Settings, run_folder: Path, header: RunHeader) -> None:
    if has_companion(run_folder):
        return
    if not header.collects:
        _start(run_folder, run_folder / COMPANION_LOG_NAME)
        return
    if settings.parquet and not header.keeps_apart and (trouble := dataset_trouble()):
        say(trouble)
    if settings.metrics is not None and (trouble := metrics_trouble(settings.metrics)):
        say(trouble)
    _start(run_folder, header.out / COLLECTOR_LOG_NAME)


def has_companion(run_folder: Path) -> bool:
    """True while the companion started last lives, or another process holds its lock. A companion
    takes the lock only after loading its modules. A second one, started meanwhile, may find the
    lock free again after the whole run."""
    with contextlib.suppress(OSError):
        if is_process_alive((run_folder / COMPANION_STARTED_NAME).read_text()):
            return True
    return is_held(run_folder / COMPANION_LOCK_NAME)


def restart_companion(run_folder: Path) -> bool:
    """Restart a companion that was killed; it continues from the records. False on failure."""
    try:
        _start(run_folder, read_run_header(run_folder).out / COLLECTOR_LOG_NAME)
    except SpoolError as error:
        say(str(error))
        return False
    return True


def _start(run_folder: Path, log: Path) -> None:
    name = start_daemon(companion_command(run_folder), log, run_folder)
    with contextlib.suppress(SpoolError):  # a full disk: the lock alone tells
        write_by_rename(run_folder / COMPANION_STARTED_NAME, name)
