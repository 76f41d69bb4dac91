"""The job as it is asked for (ranks, settings, trace folder, collector), and all it needs of this
host: the disk of the spools, the collector, the kernel."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.agent.identity import identify, launcher_place
from rankscope.capture.kernel import build as build_kernel
from rankscope.capture.kernel import is_off, why_none
from rankscope.companion.curve import handshake_trouble
from rankscope.doctor.condition import Condition
from rankscope.doctor.interpreter import interpreter_conditions
from rankscope.errors import KeysError, RankscopeError
from rankscope.record.ranks import MAX_RANKS
from rankscope.run.connection import is_tcp
from rankscope.run.files import mount_of
from rankscope.run.folders import (
    check_free_space,
    host_run_folder,
    remove_run_folder,
    run_key,
    spool_base,
)
from rankscope.run.prepare import (
    Collection,
    default_out,
    free_out,
    missing_folders,
    named_out,
    prepare_out,
    remove_empty,
)
from rankscope.settings import Settings, as_variables, is_enabled, misspelt_variables, settings_from

_CONNECT_S = 3.0
_SPOOL_NAMES = ("spool folder", "spool disk", "spool space")
_ON_SETTINGS = (*_SPOOL_NAMES, "trace folder", "collector")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is going to be run here."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """{field: text} of settings that are given; the rest comes from variables and defaults."""
    local_ranks: int | None = None
    """Ranks of this host; None for what a launcher's variables say, else 1."""
    hosts: int = 1
    python: tuple[str, ...] = (sys.executable,)


def examine(question: Question) -> Iterator[Condition]:
    """Yield every condition as soon as it is known."""
    yield from interpreter_conditions(question.python)
    yield from job_conditions(question)


def job_conditions(
    question: Question, environ: Mapping[str, str] = os.environ
) -> Iterator[Condition]:
    """Yield those that do not ask the ranks' interpreter."""
    found = launcher_place(environ)
    local_ranks = question.local_ranks or (found and found.local_world_size) or 1
    world_size = local_ranks * question.hosts
    if question.local_ranks is None and found is not None:
        world_size = max(world_size, found.world_size)
    yield _ranks(environ)
    yield _variables(environ)
    settings, condition = _read_settings(question.settings, world_size, environ)
    yield condition
    if settings is None:
        yield from (Condition.skipped(name, "settings") for name in _ON_SETTINGS)
    else:
        yield from spool_conditions(settings, min(local_ranks, settings.traced_of(world_size)))
        yield _trace_folder(settings, question.hosts)
        yield _collector(settings)
    yield kernel()


def _ranks(environ: Mapping[str, str]) -> Condition:
    """Say whom a rank started with these variables would take itself for."""
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    if (rank is None) != (world is None):
        there, missing = ("RANK", "WORLD_SIZE") if world is None else ("WORLD_SIZE", "RANK")
        return Condition.failed(
            "ranks",
            f"{there}={environ[there]} without {missing}",
            f"set both, or unset {there}: a launcher sets them for each rank",
        )
    is_rank = (rank or "0").isdecimal() and (world or "1").isdecimal()
    if not is_rank or not int(rank or 0) < int(world or 1) < MAX_RANKS:
        return Condition.failed(
            "ranks",
            f"RANK={rank} of WORLD_SIZE={world} is no rank",
            "unset both here: a launcher sets them for each rank",
        )
    found = launcher_place(environ)
    if found is None:
        return Condition.ok("ranks", "no launcher's variables here: alone, rank 0 of 1")
    me = identify(None, environ)
    return Condition.ok(
        "ranks",
        f"{next(iter(found.variables))}: rank {me.rank} of {me.world_size}, "
        f"local rank {me.local_rank} of {me.local_world_size}",
    )


def _variables(environ: Mapping[str, str]) -> Condition:
    """Say which variables begin like ours and mean nothing."""
    if wrong := misspelt_variables(environ):
        return Condition.failed("variables", wrong, "rename it or unset it; it has no effect")
    named = sorted(name for name in environ if name.startswith("RANKSCOPE"))
    return Condition.ok("variables", ", ".join(named) or "none of RANKSCOPE's is set")


def _read_settings(
    given: Mapping[str, str], world_size: int, environ: Mapping[str, str]
) -> tuple[Settings | None, Condition]:
    """Read the settings as a rank would; None where they cannot be read."""
    try:
        found = settings_from(given, environ)
    except RankscopeError as error:
        return None, Condition.failed(
            "settings", as_variables(str(error)), "correct it; ranks would train untraced"
        )
    if not found.traced_of(world_size):
        return None, Condition.failed(
            "settings",
            f"ranks selects none of the {world_size} ranks of this job",
            "give other --ranks, or the size of the job with --nproc-per-node and --nnodes",
        )
    asks = "" if is_enabled(environ) else "; RANKSCOPE is not set: only `rankscope run` traces"
    traced = f"{found.traced_of(world_size)} of {world_size} ranks"
    return found, Condition.ok("settings", f"steps {found.steps.text}, {traced}{asks}")


def _trace_folder(settings: Settings, hosts: int) -> Condition:
    """Say whether the trace folder can be made; it is, with its parents, and removed again."""
    if Collection.of_setting(settings.collector).is_elsewhere:
        return Condition.ok("trace folder", f"the collector at {settings.collector} has its own")
    if hosts > 1 and settings.out is None:
        return Condition.failed(
            "trace folder",
            f"{hosts} hosts and no folder that all of them see",
            "give --out on a shared disk, the same on every host",
        )
    asked = named_out(settings.out or default_out(), "RUN")
    out = free_out(asked, is_shared=hosts > 1)
    made = missing_folders(out)
    try:
        prepare_out(out, "--out")
        (out / "sample").touch()
        (out / "sample").unlink()
    except (RankscopeError, OSError) as error:
        return Condition.failed("trace folder", str(error), "give another with --out")
    finally:
        remove_empty(made)
    mount = mount_of(out)
    text = f"{out}{f' ({mount.kind})' if mount else ''}"
    text += f", because {asked} is not empty" if out != asked else ""
    if hosts > 1 and (mount is None or mount.is_local):
        return Condition.note(
            "trace folder",
            f"{text} looks like this host's own disk",
            "the other hosts must see it: give --out on a shared disk",
        )
    return Condition.ok("trace folder", text)


def _collector(settings: Settings) -> Condition:
    address = settings.collector
    collection = Collection.of_setting(address)
    keyed = " --keys FILE" if is_tcp(address) else ""
    remedy = f"start it: rankscope collect --bind {address}{keyed} --world-size N --out DIR"
    try:
        keys = collection.check(settings.keys)
    except KeysError as error:
        return Condition.failed("collector", as_variables(str(error)), "give other --keys")
    except RankscopeError as error:
        return Condition.failed("collector", as_variables(str(error)), "give another --collector")
    if not collection.is_elsewhere:
        return Condition.ok("collector", address or "started with the job")
    try:
        _connect(address)
    except OSError as error:
        return Condition.failed(
            "collector", f"{address} does not answer: {error.strerror or error}", remedy
        )
    trouble = "" if keys is None else handshake_trouble(address, keys, _CONNECT_S)
    if trouble:
        return Condition.failed("collector", trouble, "give both sides the same --keys")
    known = "" if keys is None else ", and knows these keys"
    return Condition.ok("collector", f"{address} answers{known}")


def _connect(address: str) -> None:
    if address.startswith("ipc://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(_CONNECT_S)
            caller.connect(str(Path(address.removeprefix("ipc://"))))
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal():
        raise OSError(f"port {port!r} cannot be called")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def spool_conditions(settings: Settings, local_ranks: int) -> Iterator[Condition]:
    """Yield whether ranks can write their records here, in a folder that is made and removed."""
    base = spool_base(settings.spool)
    try:
        folder = host_run_folder(base, run_key(f"doctor {os.getpid()} {time.time_ns()}"))
    except RankscopeError as error:
        yield Condition.failed("spool folder", error.problem, "give a local folder with --spool")
        yield from (Condition.skipped(name, "spool folder") for name in _SPOOL_NAMES[1:])
        return
    try:
        yield Condition.ok("spool folder", str(base))
        yield _local(base)
        yield _space(folder, settings.spool_bytes, local_ranks)
    finally:
        remove_run_folder(folder)


def _local(base: Path) -> Condition:
    mount = mount_of(base)
    if mount is None:
        return Condition.note(
            "spool disk", f"{base}: /proc/mounts does not say", "take a local disk"
        )
    text = f"{mount.kind} at {mount.point}"
    if not mount.is_local:
        return Condition.failed(
            "spool disk",
            f"{text} is not this host's own: a mapped file there can stall or end a rank",
            "give a local disk with --spool",
        )
    return Condition.ok("spool disk", text)


def _space(folder: Path, spool_bytes: int, ranks: int) -> Condition:
    needed = f"{ranks} x {spool_bytes >> 20} MiB"
    try:
        check_free_space(folder, spool_bytes * ranks)
    except RankscopeError as error:
        return Condition.failed(
            "spool space",
            f"{error.problem} ({needed})",
            "give a larger disk with --spool, or less with --spool-bytes",
        )
    return Condition.ok(
        "spool space", f"{needed} fit, {shutil.disk_usage(folder).free >> 20} MiB free"
    )


def kernel() -> Condition:
    """Say what takes the digests on CPU; compiles the kernel where that has not been done yet."""
    if (path := build_kernel()) is not None:
        return Condition.ok("kernel", str(path))
    return Condition.note(
        "kernel",
        f"{why_none()}: numpy takes the digests, about three times slower, with the same numbers",
        "unset RANKSCOPE_KERNEL"
        if is_off()
        else "install gcc or clang, set CC, or name an executable cache by XDG_CACHE_HOME",
    )
