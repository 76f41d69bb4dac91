"""Three hosts of two ranks each as network namespaces, whose links fail, or one of which dies.

As a program (`python -m tests.soak.hosts COMMAND`) it runs a command in the namespace it was
started in, with a fork server of that namespace's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rankscope.run.keyfile import relays_file
from tests import forked
from tests.gather.jobs import environment
from tests.soak.disks import can_mount
from tests.soak.faults import Fault
from tests.soak.job import Shape, kill_all, processes
from tests.soak.oracle import accounts, compare
from tests.soak.schedule import LATEST_END_S, Outcome, Schedule

__all__ = ["can_have_hosts", "draw_hosts", "play_hosts"]

_PROGRAM = Path(__file__).with_name("program.py")
_BIN = Path(sys.executable).parent
_HOSTS = 3
_RANKS = 2
_GLOO_S = 10
_MOST_JOB_S = 150.0
_LOOK_S = 0.2
_COLLECTOR = "tcp://10.77.0.1:7777"
FAULTS = {
    "a host dies": (0.0, 0.0),
    "a host is cut off and comes back": (2.0, 30.0),
    "every host is cut off and comes back": (1.0, 6.0),
    "a slow link that drops packets": (60.0, 60.0),
}
"""Each with the least and the most seconds it lasts."""


def can_have_hosts() -> bool:
    """True where network namespaces may be made, in a mount namespace that ends with the tool."""
    if not can_mount() or not shutil.which("ip"):
        return False
    try:
        Path("/run/netns").mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")  # names go with the tool too
        _ip("netns", "add", "probe")
        _ip("netns", "del", "probe")
    except OSError:
        return False
    return True


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


class Network:
    """A switch and hosts that are plugged into it."""

    def __init__(self, seed: int) -> None:
        mark = f"s{os.getpid() % 10000}x{seed}"
        self._switch = f"{mark}sw"
        self.hosts = [f"{mark}h{host}" for host in range(_HOSTS)]
        for name in (self._switch, *self.hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.hosts):
            peer = ["peer", "name", "eth0", "netns", name]
            _ip("-n", self._switch, "link", "add", f"port{host}", "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def plug(self, host: int, *, is_in: bool) -> None:
        _ip("-n", self._switch, "link", "set", f"port{host}", "up" if is_in else "down")

    def slow_down(self, host: int) -> None:
        """Let two megabits a second through, and drop what waits longer than 20 ms."""
        words = ["qdisc", "add", "dev", f"port{host}", "root", "tbf"]
        words += ["rate", "2mbit", "burst", "16kb", "latency", "20ms"]
        _run("ip", "netns", "exec", self._switch, "tc", *words)

    def pids(self, host: int) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.hosts[host]], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def remove(self) -> None:
        for name in (*self.hosts, self._switch):
            with contextlib.suppress(OSError):
                _ip("netns", "del", name)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def play_hosts(schedule: Schedule, folder: Path, *, keep: bool = False) -> Outcome:
    """Run a job on three hosts, let one fault happen, hold the trace to what the programs wrote."""
    outcome, place = Outcome(schedule), folder / f"{schedule.seed}"
    (place / "accounts").mkdir(parents=True)
    _name_hosts(place)
    network = Network(schedule.seed)
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


def _name_hosts(place: Path) -> None:
    """Let names be resolved; this mount namespace is the tool's own."""
    names = place.parent / "names"
    lines = ["127.0.0.1 localhost", *(f"{address(host)} node{host}" for host in range(_HOSTS))]
    names.write_text("\n".join(lines) + "\n")
    _run("mount", "--bind", str(names), "/etc/hosts")


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
    words += [_COLLECTOR, "--keys", str(keys), "--world-size", str(_HOSTS * _RANKS)]
    _inside(network, 0, words, place / "collector.log")


def _start(network: Network, host: int, schedule: Schedule, place: Path) -> subprocess.Popen[bytes]:
    words = [str(_BIN / "rankscope"), "run"]
    if schedule.shape.transport == "keyed":
        relays = str(relays_file(place / "keys"))
        words += ["--rs-collector", _COLLECTOR, "--rs-keys", relays]
    else:
        words += ["--rs-out", str(place / "trace")]
    words += ["--rs-spool", str(place / f"host{host}"), "--rs-steps", "all"]
    words += ["--nnodes", str(_HOSTS), "--nproc-per-node", str(_RANKS)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:29400"]
    words += ["--rdzv-id", "soak", "--local-addr", address(host), str(_PROGRAM)]
    words += [str(place / "accounts"), "--steps", str(schedule.shape.steps), "--gloo"]
    words += ["--gloo-timeout", str(_GLOO_S), "--pause-ms", "50"]
    return _inside(network, host, words, place / f"host{host}.log")


def _inside(network: Network, host: int, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Run a command on a host."""
    inside = shlex.join([sys.executable, "-m", "tests.soak.hosts", *words])
    with log.open("a") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", network.hosts[host], "unshare", "--uts", "sh", "-c"]
            + [f"hostname node{host} && exec {inside}"],
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


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def main() -> int:
    """Run a command in this namespace."""
    process = forked.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
