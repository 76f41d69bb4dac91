"""What the collector takes in, against the bar: 2 million records a second in less than 256 MB.

    python -m tests.lab.perf.collector [relays] [MB per relay]

Relays are played by one process that sends ready frames over `ipc://`, each as its own connection
with the real window: the collector alone is what is measured. Prints ratios to the bars; on a
machine shared with others look at CPU time per record. Each intake is measured twice: as relays ask
for it, which have every segment put on disk before they free it, and without that.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import zmq

from rankscope.companion.protocol import (
    FRAME_BYTES,
    PROTOCOL_VERSION,
    WINDOW_BYTES,
    Ended,
    Frame,
    Hello,
    OpenStream,
    StreamOffset,
    Sync,
    Synced,
    decode,
    encode,
)
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.processes import companion_environment
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import DEFAULT_SEGMENT_BYTES, SpoolWriter
from tests.companion.jobs import collector_command
from tests.spool.streams import enter, value

RECORDS_BAR = 2e6
RSS_BAR_MB = 256
ORIGIN = 1


def frames(folder: Path) -> tuple[list[bytes], int]:
    """Frames of a spool with as many one-cell as four-cell records; their records."""
    writer = SpoolWriter(folder, limit_bytes=256 << 20)
    for number in range(20_000):
        writer.write(RecordKind.ENTER, enter(number))
        if number % 4 == 0:
            writer.write(RecordKind.VALUE, value(number))
    with StreamReader(folder) as reader:
        bodies = list(reader.chunks(max_bytes=FRAME_BYTES))[:-1]
    writer.close()
    return bodies, sum(len(records(body)) for body in bodies)


class Sender:
    """One connection with its own stream and window."""

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        rank: int,
        bodies: list[bytes],
        *,
        is_syncing: bool,
    ) -> None:
        self.stream = StreamId(rank=rank, incarnation=0)
        self.bodies = bodies
        self.sent = self.acked = self.synced = self.number = 0
        self.to_sync = DEFAULT_SEGMENT_BYTES if is_syncing else 1 << 62
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, f"relay-{rank}".encode())
        self.socket.connect(address)
        self.socket.send_multipart(encode(Hello(PROTOCOL_VERSION, "perf", "perf")))
        self.socket.send_multipart(encode(OpenStream(self.stream, ORIGIN)))

    def fill(self, crcs: list[int], total: int) -> None:
        while self.number < total and self.sent - self.acked < WINDOW_BYTES:
            which = self.number % len(self.bodies)
            body = self.bodies[which]
            message = encode(Frame(self.stream, ORIGIN, self.sent, crcs[which], body))
            self.socket.send_multipart(message, copy=False)
            self.sent += len(body)
            self.number += 1

    def receive(self) -> None:
        while True:
            try:
                message = decode(self.socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            if isinstance(message, StreamOffset):
                self.acked = message.offset
                if self.acked >= self.to_sync:
                    self.to_sync += DEFAULT_SEGMENT_BYTES
                    self.socket.send_multipart(encode(Sync(self.stream, ORIGIN)))
            elif isinstance(message, Synced):
                self.synced = message.offset


def children_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(relays: int, megabytes: int, *, is_syncing: bool) -> float:
    """Measure one intake; return its bytes per second."""
    base = Path(tempfile.mkdtemp(prefix="rankscope-perf"))
    bodies, record_count = frames(base / "spool")
    crcs = [zlib.crc32(body) for body in bodies]
    total = max(1, megabytes * 1_000_000 // FRAME_BYTES)
    address = f"ipc://{base}/c.sock"
    options = {"live_check": False, "keep_spool": True}
    command = collector_command(base / "out", address, relays + 1, **options)
    collector = subprocess.Popen(command, env=companion_environment(), stderr=subprocess.DEVNULL)
    while not (base / "c.sock").exists():
        time.sleep(0.05)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8192)
    senders = [
        Sender(context, address, rank, bodies, is_syncing=is_syncing) for rank in range(relays)
    ]
    poller = zmq.Poller()
    for sender in senders:
        poller.register(sender.socket, zmq.POLLIN)
    time.sleep(0.5)
    cpu, started = children_cpu_s(collector.pid), time.perf_counter()
    by_socket = {sender.socket: sender for sender in senders}
    for sender in senders:
        sender.fill(crcs, total)
    while any(sender.acked < sender.sent or sender.number < total for sender in senders):
        for socket, _ in poller.poll(1000):
            by_socket[socket].receive()
            by_socket[socket].fill(crcs, total)
    wall = time.perf_counter() - started
    cpu = children_cpu_s(collector.pid) - cpu
    taken = sum(sender.sent for sender in senders)
    per_record = len(b"".join(bodies)) / record_count
    rate, rss = taken / per_record / wall, peak_rss_mb(collector.pid)
    behind = sum(sender.acked - sender.synced for sender in senders) / 1e6
    how = f"every segment put on disk, {behind:.0f} MB behind" if is_syncing else "none put on disk"
    print(f"{relays} relays, {taken / 1e6:.0f} MB, {how}: {taken / wall / 1e6:.0f} MB/s")
    print(
        f"  {rate / 1e6:.2f} M records/s of {per_record:.0f} bytes: "
        f"{rate / RECORDS_BAR:.2f}x the bar"
    )
    print(f"  {taken / per_record / cpu / 1e6:.2f} M records per second of its own CPU time")
    print(f"  peak RSS {rss:.0f} MB: {rss / RSS_BAR_MB:.2f}x the bar (lower is better)")
    for sender in senders:
        sender.socket.send_multipart(
            encode(Ended(sender.stream, ORIGIN, sender.sent, EndReason.EXIT))
        )
        sender.socket.close()
    collector.kill()
    collector.wait()
    context.term()
    subprocess.run(["rm", "-rf", str(base)], check=True)
    return taken / wall


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chosen = [int(argument) for argument in sys.argv[1:]]
    for relays, megabytes in (
        [tuple(chosen)] if len(chosen) == 2 else [(4, 100), (64, 8), (1024, 1)]
    ):
        without = measure(relays, megabytes, is_syncing=False)
        ratio = measure(relays, megabytes, is_syncing=True) / without
        print(f"  putting on disk leaves {ratio:.2f} of the rate without")
