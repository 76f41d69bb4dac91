"""One job of a schedule: its processes, found, started, started again, awaited.

Two ways: `launched` is `rankscope run` as users type it. In a `direct` job the schedule starts each
process and looks after them as a launcher does, so one rank may die while the others go on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rankscope.gather.log import ExitOutcome
from rankscope.run.filenames import LAUNCHER_LOCK_NAME, TRACE_NAME
from rankscope.run.folders import SHARED, FolderLock, mark_job_over
from tests import forked
from tests.gather.jobs import Host, environment
from tests.soak.disks import Disk
from tests.soak.proxy import Proxy, addresses

__all__ = ["Job", "Shape", "kill_all", "processes", "start_nothing_more"]

_PROGRAM = Path(__file__).with_name("program.py")
_BIN = Path(sys.executable).parent
_FINAL = tuple(ExitOutcome)
_ending = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What kind of job it is."""

    way: str
    """`direct` or `launched`."""
    transport: str
    """`own`: a socket in the run folder. `shared`: relays write the trace folder. `proxied`: a
    socket with a proxy before it. `keyed`: the same on TCP, with keys."""
    ranks: int
    steps: int
    pause_ms: int = 20
    ends: str = "exit"
    gloo: bool = False
    restarts: int = 0
    """Lives that fail, and restarts that the launcher has."""
    trace_disk: str = ""
    spool_disk: str = ""
    """File system of its own, "" for none."""
    parquet: bool = False
    """Steps are written while the job runs."""
    spool_mebibytes: int = 8


class Job:
    """The processes of one job, in a folder of its own."""

    def __init__(self, folder: Path, shape: Shape, seed: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.shape = folder, shape
        self.accounts = folder / "accounts"
        self.accounts.mkdir()
        self.disks: dict[str, Disk] = {}
        for what, kind in (("trace", shape.trace_disk), ("spool", shape.spool_disk)):
            if kind:
                self.disks[what] = Disk(
                    folder / f"{what}-disk", kind, 96 if what == "trace" else 64
                )
        base = folder / "spool-disk" if shape.spool_disk else folder / "host"
        base.mkdir(exist_ok=True)
        self.out = (folder / "trace-disk" if shape.trace_disk else folder) / "trace"
        self.held_down: set[str] = set()
        """Companions that nobody starts again for now."""
        self.absent: set[int] = set()
        self.proxy: Proxy | None = None
        self._launcher: subprocess.Popen[str] | None = None
        self._host: Host | None = None
        self._lock: FolderLock | None = None
        self._ranks: dict[int, subprocess.Popen[str]] = {}
        self._companions: dict[str, subprocess.Popen[str]] = {}
        self.prefix: dict[str, list[str]] = {}
        """Words before the command of a companion that is started next."""
        self._base = base
        if shape.way == "launched":
            return
        address, self._bind = "", []
        if shape.transport == "shared":
            address = SHARED
        elif shape.transport in ("proxied", "keyed"):
            address, back = addresses(folder, shape.transport)
            self.proxy = Proxy(address, back, seed)
            self._bind = [back]
        self._host = Host(
            base, self.out, address=address, world_size=shape.ranks, run_id=f"soak-{seed}"
        )
        self._lock = FolderLock(self._host.folder / LAUNCHER_LOCK_NAME, "launcher")

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        if self._host is None:
            self._launch()
            return
        for role in ("collector", "relay"):
            if role not in self.held_down:
                self.start_companion(role)
        for rank in range(self.shape.ranks):
            if rank not in self.absent:
                self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        assert self._host is not None
        variables = {
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN_FOLDER": str(self._host.folder),
            "RANKSCOPE_OUT": str(self.out),
            "RANKSCOPE_SPOOL": str(self._base),
            "RANKSCOPE_STEPS": "all",
            "RANKSCOPE_SPOOL_BYTES": f"{self.shape.spool_mebibytes << 20}",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.shape.ranks),
            "LOCAL_WORLD_SIZE": str(self.shape.ranks),
        }
        with (self.folder / f"rank{rank}.log").open("a") as log:
            self._ranks[rank] = forked.Popen(
                [sys.executable, *self._program()],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                text=True,
            )

    def start_companion(self, role: str) -> None:
        host = self._host
        assert host is not None
        if role == "relay":
            command = host_command(host, "relay", {})
        else:
            options = {"keep_spool": False, "parquet": self.shape.parquet, "drain_seconds": 10.0}
            command = host_command(host, "collector", options, self._bind)
        words = [*self.prefix.pop(role, []), *command]
        with (self.folder / f"{role}.log").open("a") as log:
            self._companions[role] = forked.Popen(
                words, env=environment(), stderr=log, text=True, start_new_session=True
            )

    def _launch(self) -> None:
        shape = self.shape
        words = [str(_BIN / "rankscope"), "run", "--rs-out", str(self.out)]
        words += ["--rs-spool", str(self._base), "--rs-steps", "all"]
        words += ["--rs-spool-bytes", f"{shape.spool_mebibytes}MiB"]
        words += ["--rs-parquet", "1"] if shape.parquet else []
        words += ["--max-restarts", str(shape.restarts), "--nproc-per-node", str(shape.ranks)]
        with (self.folder / "launcher.log").open("a") as log:
            self._launcher = forked.Popen(
                [*words, *self._program()], env={**os.environ}, stdout=log, stderr=log, text=True
            )

    def _program(self) -> list[str]:
        shape = self.shape
        words = [str(_PROGRAM), str(self.accounts), "--steps", str(shape.steps)]
        words += ["--pause-ms", str(shape.pause_ms), "--ends", shape.ends]
        words += ["--fails-until-life", str(shape.restarts)]
        return [*words, "--gloo"] if shape.gloo else words

    # ------------------------------------------------------------------ look

    def has_begun(self) -> bool:
        """True once every rank that was started has made a step."""
        told = [path for path in self.accounts.glob("calls.*") if b"\nstep" in path.read_bytes()]
        return len(told) >= self.shape.ranks - len(self.absent)

    def pids(self, role: str) -> list[int]:
        """Return the living processes of a role: `rank`, `relay`, `collector`, `stepwise`,
        `launcher`."""
        words = {
            "relay": b"relay",
            "collector": b"collector",
            "stepwise": b"rankscope.stepwise",
        }
        program = str(_PROGRAM).encode()
        return [
            pid
            for pid, parts in processes(self.folder)
            if role == "any"
            or (
                words[role] in parts
                if role in words
                else program in parts and self._is_rank(pid) == (role == "rank")
            )
        ]

    def _is_rank(self, pid: int) -> bool:
        return bool([*self.accounts.glob(f"calls.*.{pid}")])

    def tend(self) -> None:
        """Start companions again that were killed, as a launcher does."""
        for role, process in () if _ending.is_set() else self._companions.items():
            code = process.poll()
            if code is not None and code not in _FINAL and role not in self.held_down:
                self.start_companion(role)

    def is_program_over(self) -> bool:
        """True once no rank lives, nor a launcher that may start one."""
        if self._launcher is not None:
            return self._launcher.poll() is not None and not self.pids("rank")
        return all(process.poll() is not None for process in self._ranks.values())

    def are_ranks_over(self) -> bool:
        """True once no rank will write any more."""
        if self._launcher is None:
            return self.is_program_over()
        if self.pids("rank"):
            return False
        ended = [path for path in self.accounts.glob("calls.*") if b"\nend" in path.read_bytes()]
        return len(ended) >= self.shape.ranks or self._launcher.poll() is not None

    def mark_over(self) -> None:
        """As a launcher does when its job has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            if self._host is not None and self._host.folder.is_dir():
                mark_job_over(self._host.folder)

    def has_tree(self) -> bool:
        return (self.out / TRACE_NAME).exists()

    def has_left(self) -> bool:
        """True once no process of the job is there."""
        return not self.pids("any")

    def untraced(self) -> set[int]:
        """Return the ranks that said that they are not traced."""
        return {
            rank
            for rank in self._ranks
            if "rankscope: not tracing" in (self.folder / f"rank{rank}.log").read_text()
        }

    def run_folders(self) -> list[Path]:
        return [path.parent for path in self._base.glob("rankscope-*/*/run.json")]

    def recover(self) -> tuple[Path, str]:
        """Build a tree from what is left; return its folder, and what was said."""
        new = self.folder / "recovered"
        places = [*self.run_folders(), *([self.out] if (self.out / "spool").is_dir() else [])]
        if not places:
            return new, "nothing is left to recover from"
        return new, self._rankscope("recover", *map(str, places), "--out", str(new))

    def follow_advice(self) -> Path | None:
        """Run the command that `verify` prints for an incomplete trace; return the new one, None
        where it prints none."""
        said = self._rankscope("verify", str(self.out))
        found = re.search(r"rankscope (recover .+ --out (\S+))$", said, re.MULTILINE)
        if found is None:
            return None
        said = self._rankscope(*shlex.split(found[1]))
        return Path(found[2]) if (Path(found[2]) / TRACE_NAME).exists() else None

    def _rankscope(self, *words: str) -> str:
        done = forked.run(
            [sys.executable, "-m", "rankscope", *words],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout + done.stderr

    def close(self, *, keep: bool) -> None:
        """End whatever is left of it."""
        if self._lock is not None:
            self._lock.release()
        kill_all(self.folder)
        processes = [self._launcher, *self._ranks.values(), *self._companions.values()]
        for process in processes:
            if process is not None:
                process.kill()
                process.wait()
        if self.proxy is not None:
            self.proxy.close()
        for disk in self.disks.values():
            disk.remove()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def processes(folder: Path) -> list[tuple[int, list[bytes]]]:
    """Return the living processes whose command names something in a folder, with that command."""
    mark, found = str(folder).encode() + b"/", []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                if mark in line:
                    state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
                    found += [(int(name), line.split(b"\0"))] if state != b"Z" else []
    return sorted(found)


def start_nothing_more() -> None:
    """From here on jobs start no process: the tool is about to end."""
    _ending.set()


def kill_all(folder: Path) -> None:
    """End every process that works in a folder."""
    deadline = time.monotonic() + 20
    while (left := processes(folder)) and time.monotonic() < deadline:
        for pid, _ in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def host_command(
    host: Host, role: str, options: dict[str, object], bind: list[str] | None = None
) -> list[str]:
    """Return the command of a companion of this host."""
    from rankscope.run.companions import collector_command, relay_command

    if role == "relay":
        return relay_command(host.folder)
    own = [] if host.address == SHARED else [host.address]
    return collector_command(
        host.out, bind=bind or own, world_size=host.world_size, keys=host.keys, **options
    )
