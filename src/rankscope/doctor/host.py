"""This host: the disk of the spools, sockets, descriptors, clocks, kernel, what dead runs left."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rankscope.capture.codefolders import is_off
from rankscope.capture.kernel import build as build_kernel
from rankscope.capture.kernel import why_none
from rankscope.doctor.condition import Condition
from rankscope.errors import RankscopeError
from rankscope.run.companions import ipc_address
from rankscope.run.folders import (
    check_free_space,
    host_run_folder,
    remove_run_folder,
    run_key,
    spool_base,
    streams,
)
from rankscope.run.locks import is_abandoned
from rankscope.run.mounts import mount_of
from rankscope.run.outfolder import typed
from rankscope.settings import Settings

__all__ = ["clock", "descriptors", "kernel", "leftovers", "spool_conditions"]

_SPOOL_NAMES = ("spool folder", "spool disk", "spool space", "spool files", "socket")
_SAMPLE_BYTES = 1 << 20
_FILES_AT_ALL = 64
_FILES_PER_RANK = 2
_EARLIEST = 1_700_000_000.0
"""A wall clock before November 2023 has not been set."""
_CLOCK_S = 0.05
_CLOCK_TOLERANCE_S = 0.02
_MANY = 3


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
        yield _allocation(folder)
        yield _socket(folder)
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


def _allocation(folder: Path) -> Condition:
    path = folder / "sample"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SAMPLE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Condition.failed(
            "spool files",
            f"space cannot be set aside in {folder}: {error.strerror}",
            "give another disk with --spool; quotas count too",
        )
    finally:
        path.unlink(missing_ok=True)
    return Condition.ok("spool files", "space can be set aside before it is mapped")


def _socket(folder: Path) -> Condition:
    path = Path(ipc_address(folder).removeprefix("ipc://"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
    except OSError as error:
        return Condition.failed(
            "socket",
            f"{path}: relay and collector cannot meet there: {error.strerror or error}",
            "give a folder on an ordinary local disk with --spool",
        )
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if path.parent != folder:
        return Condition.ok(
            "socket", f"the path of the spools is too long for one: in {path.parent}"
        )
    return Condition.ok("socket", f"in the run's folder, {len(os.fsencode(path))} bytes of 107")


def descriptors(local_ranks: int, hosts: int) -> Condition:
    """Say whether relay and collector may open what they need; they raise the soft limit alone."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = _FILES_AT_ALL + _FILES_PER_RANK * max(local_ranks, hosts)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Condition.failed(
            "descriptors",
            f"a process may open {hard} files, relay or collector of this job need {needed}",
            f"ulimit -Hn {needed} or more, or LimitNOFILE of the service that starts the job",
        )
    limit = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    return Condition.ok("descriptors", f"{limit} allowed, {needed} needed")


def clock(hosts: int) -> Condition:
    """Say whether wall and monotonic clock run, and at one pace."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_S)
    return clock_from(wall, time.time() - wall, time.monotonic() - steady, hosts)


def clock_from(wall: float, wall_s: float, steady_s: float, hosts: int) -> Condition:
    """Judge a wall clock and how far it and the monotonic clock came meanwhile."""
    remedy = "set the clock (chronyd, ntpd, systemd-timesyncd): times in the trace would be wrong"
    if wall < _EARLIEST:
        return Condition.failed(
            "clock", f"it is {time.strftime('%Y-%m-%d', time.gmtime(wall))}", remedy
        )
    if steady_s <= 0 or abs(wall_s - steady_s) > _CLOCK_TOLERANCE_S + steady_s / 10:
        text = f"in {steady_s:.3f} s of the monotonic clock the wall clock moved {wall_s:.3f} s"
        return Condition.failed("clock", text, remedy)
    others = "; whether other hosts agree cannot be seen from here" if hosts > 1 else ""
    return Condition.ok("clock", f"wall and monotonic clock agree{others}")


def kernel() -> Condition:
    """Say what takes the digests on CPU; compiles the kernel where that has not been done yet."""
    path = build_kernel()
    if path is not None:
        return Condition.ok("kernel", str(path))
    return Condition.note(
        "kernel",
        f"{why_none()}: numpy takes the digests, about three times slower, with the same numbers",
        "unset RANKSCOPE_KERNEL"
        if is_off()
        else "install gcc or clang, set CC, or name an executable cache by XDG_CACHE_HOME",
    )


def leftovers(settings: Settings) -> Condition:
    """Say which run folders nobody works in any more: their records were never put in a trace."""
    found = []
    for base in sorted({spool_base(settings.spool), spool_base(None)}):
        with suppress(OSError):
            folders = sorted(folder for folder in base.iterdir() if folder.is_dir())
            found += [folder for folder in folders if _is_left(folder)]
    if not found:
        return Condition.ok("leftovers", "no records of dead runs on this host's disk")
    size = sum(path.stat().st_blocks for run in found for path in run.rglob("*") if path.is_file())
    named = " ".join(map(str, found[:_MANY])) + (" ..." if len(found) > _MANY else "")
    runs = "1 dead run" if len(found) == 1 else f"{len(found)} dead runs"
    return Condition.note(
        "leftovers",
        f"records of {runs}, {size * 512 >> 20} MiB: {named}",
        f"{typed('recover', found[0], out='NEW')}, which removes the folder as well",
    )


def _is_left(folder: Path) -> bool:
    """True for a run that holds records, and in which nobody is at work."""
    try:
        return bool(streams(folder)) and is_abandoned(folder)
    except (RankscopeError, OSError):
        return False
