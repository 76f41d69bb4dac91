"""Three hosts of two ranks each as network namespaces, whose links fail, or one of which dies.

As a program (`python -m tests.lab.soak.hosts COMMAND`) it runs a command in the namespace it was
started in, with a fork server of that namespace's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rankscope.run.connection import relays_file
from tests import forked
from tests.companion.jobs import environment
from tests.lab.soak.faults import Fault
from tests.lab.soak.job import Shape, kill_all, processes
from tests.lab.soak.network import COLLECTOR, Network, address_of
from tests.lab.soak.oracle import accounts, compare
from tests.lab.soak.schedule import LATEST_END_S, Outcome, Schedule

__all__ = ["draw_hosts", "play_hosts"]

_PROGRAM = Path(__file__).with_name("program.py")
_BIN = Path(sys.executable).parent
_HOSTS = 3
_RANKS = 2
_GLOO_S = 10
_MOST_JOB_S = 150.0
_LOOK_S = 0.2
FAULTS = {
    "a host dies": (0.0, 0.0),
    "a host is cut off and comes back": (2.0, 30.0),
    "every host is cut off and comes back": (1.0, 6.0),
    "a slow link that drops packets": (60.0, 60.0),
}
"""Each with the least and the most seconds it lasts."""


def draw_hosts(seed: int) -> Schedule:
    """Draw what happens to the hosts: all faults in turn."""
    chosen = random.Random(f"hosts {seed}")
    name = [*FAULTS][seed % len(FAULTS)]
    fault = Fault(
        name=name,
        at_s=chosen.uniform(0.2, 4.0),
        lasts_s=chosen.uniform(*FAULTS[name]),
        seed=chosen.randrange(1 << 30),
    )
    shape = Shape(
        way=f"{_HOSTS} hosts",
        transport="keyed" if seed // len(FAULTS) % 2 else "shared",
        ranks=_HOSTS * _RANKS,
        steps=100,
        gloo=True,
    )
    return Schedule(seed=seed, shape=shape, faults=(fault,))


def play_hosts(schedule: Schedule, folder: Path, *, keep: bool = False) -> Outcome:
    """Run a job on three hosts, let one fault happen, hold the trace to what the programs wrote."""
    outcome, place = Outcome(schedule), folder / f"{schedule.seed}"
    (place / "accounts").mkdir(parents=True)
    network = Network(_HOSTS)
    try:
        last = _play(network, schedule, place)
        _judge(place, outcome, last)
    except Exception as error:  # one schedule that fails is a row of the table
        outcome.how = "failed"
        outcome.troubles.append(f"{type(error).__name__}: {error}")
    finally:
        kill_all(place)
        network.remove()
    if not (keep and outcome.is_worth_a_look):
        shutil.rmtree(place, ignore_errors=True)
    return outcome


def _play(network: Network, schedule: Schedule, place: Path) -> float:
    """Return when the fault was over and the last rank of a living host gone."""
    (fault,) = schedule.faults
    chosen = random.Random(fault.seed)
    if schedule.shape.transport == "keyed":
        _collect(network, place)
    launchers = [_start(network, host, schedule, place) for host in range(_HOSTS)]
    deadline = time.monotonic() + _MOST_JOB_S
    while len([*_stepped(place)]) < _HOSTS * _RANKS:
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not begin")
        time.sleep(_LOOK_S)
    time.sleep(fault.at_s)
    victim = chosen.randrange(1, _HOSTS)  # the first has the rendezvous and the collector
    cut_off = [victim] if "a host is" in fault.name else [*range(_HOSTS)]
    healed = time.monotonic()
    if "dies" in fault.name:
        network.plug(victim, is_in=False)
        for pid in network.pids(victim):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    elif "cut off" in fault.name:
        for host in cut_off:
            network.plug(host, is_in=False)
        time.sleep(fault.lasts_s)
        for host in cut_off:
            network.plug(host, is_in=True)
        healed = time.monotonic()
    else:
        network.slow_down(victim)
    mark = str(_PROGRAM).encode()
    deadline = time.monotonic() + _MOST_JOB_S
    # ranks, not launchers: these wait for the tree
    while any(mark in parts and b"run" not in parts for _, parts in processes(place)):
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not end")
        time.sleep(_LOOK_S)
    last = max(time.monotonic(), healed)
    while any(launcher.poll() is None for launcher in launchers):
        if time.monotonic() > last + LATEST_END_S * 2 or (place / "trace/trace.json").exists():
            break
        time.sleep(_LOOK_S)
    return last


def _stepped(place: Path) -> list[Path]:
    return [path for path in (place / "accounts").iterdir() if b"\nstep" in path.read_bytes()]


def _collect(network: Network, place: Path) -> None:
    """Start a collector by hand on the first host, for hosts without a common folder."""
    keys = place / "keys"
    forked.run([_BIN / "rankscope", "keys", "new", keys], check=True, capture_output=True)
    words = [str(_BIN / "rankscope"), "collect", "--out", str(place / "trace"), "--bind"]
    words += [COLLECTOR, "--keys", str(keys), "--world-size", str(_HOSTS * _RANKS)]
    _inside(network, 0, words, place / "collector.log")


def _start(network: Network, host: int, schedule: Schedule, place: Path) -> subprocess.Popen[bytes]:
    words = [str(_BIN / "rankscope"), "run"]
    if schedule.shape.transport == "keyed":
        relays = str(relays_file(place / "keys"))
        words += ["--rs-collector", COLLECTOR, "--rs-keys", relays]
    else:
        words += ["--rs-out", str(place / "trace")]
    words += ["--rs-spool", str(place / f"host{host}"), "--rs-steps", "all"]
    words += ["--nnodes", str(_HOSTS), "--nproc-per-node", str(_RANKS)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address_of(0)}:29400"]
    words += ["--rdzv-id", "soak", "--local-addr", address_of(host), str(_PROGRAM)]
    words += [str(place / "accounts"), "--steps", str(schedule.shape.steps), "--gloo"]
    words += ["--gloo-timeout", str(_GLOO_S), "--pause-ms", "50"]
    return _inside(network, host, words, place / f"host{host}.log")


def _inside(network: Network, host: int, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Run a command on a host."""
    with log.open("a") as file:
        return subprocess.Popen(
            network.inside(host, [sys.executable, "-m", "tests.lab.soak.hosts", *words]),
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _judge(place: Path, outcome: Outcome, last: float) -> None:
    tree = place / "trace/trace.json"
    while not tree.exists() and time.monotonic() - last < LATEST_END_S * 2:
        time.sleep(_LOOK_S)
    outcome.end_s = time.monotonic() - last
    if outcome.end_s > LATEST_END_S:
        outcome.troubles.append(f"the end came {outcome.end_s:.0f} s after the last rank")
    outcome.how = "tree" if tree.exists() else "no tree"
    told = accounts(place / "accounts")
    if tree.exists():
        outcome.findings = compare(place / "trace", told)
    if tree.exists() and outcome.findings.is_right:
        return
    # what a host held that died, or was cut off for too long, is added once the host is back
    while processes(place) and time.monotonic() - last < LATEST_END_S * 3:
        time.sleep(_LOOK_S)
    held = [path.parent for path in place.glob("host*/*/*/run.json")]
    new = place / "recovered"
    forked.run(
        [sys.executable, "-m", "rankscope", "recover", *held, place / "trace", "--out", new],
        env=environment(),
        capture_output=True,
        timeout=120,
    )
    if not (new / "trace.json").exists():
        outcome.troubles.append("nothing to recover")
        return
    outcome.late, outcome.how = outcome.findings.lost, f"{outcome.how}, then recover"
    outcome.findings = compare(new, told)


def main() -> int:
    """Run a command in this namespace."""
    process = forked.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
