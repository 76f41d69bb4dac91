"""The digest in one pass over memory: `kernel.c`, compiled on this host, loaded by its ranks.

Whoever starts a job on a host calls `build` once, outside of any rank; ranks only `load` what lies
ready. Where there is no compiler, no folder that is ours alone, or no library that gives numpy's
numbers, there is no kernel, and numpy goes on doing all of it.

RANKSCOPE_KERNEL=off takes numpy wherever it is set; CC names the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rankscope.capture.codefolders import is_off, made_folders, no_folder, trusted_files
from rankscope.capture.kernelcalls import Kernel, gives_numpys_numbers

_SOURCE: Final = Path(__file__).with_name("kernel.c")
_FLAGS: Final = (
    *("-O3", "-std=gnu99", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: NaN has to stay NaN
)
_TARGETS: Final = (("-march=native",), ("-mcpu=native",), ())
"""Compilers disagree on the option that means this very machine."""
_BUILD_TIMEOUT_S: Final = 30.0

_TRUSTED: Final[dict[Path, Kernel]] = {}
_TOLD: Final[set[str]] = set()


def build() -> Path | None:
    """Return the library compiled for this machine, compiling it where that has not been done yet;
    None where there is no compiler, no safe folder, or no working result.

    Takes a second, ten at most; safe in many processes at once, each of which may compile, and the
    last of which gives its name. For whoever starts ranks, never for a rank.
    """
    if is_off():
        return None
    ready = load()
    if ready is not None:
        return ready.path
    compiler = _compiler()
    name = _library_name()
    if compiler is None or name is None:
        return None
    deadline = time.monotonic() + _BUILD_TIMEOUT_S
    for folder in made_folders():
        with contextlib.suppress(OSError):
            if _compile(compiler, folder / name, deadline):
                return folder / name
    return None


def prepare(say: Callable[[str], object]) -> None:
    """Build the kernel; say once what a user has to know where there is none."""
    if build() is None and not is_off() and (reason := why_none()) not in _TOLD:
        _TOLD.add(reason)
        say(f"{reason}: numpy takes the digests on CPU, about three times slower; rankscope doctor")


def why_none() -> str:
    """Return why `build` gave no kernel."""
    if reason := no_folder():
        return reason
    compiler = _compiler()
    if compiler is None:
        return "there is no C compiler"
    folder = next(made_folders())
    return f"what {compiler[0]} compiles in {folder} does not load (noexec?) or gives other numbers"


def load() -> Kernel | None:
    """Return the kernel that `build` left on this host, None where there is none to be trusted:
    library and folder belong to this user alone, and it gives the numbers of numpy."""
    if is_off():
        return None
    name = _library_name()
    if name is None:
        return None
    checked = map(_checked, trusted_files(name))
    return next((kernel for kernel in checked if kernel is not None), None)


@functools.cache
def _library_name() -> str | None:
    """Return the name for this source on this kind of machine, None without the source. A home
    shared by machines of several kinds holds one library for each."""
    try:
        source = _SOURCE.read_bytes()
    except OSError:
        return None
    parts = (source, repr((_FLAGS, _TARGETS)).encode(), _processor().encode())
    name = hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    return f"digest-{name}.so"


def _processor() -> str:
    """Return what tells machines apart that cannot run each other's code."""
    wanted = ("flags", "features", "model name", "vendor_id", "cpu family", "model",
              "cpu implementer", "cpu architecture", "cpu part", "isa")  # fmt: skip
    found = [platform.machine()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip() and len(found) > 1:
                    break
                if line.partition(":")[0].strip().lower() in wanted:
                    found.append(line.strip())
    except OSError:
        found.append(platform.processor())
    return "\n".join(found)


def _compiler() -> list[str] | None:
    chosen = os.environ.get("CC", "").split()
    for command in ([chosen] if chosen else []) + [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) is not None:
            return command
    return None


def _compile(compiler: list[str], path: Path, deadline: float) -> bool:
    """Compile and check a draft, then rename it: what bears the name is whole, and right."""
    source = _SOURCE.read_bytes()
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-", suffix=".so")
    os.close(handle)
    try:
        for target in _TARGETS:
            command = [*compiler, *_FLAGS, *target, "-x", "c", "-", "-o", draft]
            left_s, quiet = max(deadline - time.monotonic(), 0.0), subprocess.DEVNULL
            done = subprocess.run(
                command, input=source, stdout=quiet, stderr=quiet, timeout=left_s, check=False
            )
            if done.returncode == 0:
                os.chmod(draft, 0o700)
                # under the name of the draft: the linker answers a name it knows from memory
                built = _checked(Path(draft))
                if built is not None:
                    os.replace(draft, path)
                    built.path = path
                    _TRUSTED[path] = _TRUSTED.pop(Path(draft))
                return built is not None
    except subprocess.TimeoutExpired:
        return False
    finally:
        Path(draft).unlink(missing_ok=True)
    return False


def _checked(path: Path) -> Kernel | None:
    """Return the library at `path` if it loads and gives numpy's numbers; it is asked once."""
    found = _TRUSTED.get(path)
    if found is None:
        try:
            found = Kernel(path)
        except (OSError, AttributeError):
            return None
        if not gives_numpys_numbers(found):
            return None
        _TRUSTED[path] = found
    return found
