"""A Python that has imported torch, and becomes a fresh Python for each command it is sent.

    python -X frozen_modules=off -m forkserver SOCKET PADDING        (this folder on PYTHONPATH)

`python -m` imports `runpy`, and finds this file. Importing it serves commands until the socket
closes. In each fork the import returns, and Python goes on as it would have with that command: it
runs the program with no frame below it, handles what leaves it, calls `atexit` and finalizes.

What a fork shares with a Python that was started by its command:

* It is a child of the process that asked (`CLONE_PARENT`): its number, parent, signals and exit
  status are real.
* `torch` is not in `sys.modules`. Its first import goes through every finder on `sys.meta_path`,
  takes a millisecond, and brings back the modules that were loaded before.
* The start-up file `rankscope.pth` has run, where it is installed, with the command's variables.

What differs: hash seed and addresses are the same in all forks; modules of other packages that
torch needs are in `sys.modules` from the start; no destructor of a C++ library runs at the end, and
torch does not take back its operators one by one; Triton cannot be imported (its library complains
on stderr about every module that is left loaded at the end); and variables that Python or torch
read when they start are those of this process (`tests.forked` runs a command that has other ones in
the ordinary way).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import platform
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = (
    "torch",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "numpy",
    "xxhash",
    "msgpack",
    "zmq",
    "safetensors",
    "typer",
)
_FIRST_SPARE = 200
"""Descriptors from here on are this file's own, below are the program's."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 1, 40
_QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Sent to a whole process group, they end the program and not the server in it."""


def _real(name: str) -> ModuleType:
    """Return the standard library's module that this file stands in front of."""
    path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- torch, as if it had not been imported -------------------------------------------------------


class _Kept(MetaPathFinder, Loader):
    """Finds torch where it was left, and puts it and its parts back."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self._spec is None:
            return None
        found = ModuleSpec("torch", self, origin=self._spec.origin, is_package=True)
        found.submodule_search_locations = self._spec.submodule_search_locations
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        module.__loader__ = self._spec.loader if self._spec is not None else None
        sys.modules.update(self._modules)
        sys.meta_path.remove(self)
        module.default_generator.seed()  # as every process that imports torch has its own


# ---- one fork ------------------------------------------------------------------------------------


def _sibling() -> int:
    """Fork a child of this process's parent; return its number, 0 in the child."""
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    tid = ctypes.c_void_p()
    flags = _CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid)) == 0:
        flags |= _CHILD_SETTID | _CHILD_CLEARTID  # as `fork` does: glibc keeps the number there
    where = (tid, None) if platform.machine() == "x86_64" else (None, tid)
    clone = libc.syscall
    clone.restype = ctypes.c_long
    number = ctypes.c_long(_CLONE[platform.machine()])
    python.PyOS_BeforeFork()
    pid: int = clone(number, ctypes.c_ulong(flags), None, None, *where)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """Return the next command, None once the other side is gone."""
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 64)
    if not head:
        return None
    size = int.from_bytes(head, "little")
    body = b""
    while len(body) < size:
        body += channel.recv(size - len(body))
    command: dict[str, Any] = pickle.loads(body)
    command["received"] = descriptors
    return command


def _place_descriptors(command: dict[str, Any], keep: int) -> None:
    """Give every received descriptor its number; close all others but `keep`."""
    high = _FIRST_SPARE + 1
    spare = [_duplicate(number, high) for number in command["received"]]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in spare and number != keep:
            with contextlib.suppress(OSError):
                os.close(number)
    for number, target in zip(spare, command["targets"]):
        os.dup2(number, target)
        os.close(number)


def _duplicate(number: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least)


def _show_as(words: Sequence[str], environ: dict[str, str]) -> None:
    """Have /proc/PID say what runs and with which variables, in the room that this process's own
    words and variables took. Nothing else refers to that memory once `os.environ` is replaced.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    told = [os.fsencode(word) for word in words]
    given = [os.fsencode(f"{name}={value}") for name, value in environ.items()]
    for first, each in ((45, told), (47, given)):
        begin, end = int(fields[first]), int(fields[first + 1])
        text = b"\0".join(each)[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _module_path(words: Sequence[str], environ: dict[str, str]) -> list[str]:
    """Return `sys.path` as Python makes it for a command."""
    variable = environ.get("PYTHONPATH")
    given = map(os.path.abspath, variable.split(os.pathsep) if variable else ())
    if environ.get("PYTHONSAFEPATH") and sys.version_info >= (3, 11):
        first = []
    elif words[0] in {"-c", "-m"}:
        first = ["" if words[0] == "-c" else os.getcwd()]
    else:
        first = [os.path.dirname(os.path.realpath(words[0]))]
    return [*first, *dict.fromkeys([*given, *_installed])]  # site drops what is there twice


def _become(command: dict[str, Any]) -> None:
    """Make this fork what the command's Python would be just before it runs its program."""
    words: list[str] = command["words"]
    environ: dict[str, str] = command["environ"]
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(environ)
    _show_as([sys.executable, *words], environ)
    sys.argv = [words[0], *words[2:]] if words[0] in {"-c", "-m"} else list(words)
    sys.orig_argv = [sys.executable, *words]
    sys.path[:] = _module_path(words, environ)
    kept = _Kept()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    sys.meta_path.insert(0, kept)
    if sys.dont_write_bytecode:  # it is still written for the forks, or all would compile the same
        sys.dont_write_bytecode, sys.pycache_prefix = False, _bytecode
    importlib.invalidate_caches()
    _open_streams(command["unbuffered"])
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    startup = Path(_packages, "rankscope.pth")
    if startup.exists():
        exec(startup.read_text())
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # no destructors of torch's libraries: they take long
    _runpy._run_module_as_main = _main_of(words)  # type: ignore[attr-defined]


def _open_streams(unbuffered: bool) -> None:
    """Make the standard streams anew: the server's knew the null device."""
    for number, before in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        file: Any = io.FileIO(number, "w" if number else "r", closefd=False)
        if not number or not unbuffered:
            file = io.BufferedWriter(file) if number else io.BufferedReader(file)
        stream = io.TextIOWrapper(
            file,
            before.encoding,
            before.errors,
            "\n" if number else None,
            line_buffering=number == 2 or file.isatty(),
            write_through=unbuffered and number > 0,
        )  # fmt: skip
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _main_of(words: Sequence[str]) -> Any:
    """Return what runs the program, for C to call with two arguments that say nothing here."""
    if words[0] == "-m":
        real = _runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda *_: real(words[1])
    # the calls behind `python -c` and `python script.py`: they print what the program raises, and
    # leave by themselves where it calls sys.exit; C ignores arguments that are too many
    if words[0] == "-c":
        run, given = ctypes.pythonapi.PyRun_SimpleStringFlags, (words[1].encode(), None)
    else:
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(libc.fopen(os.fsencode(words[0]), b"rb"))
        run = ctypes.pythonapi.PyRun_SimpleFileExFlags
        given = (file, os.fsencode(words[0]), 1, None)
    run.restype = _leave
    return functools.partial(run, *given)


def _leave(failed: int) -> None:
    if failed:
        raise SystemExit(1)


def _leave_loaded() -> None:
    """Take what was loaded before the program out of the way of Python's end, which would take a
    second to undo it module by module. Called at exit, after everything else.
    """
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(_packages):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


# ---- serving -------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> None:
    """Fork for each command; return in the forks."""
    while True:
        command = _receive(channel)
        if command is None:
            if os.getpid() == _first:
                shutil.rmtree(_bytecode, ignore_errors=True)
            os._exit(0)
        pid = _sibling()
        if pid:
            for number in command["received"]:
                os.close(number)
            channel.sendall(pid.to_bytes(8, "little"))
            continue
        channel.close()
        if command["new_session"]:
            os.setsid()
        keep = -1
        if command["starts"]:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:  # a server for what the program starts, as clean as this one
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                _place_descriptors({"received": [], "targets": []}, theirs.fileno())
                channel = theirs
                continue
            theirs.close()
            keep = _duplicate(ours.fileno(), _FIRST_SPARE)
            ours.close()
        _place_descriptors(command, keep)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET)
        if keep >= 0:
            channel = socket.socket(fileno=keep)
            _forked.fork_what_this_process_starts(channel, _environ, command["starts"] - 1)
        _become(command)
        return


_runpy = sys.modules["runpy"] = _real("runpy")
sys._xoptions.pop("frozen_modules", None)
sys.path.pop(0)  # the working directory
sys.path.remove(str(Path(__file__).parent))
_packages = sysconfig.get_path("purelib")
_environ = dict(os.environ)
_first = os.getpid()
_bytecode = tempfile.mkdtemp(prefix="bytecode-")
_installed = list(sys.path)
_forked_spec = importlib.util.spec_from_file_location(
    "_forked", Path(__file__).resolve().parents[2] / "forked.py"
)
assert _forked_spec is not None
assert _forked_spec.loader is not None
_forked = importlib.util.module_from_spec(_forked_spec)
_forked_spec.loader.exec_module(_forked)
_channel = socket.socket(fileno=int(sys.argv[1]))
atexit.register(_leave_loaded)
sys.modules["triton"] = None  # type: ignore[assignment]
for _name in PRELOADED:
    importlib.import_module(_name)
assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread: no fork is safe"
signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)
for _each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
    _each.atexit = False  # those of torch's operators touch a third of the memory: it is copied
gc.collect()
gc.freeze()
_channel.sendall(b"ready")
_serve(_channel)
