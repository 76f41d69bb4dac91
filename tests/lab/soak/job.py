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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.run.folders import LAUNCHER_LOCK_NAME, SHARED, TRACE_NAME, FolderLock, mark_job_over
from rankscope.run.processes import companion_command
from tests import forked
from tests.companion.jobs import Host, collector_command, environment
from tests.lab.soak.disks import Disk
from tests.lab.soak.network import COLLECTOR, Network, address_of
from tests.lab.soak.proxy import Proxy, addresses
from tests.ports import free_port

__all__ = ["Job", "Shape", "kill_all", "processes", "start_nothing_more"]

_PROGRAM = Path(__file__).with_name("program.py")
_BIN = Path(sys.executable).parent
_FINAL = (0, 2, 3, 4, 5, 6)
"""Exit codes of a relay or collector that nobody starts again (docs/commands/run.md)."""
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
    last: int = 0
    """Whole steps that the ranks hold back (`last:N`); 0 where every step is sent."""
    nans: tuple[tuple[int, int], ...] = ()
    """Steps in which the program sees a value that is not finite, and on which rank."""
    blocks: int = 3
    hosts: int = 1
    """Run folders, each with a relay, that have an equal part of the ranks."""
    namespaces: bool = False
    """Each host is a network namespace."""
    finish_seconds: float = 60.0

    @property
    def steps_setting(self) -> str:
        return f"last:{self.last}" if self.last else "all"

    def host_of(self, rank: int) -> int:
        return rank * self.hosts // self.ranks


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
        self.out = (folder / "trace-disk" if shape.trace_disk else folder) / "trace"
        self.held_down: set[str] = set()
        """Companions that nobody starts again for now: `collector`, `relay` (all of them), `relay1`
        (of the second host)."""
        self.absent: set[int] = set()
        self.proxy: Proxy | None = None
        self.network: Network | None = None
        self._launcher: subprocess.Popen[str] | None = None
        self._hosts: list[Host] = []
        self._locks: list[FolderLock] = []
        self._ranks: dict[int, subprocess.Popen[str]] = {}
        self._companions: dict[str, subprocess.Popen[str]] = {}
        self.prefix: dict[str, list[str]] = {}
        """Words before the command of a companion that is started next."""
        self._bases = [folder / f"host{host}" for host in range(shape.hosts)]
        if shape.spool_disk:
            self._bases[-1] = folder / "spool-disk"
        for base in self._bases:
            base.mkdir(exist_ok=True)
        if shape.way == "launched":
            return
        address = self._bind = ""
        if shape.namespaces:
            self.network = Network(shape.hosts)
        if shape.transport == "shared":
            address = SHARED
        elif shape.namespaces:
            address = COLLECTOR
            self._bind = address
        elif shape.transport in ("proxied", "keyed"):
            address, back = addresses(folder, shape.transport)
            self.proxy = Proxy(address, back, seed)
            self._bind = back
        settings = {"finish-seconds": str(shape.finish_seconds)}
        settings |= {"steps": shape.steps_setting} if shape.last else {}
        self._store_port = free_port()
        for base in self._bases:
            host = Host(
                base,
                self.out,
                address=address,
                world_size=shape.ranks,
                run_id=f"soak-{seed}",
                settings={
                    **settings,
                    "out": str(self.out),
                    "spool": str(base),
                    "steps": shape.steps_setting,
                    "spool-bytes": str(shape.spool_mebibytes << 20),
                },
            )
            self._hosts.append(host)
            self._locks.append(FolderLock(host.folder / LAUNCHER_LOCK_NAME, "launcher"))

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        if not self._hosts:
            self._launch()
            return
        self.start_companions("collector", "relay")
        for rank in range(self.shape.ranks):
            if rank not in self.absent:
                self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        number = self.shape.host_of(rank)
        host = self._hosts[number]
        variables = {
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN_FOLDER": str(host.folder),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.shape.ranks),
            "LOCAL_WORLD_SIZE": str(self.shape.ranks),
            "MASTER_ADDR": "127.0.0.1" if self.network is None else address_of(0),
            "MASTER_PORT": str(self._store_port),
            **({} if self.network is None else {"GLOO_SOCKET_IFNAME": "eth0"}),
        }
        words = [sys.executable, *self._program()]
        self._ranks[rank] = self._run(words, number, f"rank{rank}", {**os.environ, **variables})

    def start_companions(self, *roles: str) -> None:
        """Start those of these roles that are not at work, nor held down."""
        names = [f"relay{host}" for host in range(len(self._hosts))]
        for role in roles:
            for name in names if role == "relay" else [role]:
                at_work = self._companions.get(name)
                is_held_down = name in self.held_down or role in self.held_down
                if not is_held_down and (at_work is None or at_work.poll() is not None):
                    self._start_companion(name)

    def _start_companion(self, name: str) -> None:
        number = int(name[-1]) if name != "collector" else 0
        host, role = self._hosts[number], name.rstrip("0123456789")
        if role == "relay":
            command = companion_command(host.folder)
        else:
            command = collector_command(
                self.out,
                self._bind or host.address,
                self.shape.ranks,
                keys=host.keys,
                parquet=self.shape.parquet,
                drain_seconds=10.0,
                finish_seconds=self.shape.finish_seconds,
            )
        words = [*self.prefix.pop(role, []), *command]
        self._companions[name] = self._run(words, number, name, environment())

    def _run(
        self, words: list[str], host: int, name: str, variables: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Run a command on a host."""
        with (self.folder / f"{name}.log").open("a") as log:
            if self.network is None:
                return forked.Popen(
                    words,
                    env=variables,
                    stdout=log,
                    stderr=log,
                    text=True,
                    start_new_session=not name.startswith("rank"),
                )
            return subprocess.Popen(
                self.network.inside(host, words), env=variables, stdout=log, stderr=log, text=True
            )

    def _launch(self) -> None:
        shape = self.shape
        words = [str(_BIN / "rankscope"), "run", "--rs-out", str(self.out)]
        words += ["--rs-spool", str(self._bases[0]), "--rs-steps", shape.steps_setting]
        words += ["--rs-finish-seconds", f"{shape.finish_seconds:g}"]
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
        words += ["--fails-until-life", str(shape.restarts), "--blocks", str(shape.blocks)]
        words += ["--nan", *(f"{step}@{rank}" for step, rank in shape.nans)] if shape.nans else []
        return [*words, "--gloo"] if shape.gloo else words

    # ------------------------------------------------------------------ look

    def has_begun(self) -> bool:
        """True once every rank that was started has made a step."""
        told = [path for path in self.accounts.glob("calls.*") if b"\nstep" in path.read_bytes()]
        return len(told) >= self.shape.ranks - len(self.absent)

    def step(self) -> int:
        """Return the furthest step that a rank is in, as the programs wrote down."""
        furthest = -1
        for path in self.accounts.glob("calls.*"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                for line in file.read().split(b"\n")[1:-1]:
                    if line.startswith(b"call "):
                        furthest = max(furthest, int(line.split()[1]))
        return furthest

    def pids(self, role: str, host: int | None = None) -> list[int]:
        """Return the living processes of a role: `rank`, `relay`, `collector`, `reader`,
        `builder` of the tree, `launcher`; of ranks and relays those of one host, where it is
        given."""
        if host is not None:
            mark = str(self._bases[host]).encode()
            known = dict(processes(self.folder))
            return [
                pid
                for pid in self.pids(role)
                if any(part.startswith(mark) for part in known.get(pid, ()))
                or self._host_of(pid) == host
            ]
        words = {
            "relay": {b"rankscope.companion"},
            "collector": {b"rankscope.companion"},
            "reader": {b"rankscope.companion.running", b"--run-folder"},
            "builder": {b"--build-tree"},
        }
        out = str(self.out).encode()
        program = str(_PROGRAM).encode()
        return [
            pid
            for pid, parts in processes(self.folder)
            if role == "any"
            or (
                words[role] <= set(parts)
                and (role in ("reader", "builder") or self._is_role(role, out in parts))
                if role in words
                else program in parts and self._is_rank(pid) == (role == "rank")
            )
        ]

    def _is_role(self, role: str, is_by_hand: bool) -> bool:
        """True for a companion of that role; that of a launched job is both."""
        return not self._hosts or (role == "collector") == is_by_hand

    def _is_rank(self, pid: int) -> bool:
        return bool([*self.accounts.glob(f"calls.*.{pid}")])

    def _host_of(self, pid: int) -> int | None:
        found = [path.name.split(".")[1] for path in self.accounts.glob(f"calls.*.{pid}")]
        return self.shape.host_of(int(found[0])) if found else None

    def tend(self) -> None:
        """Start companions again that were killed, as a launcher does."""
        for name, process in () if _ending.is_set() else [*self._companions.items()]:
            code, role = process.poll(), name.rstrip("0123456789")
            if code is not None and code not in _FINAL and not {name, role} & self.held_down:
                self._start_companion(name)

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
        for number, host in enumerate(self._hosts):
            if self._locks and f"relay{number}" not in self.held_down and host.folder.is_dir():
                with contextlib.suppress(OSError, SpoolError):  # a full disk: the lock says it
                    mark_job_over(host.folder)
        for lock in self._locks:
            lock.release()
        self._locks = []

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
        return [p.parent for base in self._bases for p in base.glob("rankscope-*/*/run.json")]

    def recover(self) -> tuple[Path, str]:
        """Build a tree from what is left; return its folder, and what was said."""
        new = self.folder / "recovered"
        has_any = (self.out / "spool").is_dir() or self.has_tree()
        places = [*self.run_folders(), *([self.out] if has_any else [])]
        if not places:
            return new, "nothing is left to recover from"
        return new, self.rankscope("recover", *map(str, places), "--out", str(new))[1]

    def follow_advice(self) -> Path | None:
        """Run the command that `verify` prints for an incomplete trace; return the new one, None
        where it prints none."""
        _, said = self.rankscope("verify", str(self.out))
        found = re.search(r"rankscope (recover .+ --out (\S+))$", said, re.MULTILINE)
        if found is None:
            return None
        self.rankscope(*shlex.split(found[1]))
        return Path(found[2]) if (Path(found[2]) / TRACE_NAME).exists() else None

    def has_said_nothing_happened(self) -> bool:
        """True where the launcher, or the collector by its exit code, says that all is in order and
        there is no trace."""
        if self._launcher is not None:
            return "nothing happened" in (self.folder / "launcher.log").read_text()
        collector = self._companions.get("collector")
        return collector is not None and collector.poll() == 0 and not self.has_tree()

    def rankscope(self, *words: str) -> tuple[int, str]:
        """Run a command to its end; return its exit code, and what it printed."""
        done = forked.run(
            [sys.executable, "-m", "rankscope", *words],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    def close(self, *, keep: bool) -> None:
        """End whatever is left of it."""
        for lock in self._locks:
            lock.release()
        kill_all(self.folder)
        processes = [self._launcher, *self._ranks.values(), *self._companions.values()]
        for process in processes:
            if process is not None:
                process.kill()
                process.wait()
        if self.proxy is not None:
            self.proxy.close()
        if self.network is not None:
            self.network.remove()
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
