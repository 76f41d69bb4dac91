"""Starting Python programs as forks of a Python that has torch loaded: no two seconds per process.

    done = forked.run([sys.executable, "train.py"], capture_output=True)     # as subprocess.run
    job = forked.Popen([BIN / "rankscope", "run", "train.py"])               # as subprocess.Popen

Processes are real: the children of whoever starts them, with arguments, variables, descriptors,
signals and exit status of their own. What such a process starts by `subprocess` is forked as well
(ranks under torchrun, relay and collector). A command that a fork cannot stand for is executed as
ever: no Python of ours, options of the interpreter, variables that Python or torch read at their
start. Tests about ways of starting use `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Popen", "run"]

_AT_START = ("PYTHON", "TORCH", "OMP_", "MKL_", "LD_")
"""Variables that are read when a process starts begin with these,"""
_LATER = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DIST_INIT_BARRIER"),
    "TORCHINDUCTOR_CACHE_DIR",  # set by the first compilation, and read by each
    "PYTHONHASHSEED",  # that texts hash alike in several runs: in forks of one process they do
)
"""except for these."""
_CAN_FORK = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
_ROOM = 32768
"""Bytes for a command line, and for its variables, as /proc shows them."""


class _Server:
    """A process that forks on demand."""

    def __init__(
        self, channel: socket.socket, starts: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._channel = channel
        self._starts = starts
        """How many generations of what is forked get a server of their own, for what they start."""
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._variables = _read_at_start(environ)

    def stands_for(self, environ: Mapping[str, str]) -> bool:
        """True where a fork would be as a process that starts with these variables."""
        return os.getpid() == self._owner and _read_at_start(environ) == self._variables

    def start(self, command: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Have the command run; return the process, a child of this one."""
        body = pickle.dumps({"starts": self._starts, **command})
        with self._lock:
            socket.send_fds(self._channel, [len(body).to_bytes(8, "little")], [*descriptors])
            self._channel.sendall(body)
            answer = self._channel.recv(8)
        if len(answer) != 8:
            raise RuntimeError("the fork server has died: what it said stands on stderr")
        return int.from_bytes(answer, "little")


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_AT_START) and not name.startswith(_LATER)
    }


@functools.cache
def _server() -> _Server:
    """The server of this process, started when it is first needed."""
    ours, theirs = socket.socketpair()
    folder = Path(__file__).resolve().parent / "lab" / "forkserver"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-X", "frozen_modules=off", "-m", "forkserver", str(theirs.fileno())]
            + [" " * _ROOM],
            env={
                **{n: v for n, v in os.environ.items() if not n.startswith("RANKSCOPE")},
                "PYTHONPATH": str(folder),
                "ROOM": " " * _ROOM,
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    if ours.recv(5) != b"ready":
        raise RuntimeError("the fork server did not start: what it said stands on stderr")
    atexit.register(_end, ours, process, os.getpid())
    return _Server(ours, starts=1)


def _end(channel: socket.socket, server: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it, which holds the same socket
        channel.shutdown(socket.SHUT_RDWR)
        channel.close()
        server.wait()


def _words_of(args: Any) -> tuple[list[str], bool] | None:
    """Return what follows `python` in a command of this environment, and whether it is unbuffered;
    None for any other command.
    """
    if isinstance(args, (str, bytes, os.PathLike)) or not args:
        return None
    words = [os.fsdecode(word) for word in args]
    if os.path.dirname(words[0]) != os.path.dirname(sys.executable):
        return None
    is_unbuffered = False
    if os.path.basename(words[0]).startswith("python"):
        words = words[1:]
        is_unbuffered = words[:1] == ["-u"]
        words = words[is_unbuffered:]
    elif not _is_ours(words[0]):
        return None
    if not words:
        return None
    if words[0] in {"-c", "-m"}:
        return (words, is_unbuffered) if len(words) > 1 else None
    return None if words[0].startswith("-") else (words, is_unbuffered)


def _is_ours(path: str) -> bool:
    """True for a script of this Python's environment."""
    with open(path, "rb") as file:
        first = os.fsdecode(file.readline())
    return first.startswith(f"#!{os.path.dirname(sys.executable)}/python")


def _start(
    get_server: Callable[[], _Server],
    original: Callable[..., None],
    process: subprocess.Popen[Any],
    *arguments: Any,
) -> None:
    """Stand in for `Popen._execute_child`: ask the server where a fork will do."""
    given = inspect.signature(original).bind(process, *arguments).arguments
    environ = dict(os.environ if given["env"] is None else given["env"])
    cwd = os.fspath(given["cwd"] or os.getcwd())
    found = _words_of(given["args"])
    wanted = ("preexec_fn", "shell", "executable")
    pipes = [("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)]
    standard = [number if given[name] == -1 else given[name] for name, number in pipes]
    if (
        found is None
        or not _CAN_FORK
        or any(given[name] for name in wanted)
        or not given["close_fds"]
        or not os.path.isdir(cwd)
        or not all(os.path.exists(f"/proc/self/fd/{number}") for number in standard)
        or not (found[0][0] in {"-c", "-m"} or os.path.isfile(os.path.join(cwd, found[0][0])))
        or not get_server().stands_for(environ)
    ):
        original(process, *arguments)
        return
    passed = [*given["pass_fds"]]
    command = {
        "words": found[0],
        "unbuffered": found[1] or bool(environ.get("PYTHONUNBUFFERED")),
        "environ": environ,
        "cwd": cwd,
        "new_session": bool(given["start_new_session"]),
        "targets": [0, 1, 2, *passed],
    }
    if (generations := getattr(process, "generations", None)) is not None:
        command["starts"] = generations
    try:
        process.pid = get_server().start(command, [*standard, *passed])
        process._child_created = True  # type: ignore[attr-defined]
    finally:
        process._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            given["errread"], given["errwrite"],
        )  # fmt: skip


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose Python is a fork, as is what it starts: so many generations."""

    def __init__(self, *arguments: Any, generations: int = 1, **how: Any) -> None:
        self.generations = generations
        super().__init__(*arguments, **how)

    def _execute_child(self, *arguments: Any) -> None:
        _start(_server, subprocess.Popen._execute_child, self, *arguments)  # type: ignore[attr-defined]


def run(
    command: Sequence[object],
    *,
    capture_output: bool = False,
    check: bool = False,
    input: Any = None,
    timeout: float = 300.0,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as `subprocess.run` does."""
    if capture_output:
        how = {**how, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        how["stdin"] = subprocess.PIPE
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in command]
    with Popen(words, **how) as process:
        try:
            out, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
    if check and code:
        raise subprocess.CalledProcessError(code, words, out, errors)
    return subprocess.CompletedProcess(words, code, out, errors)


def fork_what_this_process_starts(
    channel: socket.socket, environ: Mapping[str, str], starts: int
) -> None:
    """From here on what this process starts by `subprocess` is forked by another server.

    Args:
        channel: leads there.
        environ: the variables with which torch was imported there.
        starts: generations behind the next one that are forked as well.
    """
    server = _Server(channel, starts=starts, environ=environ)
    original = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: subprocess.Popen[Any], *arguments: Any) -> None:
        _start(lambda: server, original, self, *arguments)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
