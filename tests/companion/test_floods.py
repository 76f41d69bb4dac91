"""A peer that never ends its message: what it sends is kept by libzmq, where no program sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import TRACE_NAME
from rankscope.spool.replicas import read_end, replica_path
from tests import forked
from tests.companion.jobs import environment
from tests.waiting import wait_until

MOST_BYTES = 256 << 20
FLOOD_S = 2.0

FLOOD = """
import socket, sys, time
role, path, part_bytes, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def prop(name, text):
    return bytes([len(name)]) + name + len(text).to_bytes(4, "big") + text

def greet(peer):  # ZMTP 3.0, mechanism NULL
    peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
    kind, name = (b"DEALER", b"relay-flood") if role == "relay" else (b"ROUTER", b"")
    ready = b"\\x05READY" + prop(b"Socket-Type", kind) + prop(b"Identity", name)
    peer.sendall(b"\\x04" + bytes([len(ready)]) + ready)
    if len(peer.recv(64, socket.MSG_WAITALL)) != 64:
        raise OSError("cut off")

def peers():
    if role == "relay":
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(path)
            except OSError:
                return  # the collector is through
            yield peer
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(16)
    server.settimeout(30)
    print("listening", flush=True)
    while True:
        yield server.accept()[0]

if part_bytes < 256:
    part = b"\\x01" + bytes([part_bytes]) + bytes(part_bytes)
else:
    part = b"\\x03" + part_bytes.to_bytes(8, "big") + bytes(part_bytes)
block = part * max(1, (1 << 20) // len(part))
end, sent, cut = time.monotonic() + seconds, 0, 0

def goes_on():  # on a busy machine longer: until it was cut off
    now = time.monotonic()
    return now < end or (cut < 2 and now < end + 60)

for peer in peers():
    try:
        greet(peer)
        while goes_on():
            peer.sendall(block)
            sent += len(block)
    except OSError:
        cut += 1
    peer.close()
    if not goes_on():
        break
print(sent, cut, flush=True)
"""


def flood(role: str, address: str, part_bytes: int) -> subprocess.Popen[str]:
    path = address.removeprefix("ipc://")
    return forked.Popen(
        [sys.executable, "-c", FLOOD, role, path, str(part_bytes), str(FLOOD_S)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def most_bytes(process: subprocess.Popen[str]) -> int:
    """The most memory a living process ever occupied."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def finish(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Bytes a flood sent, and how often it was cut off."""
    sent, cut = process.communicate(timeout=120)[0].split()[-2:]
    return int(sent), int(cut)


@pytest.mark.parametrize("part_bytes", [0, pytest.param(60_000, marks=pytest.mark.lab)])
def test_a_message_that_never_ends_is_cut_off_and_the_job_beside_it_loses_nothing(
    hosts, part_bytes
):
    host = hosts(world_size=1)
    collector = host.collector(fresh=True)
    assert wait_until(host.is_listened_to)
    relay = host.relay(fresh=True)
    flooding = flood("relay", host.address, part_bytes)
    host.processes.append(flooding)
    rank = host.rank(0, batches=40, pause_ms=100)
    sent, cut = finish(flooding)
    occupied = most_bytes(collector)
    assert rank.wait(timeout=60) == 0
    assert collector.wait(timeout=60) == 0
    assert relay.wait(timeout=60) == 0
    assert cut >= 2, "what it sent was taken in"
    assert occupied < MOST_BYTES, f"{sent} bytes sent, {occupied} occupied"
    stream = StreamId(rank=0, incarnation=0)
    replica = replica_path(host.out, stream)
    end = read_end(replica)
    assert end is not None
    assert (end.end, end.committed) == (EndReason.EXIT, replica.stat().st_size)
    assert (host.out / TRACE_NAME).exists()
    assert "cut off" in host.log("collector")
