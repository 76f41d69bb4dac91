"""`rankscope run` as a process of its own, whose companions and ranks can be found and killed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import forked
from tests.waiting import wait_until

BIN = Path(sys.executable).parent
_LOOKS = 6
"""A launcher waits less often than this between starting its last rank and looking after it."""
SCRIPT = """
import ctypes, os, pathlib, signal, sys, time
rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
folder, ways = pathlib.Path(sys.argv[1]), sys.argv[2:]
way = ways[rank]
if way == "early":
    sys.exit(0)
if way == "import":
    time.sleep(600)
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()
def meet(what):
    (folder / f"{what}.{life}.{rank}").touch()
    while len([*folder.glob(f"{what}.{life}.*")]) < sum(w not in ("early", "import") for w in ways):
        time.sleep(0.005)
losses = [step(), step()]
meet("trained")
steps = 2
while way == "wait" and not (folder / "go").exists():
    step()
    steps += 1
    (folder / f"new.{rank}").write_text(str(steps - 1))  # known to be committed but the last
    (folder / f"new.{rank}").replace(folder / f"steps.{rank}")  # whole whenever the rank is killed
    time.sleep(0.005)
while way == "pause" and not (folder / "go").exists():
    time.sleep(0.005)
os.write(1, f"{rank} {way} {losses[0]} {losses[1]}\\n".encode())
if way == "raise":
    raise ValueError("on purpose")
if way == "os._exit":
    os._exit(3)
if way == "sigkill":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "abort":
    os.abort()
if way == "segfault":
    ctypes.string_at(0)
if way == "sleep":
    time.sleep(600)
"""


class Launch:
    """One `rankscope run` of `SCRIPT`, in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        ways: list[str],
        *options: object,
        out: str = "trace",
        script: str = SCRIPT,
    ) -> None:
        self.folder = folder
        self.out = folder / out
        self.spool = folder / "spool"
        self.meeting = folder / "meeting"
        self.meeting.mkdir(parents=True)
        (folder / "script.py").write_text(script)
        self._texts: tuple[str, str] | None = None
        given = ["--rs-out", self.out, "--rs-spool", self.spool, "--rs-drain-seconds", 1, *options]
        command = [BIN / "rankscope", "run", *given, "--nproc-per-node", len(ways)]
        self.process = forked.Popen(
            [*map(str, command), str(folder / "script.py"), str(self.meeting), *ways],
            stdout=(folder / "stdout").open("w"),
            stderr=(folder / "stderr").open("w"),
            cwd=folder,
            start_new_session=True,
        )

    def trained(self, life: int = 0) -> None:
        """Wait until every rank has been traced, and waits."""
        ranks = len(self.process.args) - self.process.args.index(str(self.meeting)) - 1
        assert wait_until(lambda: len([*self.meeting.glob(f"trained.{life}.*")]) == ranks), self.err

    def go(self) -> None:
        """Let the ranks that wait end."""
        (self.meeting / "go").touch()

    def wait(self) -> int:
        """Wait for the end of the launcher; return its exit code."""
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            lives = f"ranks {self.ranks()} and companion {self.companion()} live"
            raise AssertionError(f"{lives}\n{self.logs}") from None

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def last_line(self) -> str:
        """What rankscope said last on stderr, before the verdict."""
        return before_verdict(self.err.splitlines())[-1]

    @property
    def logs(self) -> str:
        """What stderr and its companions' logs hold: why a test failed."""
        found = [self.folder / "stderr", *self.out.glob("*.log"), *self.spool.rglob("*.log")]
        return "\n".join(f"{path}:\n{path.read_text()}" for path in found)

    def companion(self) -> int:
        """Process number of the companion; 0 where none lives."""
        mark = str(self.spool).encode()
        for pid in pids():
            words = command_line(pid)
            if b"rankscope.companion" in words and any(word.startswith(mark) for word in words):
                return pid
        return 0

    def beside(self) -> int:
        """Process number of what goes with the job step by step; 0 where none lives."""
        wanted, mark = {b"rankscope.companion.running", b"--run-folder"}, str(self.spool).encode()
        for pid in pids():
            words = command_line(pid)
            if wanted <= set(words) and any(word.startswith(mark) for word in words):
                return pid
        return 0

    def ranks(self) -> list[int]:
        """Process numbers of the ranks."""
        script = str(self.folder / "script.py").encode()
        return [
            pid
            for pid in pids()
            if pid != self.process.pid
            and script in command_line(pid)
            and b"run" not in command_line(pid)
        ]

    def stop(self) -> None:
        """End whatever of it still lives."""
        for pid in [*self.ranks(), self.companion()]:
            kill(pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def before_verdict(lines: list[str]) -> list[str]:
    """Return the lines that are rankscope's, without that of the verdict."""
    words = "no fault found", "clean", "fault", "incomplete", "not judged yet"
    verdicts = tuple(f"rankscope: {word}" for word in words)
    own = (line for line in lines if line.startswith("rankscope: "))
    return [line for line in own if not line.startswith(verdicts)]


Start = Callable[..., Launch]
"""`start(ways, options...)`."""


@contextlib.contextmanager
def launching(folder: Path, script: str, *usual: object) -> Iterator[Start]:
    """Give what starts jobs of one script, each in a folder of its own; end all that still live.

    Args:
        folder: where these folders are.
        script: what every rank runs.
        usual: options of those that are started without any.
    """
    started: list[Launch] = []

    def start(ways: list[str], *options: object) -> Launch:
        place = folder / f"job{len(started)}"
        started.append(Launch(place, ways, *(options or usual), script=script))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.stop()


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, if there is one."""
    if pid:  # 0 would be this very process group
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until_it_watches(pid: int) -> None:
    """Wait until a launcher whose ranks run looks after them, again and again.

    A rank may run before its launcher has noted it: a launcher that a signal ends then leaves that
    rank behind.
    """
    status = Path(f"/proc/{pid}/status")

    def times_waited() -> int:
        return int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = times_waited()
    assert wait_until(lambda: times_waited() >= before + _LOOKS)


def rankscope(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return forked.run(
        [BIN / "rankscope", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def run_named_command(line: str, cwd: Path) -> Path:
    """Run the `rankscope recover` command that a line names; return the new trace folder."""
    words = shlex.split("rankscope recover" + line.partition("rankscope recover")[2].rstrip(")"))
    done = rankscope(*words[1:], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / words[words.index("--out") + 1]
