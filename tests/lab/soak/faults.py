"""The faults of schedules: what each does to a job, what undoes it, and which jobs can have it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.soak.job import Job
from tests.waiting import wait_until

__all__ = ["CAUSES", "KINDS", "Fault", "Kind", "kind_of", "nothing", "starve"]

Act = Callable[[Job, random.Random], object]
_BUILDER_S = 20.0


def nothing(job: Job, chosen: random.Random) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    inject: Act = nothing
    heal: Act = nothing
    lasts_s: tuple[float, float] = (0.0, 0.0)
    before: Act = nothing
    """Done before the job starts."""
    ways: tuple[str, ...] = ("direct", "launched")
    transports: tuple[str, ...] = ("own", "shared", "proxied", "keyed")
    trace_disk: str = ""
    spool_disk: str = ""
    ends: str = ""
    restarts: int = 0
    has_reader: bool = False
    """About the process beside the job's steps, which comes after three seconds."""
    heals_after_job: bool = False
    waits_for_builder: bool = False
    """Its `heal` waits for the builder of the tree: whatever else heals comes before it, as a
    collector that is not there yet starts no builder."""
    hosts: int = 1
    stays: bool = False
    """It is undone only where the trace was held to what was asked for."""
    may_need_recover: bool = False
    """Nobody is left who would build a tree, or it could not be written: `rankscope recover`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    name: str
    at_s: float
    """Since every rank has made a step."""
    lasts_s: float
    seed: int
    at_step: int | None = None
    """Once a rank is in this step, instead of a time."""


def _signal(job: Job, role: str, number: int, chosen: random.Random) -> None:
    pids = job.pids(role)
    if role == "relay" and len(pids) > 1 and chosen.random() < 0.5:
        pids = [chosen.choice(pids)]
    if role == "rank" and pids:
        pids = [chosen.choice(pids)]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill(role: str) -> Act:
    return lambda job, chosen: _signal(job, role, signal.SIGKILL, chosen)


def stop(role: str) -> Act:
    return lambda job, chosen: _signal(job, role, signal.SIGSTOP, chosen)


def go_on(job: Job, chosen: random.Random) -> None:
    for pid in job.pids("any"):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def starve(pid: int, chosen: random.Random) -> None:
    """What a process asks for beyond some MiB more than it has is refused from now on."""
    with contextlib.suppress(OSError, ValueError):  # it has ended
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (chosen.randint(0, 16) << 20)
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, hard))


def run_out_of_memory(role: str) -> Act:
    return lambda job, chosen: [starve(pid, chosen) for pid in job.pids(role)]


def of_builder(act: Act, *, then: Act | None = None) -> Act:
    """Have the process that builds the tree meet with something as soon as it is there."""

    def caught(job: Job, chosen: random.Random) -> None:
        if wait_until(lambda: job.pids("builder") or job.has_tree(), _BUILDER_S):
            time.sleep(chosen.uniform(0, 0.3))
            act(job, chosen)
            if then is not None:
                time.sleep(chosen.uniform(0.5, 5))
                then(job, chosen)

    return caught


def terminate_launcher(job: Job, chosen: random.Random) -> None:
    _signal(job, "launcher", signal.SIGTERM, chosen)


def hold_down(*roles: str) -> Act:
    def act(job: Job, chosen: random.Random) -> None:
        job.held_down.update(roles)
        for role in roles:
            _signal(job, role, signal.SIGKILL, chosen)

    return act


def bring_back(*roles: str) -> Act:
    def act(job: Job, chosen: random.Random) -> None:
        job.held_down.difference_update(roles)
        if not job.has_tree():
            job.start_companions(*roles)

    return act


def keep_relays_down(job: Job, chosen: random.Random) -> None:
    """The launcher starts them again as soon as it goes on."""
    _signal(job, "launcher", signal.SIGSTOP, chosen)
    hold_down("relay")(job, chosen)


def let_relays_come(job: Job, chosen: random.Random) -> None:
    bring_back("relay")(job, chosen)
    go_on(job, chosen)


def vanish(job: Job, chosen: random.Random) -> None:
    """The last host has lost its power; of the only host, one rank and the relay are gone."""
    host = job.shape.hosts - 1
    ranks = job.pids("rank", host)
    ranks = ranks if host else ranks[:1]
    job.held_down.add(f"relay{host}")
    for pid in [*ranks, *job.pids("relay", host)]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def do_not_start(role: str) -> Act:
    return lambda job, chosen: job.held_down.add(role)


def leave_out_a_rank(job: Job, chosen: random.Random) -> None:
    job.absent.add(chosen.randrange(job.shape.ranks))


def start_left_out_rank(job: Job, chosen: random.Random) -> None:
    while job.absent:
        job.start_rank(job.absent.pop())


def in_another_time(role: str) -> Act:
    """Start a companion again where monotonic and boot time are a day ahead."""

    def act(job: Job, chosen: random.Random) -> None:
        ahead = ["--monotonic", "86400", "--boottime", "86400"]
        job.prefix[role] = ["unshare", "--time", *ahead, "--fork", "--kill-child"]
        _signal(job, role, signal.SIGKILL, chosen)

    return act


def spoil(*ways: str, cuts: bool = False) -> Act:
    def act(job: Job, chosen: random.Random) -> None:
        assert job.proxy is not None
        job.proxy.spoils.update(ways)
        if cuts:
            job.proxy.cut()

    return act


def spoil_no_more(*ways: str) -> Act:
    def act(job: Job, chosen: random.Random) -> None:
        assert job.proxy is not None
        job.proxy.spoils.difference_update(ways)

    return act


def fill(what: str, *leave_mebibytes: float) -> Act:
    return lambda job, chosen: job.disks[what].fill(
        int(chosen.choice(leave_mebibytes or (0,)) * (1 << 20))
    )


def make_room(what: str) -> Act:
    return lambda job, chosen: job.disks[what].make_room()


def replace_disk(job: Job, chosen: random.Random) -> None:
    """As an operator does: whoever uses it is ended, it is mounted again, they are started."""
    roles = ("collector", "relay", "reader")
    job.held_down.update(roles)
    for role in roles:
        _signal(job, role, signal.SIGKILL, chosen)
    wait_until(lambda: not any(job.pids(role) for role in roles), 20)
    deadline = time.monotonic() + 10
    while True:
        try:
            job.disks["trace"].replace()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    bring_back("collector", "relay")(job, chosen)


_HOST = ("direct",)
_LAUNCHER = ("launched",)
_PROXY = ("proxied", "keyed")

KINDS = {
    "rank killed": Kind(inject=kill("rank")),
    "rank stopped": Kind(inject=stop("rank"), heal=go_on, lasts_s=(0.5, 30)),
    "rank never starts": Kind(before=leave_out_a_rank, ways=_HOST),
    "rank starts late": Kind(before=leave_out_a_rank, inject=start_left_out_rank, ways=_HOST),
    "rank raises": Kind(ends="raise"),
    "rank leaves by os._exit": Kind(ends="os._exit"),
    "ranks restarted": Kind(restarts=2, ways=_LAUNCHER),
    "relay killed": Kind(inject=kill("relay")),
    "relay stopped": Kind(inject=stop("relay"), heal=go_on, lasts_s=(0.5, 30)),
    "relay down": Kind(
        inject=hold_down("relay"), heal=bring_back("relay"), lasts_s=(1, 8), ways=_HOST
    ),
    "collector killed": Kind(inject=kill("collector")),
    "collector stopped": Kind(inject=stop("collector"), heal=go_on, lasts_s=(0.5, 30)),
    "collector down at the end": Kind(
        inject=hold_down("collector"),
        heal=bring_back("collector"),
        lasts_s=(0, 5),
        heals_after_job=True,
        ways=_HOST,
    ),
    "collector comes late": Kind(
        before=do_not_start("collector"),
        heal=bring_back("collector"),
        lasts_s=(0, 5),
        heals_after_job=True,
        ways=_HOST,
    ),
    "reader killed": Kind(inject=kill("reader"), has_reader=True),
    "reader stopped": Kind(inject=stop("reader"), heal=go_on, lasts_s=(0.5, 30), has_reader=True),
    "reader out of memory": Kind(inject=run_out_of_memory("reader"), has_reader=True),
    "builder killed": Kind(
        heal=of_builder(kill("builder")),
        heals_after_job=True,
        waits_for_builder=True,
        transports=("own",),  # other hosts wait 5 minutes for a collector that gave up
        may_need_recover=True,
    ),
    "builder stopped": Kind(
        heal=of_builder(stop("builder"), then=go_on), heals_after_job=True, waits_for_builder=True
    ),
    "builder out of memory": Kind(
        heal=of_builder(run_out_of_memory("builder")),
        heals_after_job=True,
        waits_for_builder=True,
        transports=("own",),
        may_need_recover=True,
    ),
    "launcher killed": Kind(inject=kill("launcher"), ways=_LAUNCHER, may_need_recover=True),
    "launcher stopped": Kind(inject=stop("launcher"), heal=go_on, lasts_s=(1, 30), ways=_LAUNCHER),
    "launcher terminated": Kind(inject=terminate_launcher, ways=_LAUNCHER),
    "host suspended": Kind(inject=stop("any"), heal=go_on, lasts_s=(1, 30)),
    "a host vanishes": Kind(
        inject=vanish, hosts=2, ways=_HOST, transports=("shared", "keyed"), may_need_recover=True
    ),
    "relay's clock a day ahead": Kind(inject=in_another_time("relay"), ways=_HOST),
    "collector's clock a day ahead": Kind(inject=in_another_time("collector"), ways=_HOST),
    "link cut": Kind(inject=spoil(cuts=True), transports=_PROXY, ways=_HOST),
    "link refused": Kind(
        inject=spoil("refuse", cuts=True),
        heal=spoil_no_more("refuse"),
        lasts_s=(1, 8),
        transports=_PROXY,
        ways=_HOST,
    ),
    "link stalls": Kind(
        inject=spoil("stall"),
        heal=spoil_no_more("stall"),
        lasts_s=(1, 10),
        transports=_PROXY,
        ways=_HOST,
    ),
    **{
        f"link {way}s": Kind(
            inject=spoil(way),
            heal=spoil_no_more(way),
            lasts_s=(0.5, 3),
            transports=_PROXY,
            ways=_HOST,
        )
        for way in ("truncate", "duplicate", "flip")
    },
    "trace disk full": Kind(
        inject=fill("trace"),
        heal=make_room("trace"),
        lasts_s=(1, 6),
        trace_disk="tmpfs",
        may_need_recover=True,
    ),
    "spool disk full": Kind(
        inject=fill("spool"),
        heal=make_room("spool"),
        lasts_s=(1, 6),
        spool_disk="tmpfs",
        ways=_HOST,
    ),
    "trace disk full to the end": Kind(
        inject=fill("trace", 0, 0.5, 5),
        trace_disk="tmpfs",
        stays=True,
        may_need_recover=True,
    ),
    "spool disk full to the end": Kind(
        inject=fill("spool", 0, 0.5, 5),
        spool_disk="tmpfs",
        stays=True,
        ways=_HOST,
        may_need_recover=True,
    ),
    "trace disk fails": Kind(
        inject=lambda job, chosen: job.disks["trace"].fail(),
        heal=replace_disk,
        lasts_s=(0.5, 4),
        trace_disk="ext4",
        ways=_HOST,
        may_need_recover=True,
    ),
    "trace disk read-only": Kind(
        inject=lambda job, chosen: job.disks["trace"].forbid_writing(),
        heal=replace_disk,
        lasts_s=(0.5, 4),
        trace_disk="ext4",
        ways=_HOST,
        may_need_recover=True,
    ),
}

CAUSES = {
    # the collector waits 10 s for a relay that is silent (`--rs-drain-seconds`)
    "relay stalled": Kind(inject=stop("relay"), heal=go_on, lasts_s=(7, 14), may_need_recover=True),
    "relay restarted": Kind(
        inject=keep_relays_down, heal=let_relays_come, lasts_s=(10, 10), may_need_recover=True
    ),
    "spool full, for seconds": Kind(
        inject=fill("spool", 0, 4.3, 5, 9),
        heal=make_room("spool"),
        lasts_s=(3, 15),
        spool_disk="tmpfs",
        may_need_recover=True,
    ),
    "spool full, for good": Kind(
        inject=fill("spool", 0, 4.3, 5, 9),
        stays=True,
        spool_disk="tmpfs",
        may_need_recover=True,
    ),
    "rank and relay vanish": Kind(inject=vanish, may_need_recover=True),
}
"""What has lost the last steps of a black box (`--blackbox`)."""


def kind_of(fault: Fault) -> Kind:
    return CAUSES.get(fault.name) or KINDS[fault.name]
