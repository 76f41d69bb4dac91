"""Hosts, ranks, relays and collectors as real processes, for the tests of gathering."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rankscope.record.ranks import StreamId
from rankscope.run.connection import is_tcp, relays_file
from rankscope.run.folders import (
    RunHeader,
    host_run_folder,
    run_key,
    spool_base,
    stream_folder,
    write_run_header,
)
from rankscope.run.processes import (
    companion_command,
    companion_environment,
)
from tests import forked
from tests.keyed import key_file

RANK = """
import os, sys, time
from pathlib import Path
import msgpack
from rankscope.record.ranks import EndReason
from rankscope.spool.recordformat import RecordKind, StepEvent
from rankscope.spool.writer import SpoolWriter
from tests.spool.streams import enter, rank_definition, samples, step, value
folder, rank, count, pause, limit = Path(sys.argv[1]), *map(int, sys.argv[2:6])
writer = SpoolWriter(folder, limit_bytes=limit)
if "closes" in sys.argv:  # what follows has the numbers of what rankscope had open
    os.closerange(3, 4096)
    own = [open(os.devnull, "w") for _ in range(8)]
confirmed = os.open(f"{folder.parent.parent}/{folder.name}.confirmed", os.O_RDWR | os.O_CREAT)
writer.define(rank_definition(rank, pid=os.getpid()))
number = 0
for batch in range(count):
    writer.write(RecordKind.STEP, step(batch, StepEvent.BEGIN))
    for _ in range(100):
        number += 1
        writer.write(RecordKind.ENTER, enter(number))
        writer.write(RecordKind.VALUE, value(number))
        if number % 7 == 0:
            writer.write(RecordKind.SAMPLES, samples(number, number % 9))
    writer.write(RecordKind.STEP, step(batch, StepEvent.END))
    os.pwrite(confirmed, number.to_bytes(8, "little"), 0)
    time.sleep(pause / 1000)
if "hang" in sys.argv:
    print("written", flush=True)
    time.sleep(600)
writer.close(EndReason.EXIT)
if "closes" in sys.argv:
    os.fstat(confirmed)
    for file in own:
        file.write("mine")
        file.close()
"""


def short_ipc(folder: Path) -> str:
    """Return an address of this folder's own; the path of a socket may have 107 bytes."""
    name = hashlib.blake2b(bytes(folder), digest_size=8).hexdigest()
    return f"ipc://{tempfile.gettempdir()}/rankscope-{name}.sock"


def collector_command(out: Path, address: str, world_size: int, **settings: object) -> list[str]:
    """Write the `run.json` of a collector that somebody starts by hand; return its command."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    header = RunHeader(
        run_id="test",
        out=out,
        collector=address,
        world_size=world_size,
        settings={name.replace("_", "-"): _text(value) for name, value in settings.items()},
        collects=world_size,
    )
    write_run_header(out, header)
    return companion_command(out)


def _text(value: object) -> str:
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)


class Host:
    """One host of a job: its run folder, and the processes on it."""

    def __init__(
        self,
        base: Path,
        out: Path,
        *,
        address: str = "",
        world_size: int = 2,
        run_id: str = "test",
        settings: Mapping[str, str] | None = None,
        agent: str = "",
    ) -> None:
        self.out = out
        self.folder = host_run_folder(spool_base(base), run_key(run_id))
        self.world_size = world_size
        self.address = address or short_ipc(self.folder)
        self.keys = key_file() if is_tcp(self.address) else None
        self.processes: list[subprocess.Popen[str]] = []
        half = {} if self.keys is None else {"keys": str(relays_file(self.keys))}
        header = RunHeader(
            run_id=run_id,
            out=out,
            collector=self.address,
            world_size=world_size,
            settings={**half, **(settings or {})},
            agent=agent,
        )
        write_run_header(self.folder, header)

    def relay(self, *, fresh: bool = False) -> subprocess.Popen[str]:
        return self.start(companion_command(self.folder), "relay", fresh=fresh)

    def collector(
        self, *, fresh: bool = False, address: str = "", **settings: object
    ) -> subprocess.Popen[str]:
        """Start one; a fresh process occupies what it would outside of the tests."""
        command = self.collecting(address=address, **settings)
        return self.start(command, "collector", fresh=fresh)

    def collecting(self, *, address: str = "", **settings: object) -> list[str]:
        """Return the command of a collector, after what it reads is written."""
        settings = {
            "keep_spool": True,
            "drain_seconds": 60.0,  # ranks start at their own pace; who wants it short says so
            "keys": None if address else self.keys,
            **settings,
        }
        where = address or self.address
        return collector_command(self.out, where, self.world_size, **settings)

    def is_listened_to(self) -> bool:
        """True once a collector listens at its `ipc://` address."""
        return Path(self.address.removeprefix("ipc://")).exists()

    def rank(
        self,
        rank: int,
        *,
        batches: int = 3,
        pause_ms: int = 0,
        incarnation: int = 0,
        limit_bytes: int = 64 << 20,
        hangs: bool = False,
        closes: bool = False,
    ) -> subprocess.Popen[str]:
        folder = stream_folder(self.folder, StreamId(rank=rank, incarnation=incarnation))
        numbers = [str(number) for number in (rank, batches, pause_ms, limit_bytes)]
        command = [sys.executable, "-c", RANK, str(folder), *numbers]
        process = forked.Popen(
            [*command, *(["hang"] if hangs else []), *(["closes"] if closes else [])],
            env=environment(),
            stdout=subprocess.PIPE if hangs else None,
            text=True,
        )
        self.processes.append(process)
        return process

    def confirmed(self, rank: int) -> int:
        """The number of the last record a rank knows to be committed."""
        path = self.folder.parent / f"rank{rank:05d}.0.confirmed"
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def log(self, name: str) -> str:
        path = self.folder.parent / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    def start(self, command: list[str], name: str, *, fresh: bool = False) -> subprocess.Popen[str]:
        """Start a companion, whose log has this name."""
        start = subprocess.Popen if fresh else forked.Popen
        with (self.folder.parent / f"{name}.log").open("a") as log:
            process = start(command, env=environment(), stderr=log, text=True)
        self.processes.append(process)
        return process


def environment() -> dict[str, str]:
    kept = companion_environment(os.environ)
    return {**kept, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
