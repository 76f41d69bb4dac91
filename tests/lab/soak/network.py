"""Hosts as network namespaces, plugged into a switch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab.soak.disks import can_mount

__all__ = ["COLLECTOR", "Network", "address_of", "can_have_hosts", "name_hosts"]

COLLECTOR = "tcp://10.77.0.1:7777"
"""Where the first host's collector listens."""
_numbers = itertools.count()


@functools.cache
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


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


def name_hosts(folder: Path, hosts: int) -> None:
    """Let names of hosts be resolved; this mount namespace is the tool's own."""
    names = folder / "names"
    lines = [
        f"127.0.0.1 localhost {os.uname().nodename}",
        *(f"{address_of(host)} node{host}" for host in range(hosts)),
    ]
    names.write_text("\n".join(lines) + "\n")
    _run("mount", "--bind", str(names), "/etc/hosts")


class Network:
    """A switch and hosts that are plugged into it."""

    def __init__(self, hosts: int) -> None:
        mark = f"s{os.getpid() % 10000}x{next(_numbers)}"
        self._switch = f"{mark}sw"
        self.hosts = [f"{mark}h{host}" for host in range(hosts)]
        for name in (self._switch, *self.hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.hosts):
            peer = ["peer", "name", "eth0", "netns", name]
            _ip("-n", self._switch, "link", "add", f"port{host}", "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address_of(host)}/24", "dev", "eth0")
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

    def inside(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs this one on a host."""
        command = f"hostname node{host} && exec {shlex.join(words)}"
        return ["ip", "netns", "exec", self.hosts[host], "unshare", "--uts", "sh", "-c", command]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
