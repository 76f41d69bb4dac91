"""The digest in one pass over memory: `kernel.c`, compiled on this host, loaded by its ranks.

Whoever starts a job on a host calls `build` once, outside of any rank; ranks only `load` what lies
ready. Where there is no compiler, no folder that is ours alone, or no library that gives numpy's
numbers, there is no kernel, and numpy goes on doing all of it.

RANKSCOPE_KERNEL=off takes numpy wherever it is set; CC names the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope.record.value import MAX_SAMPLES, SKETCH_SIZE

__all__ = ["Bound", "Kernel", "Workspace", "build", "load"]

Doubles = npt.NDArray[np.float64]

_SOURCE: Final = Path(__file__).with_name("kernel.c")
_FLAGS: Final = (
    *("-O3", "-std=gnu99", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: NaN has to stay NaN
)
_TARGETS: Final = (("-march=native",), ("-mcpu=native",), ())
"""Compilers disagree on the option that means this very machine."""
_BUILD_TIMEOUT_S: Final = 30.0
_PADDING: Final = 16
"""Columns of factors are a multiple of this: the widest vectors hold 16 floats."""
_ALIGNMENT: Final = 64
_MOST_WITH_LOCK: Final = 1 << 15
"""Elements up to which giving the interpreter to other threads costs more than it brings."""
_KINDS: Final = {
    "float32": 0, "bfloat16": 1, "float16": 2, "uint8": 3, "int8": 4, "int16": 5, "uint16": 6,
    "table": 7,
}  # fmt: skip
"""Stored words the kernel reads, by the numbers it knows them by."""

_NUMBERS: Final = struct.Struct("=6d8d2q")
_RESULT_BYTES: Final = _NUMBERS.size + MAX_SAMPLES * SKETCH_SIZE * (8 + 4)
_ROWS_OFFSET: Final = _NUMBERS.size
_ROWS32_OFFSET: Final = _ROWS_OFFSET + MAX_SAMPLES * SKETCH_SIZE * 8


_TRUSTED: Final[dict[Path, Kernel]] = {}


class _Plan(ctypes.Structure):
    """`struct plan` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "before", "samples", "after", "inner")),
        *((name, ctypes.c_int64) for name in ("pitch", "weight_pitch")),
        *((name, ctypes.c_void_p) for name in ("factors", "weights", "batch", "table")),
    )


class Workspace:
    """Where one thread's results are written."""

    __slots__ = ("_rows", "_rows32", "address", "memory")

    _rows: Doubles
    _rows32: npt.NDArray[np.float32]

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * _RESULT_BYTES)()
        self.address = ctypes.addressof(self.memory)
        shape = (MAX_SAMPLES, SKETCH_SIZE)
        memory: Any = self.memory  # the stubs do not know that ctypes memory is a buffer
        self._rows = np.ndarray(shape, np.float64, memory, _ROWS_OFFSET)
        self._rows32 = np.ndarray(shape, np.float32, memory, _ROWS32_OFFSET)

    def rows(self, samples: int) -> Doubles:
        """Return the sketches of the single samples, [samples, 8]."""
        return np.array(self._rows[:samples])

    def rows32(self, samples: int) -> npt.NDArray[np.float32]:
        """Return the sketches of the single samples, [samples, 8]."""
        return np.array(self._rows32[:samples])


class Bound:
    """The kernel for values of one dtype and fold; holds the memory it points to."""

    __slots__ = ("_held", "_look", "_plan")

    def __init__(self, look: Any, plan: _Plan, held: tuple[object, ...]) -> None:
        self._look = look
        self._plan = ctypes.addressof(plan)
        self._held = (plan, held)

    def look(self, address: int, into: Workspace) -> tuple[Any, ...] | None:
        """Look at the contiguous stored words at `address`.

        Returns:
            low, high, mean, std, norm, deviation, the sketch's 8 numbers, zeros, has -0; None where
            the value has to be looked at carefully: NaN, infinities, extreme magnitudes.
        """
        if self._look(self._plan, address, into.address):
            return None
        return _NUMBERS.unpack_from(into.memory)


class Kernel:
    """A compiled kernel."""

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
            AttributeError: it is not this library.
        """
        self.path = path
        self._alone: Any = ctypes.CDLL(str(path)).rankscope_look
        self._with_lock: Any = ctypes.PyDLL(str(path)).rankscope_look
        for look in (self._alone, self._with_lock):
            look.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
            look.restype = ctypes.c_int

    def bind(
        self,
        kind: str,
        rows: tuple[int, int, int],
        matrix: npt.NDArray[np.float32],
        weights: Doubles,
        batch: Doubles | None = None,
        table: npt.NDArray[np.float32] | None = None,
    ) -> Bound:
        """Prepare the kernel for one fold.

        Args:
            kind: one of the stored words in `_KINDS`; "table" are 8-bit floats.
            rows: (before, samples, after) whose product is the number of rows.
            matrix: [inner, 8] factors of the columns.
            weights: [rows, 8] weights of the rows.
            batch: [samples, 8] factors of the samples; None where `samples` is 1, and the whole.
            table: [256] values of an 8-bit float's words.
        """
        inner = len(matrix)
        pitch = -(-inner // _PADDING) * _PADDING
        factors = _aligned((SKETCH_SIZE, pitch), np.float32)
        factors[:, :inner] = matrix.T
        turned = _aligned((SKETCH_SIZE, len(weights)), np.float64)
        turned[:] = weights.T
        batch = None if batch is None else np.ascontiguousarray(batch)
        plan = _Plan(
            _KINDS[kind], *rows, inner, pitch, len(weights), factors.ctypes.data,
            turned.ctypes.data, None if batch is None else batch.ctypes.data,
            None if table is None else table.ctypes.data,
        )  # fmt: skip
        is_small = len(weights) * inner <= _MOST_WITH_LOCK
        look = self._with_lock if is_small else self._alone
        return Bound(look, plan, (factors, turned, batch, table))


def build() -> Path | None:
    """Return the kernel compiled for this machine, compiling it where that has not been done yet.

    Takes a second, ten at most; safe in many processes at once, each of which may compile, and
    the last of which gives its name. Meant for whoever starts ranks, never for a rank.

    Returns:
        The library; None where there is no compiler, no safe folder, or no working result.
    """
    if _is_off():
        return None
    ready = load()
    if ready is not None:
        return ready.path
    compiler = _compiler()
    name = _library_name()
    if compiler is None or name is None:
        return None
    deadline = time.monotonic() + _BUILD_TIMEOUT_S
    for folder in _folders():
        try:
            for part in (folder.parent, folder):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder) and _compile(compiler, folder / name, deadline):
                return folder / name
        except OSError:
            continue
    return None


def load() -> Kernel | None:
    """Return the kernel that `build` left on this host, None where there is none to be trusted.

    A library is trusted when it and its folder belong to this user alone and it gives the numbers
    of numpy.
    """
    if _is_off():
        return None
    name = _library_name()
    if name is None:
        return None
    for folder in _folders():
        path = folder / name
        if _is_safe(folder) and _is_ours(path):
            found = _checked(path)
            if found is not None:
                return found
    return None


def _is_off() -> bool:
    return os.environ.get("RANKSCOPE_KERNEL", "").lower() in ("off", "0", "no", "false")


def _folders() -> Iterator[Path]:
    """Yield where libraries may lie: the user's cache, else next to the spools."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if os.path.isabs(cache):
        yield Path(cache) / "rankscope"
    elif os.path.isabs(home):
        yield Path(home) / ".cache" / "rankscope"
    yield Path(tempfile.gettempdir()) / f"rankscope-{os.getuid()}" / "kernel"


def _is_safe(folder: Path) -> bool:
    """True where nobody else can put a library, nor put another folder in place of this one."""
    return _is_ours(folder.parent) and _is_ours(folder)


def _is_ours(path: Path) -> bool:
    """True for a folder or file of this user that nobody else can write, and no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        status.st_uid == os.getuid()
        and not status.st_mode & 0o022
        and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))
    )


@functools.cache
def _library_name() -> str | None:
    """Return the name for this source on this kind of machine, None without the source.

    A home shared by machines of several kinds holds one library for each.
    """
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
            done = subprocess.run(
                command,
                input=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=max(deadline - time.monotonic(), 0.0),
                check=False,
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
        if not _gives_numpys_numbers(found):
            return None
        _TRUSTED[path] = found
    return found


def _gives_numpys_numbers(kernel: Kernel) -> bool:
    """Compare one value of every kind, with rows and columns left over, to plain arithmetic."""
    rows, samples, inner = 14, 2, 613
    counter = np.arange(rows * inner, dtype=np.int64)
    words = (counter * 7919 + (counter * counter) % 257) % 251
    matrix = np.cos(np.arange(inner * SKETCH_SIZE)).astype(np.float32).reshape(inner, SKETCH_SIZE)
    weights = np.sin(np.arange(rows * SKETCH_SIZE)).reshape(rows, SKETCH_SIZE)
    batch = 1.0 + np.arange(samples * SKETCH_SIZE, dtype=np.float64).reshape(samples, SKETCH_SIZE)
    table = np.ascontiguousarray(np.arange(256)[::-1], dtype=np.float32)
    workspace = Workspace()
    for kind, stored, values in _specimens(words, table):
        bound = kernel.bind(kind, (1, samples, rows // samples), matrix, weights, batch, table)
        found = bound.look(stored.ctypes.data, workspace)
        if found is None:
            return False
        got = found[:5]
        sketch, (zero, has_minus_zero) = found[6:14], found[14:]
        sums = (values.reshape(rows, inner) @ matrix.astype(np.float64)) * weights
        per_sample = sums.reshape(samples, -1, SKETCH_SIZE).sum(axis=1)
        norm = float(np.linalg.norm(values))
        moments = (float(np.mean(values)), float(np.std(values, ddof=1)), norm)
        if (
            got[:2] != (float(values.min()), float(values.max()))
            or zero != int(np.count_nonzero(values == 0))
            or has_minus_zero != bool(np.any(np.signbit(values) & (values == 0)))
            or not np.allclose(got[2:], moments, rtol=1e-6, atol=0)
            or not np.allclose(workspace.rows(samples), per_sample, rtol=0, atol=1e-5 * norm)
            or not np.allclose(sketch, (per_sample * batch).sum(0), rtol=0, atol=1e-4 * norm)
        ):
            return False
    broken = words.astype(np.float32)
    for bad in (math.nan, math.inf, -math.inf):
        broken[-1] = bad
        bound = kernel.bind("float32", (1, 1, rows), matrix, weights)
        if bound.look(broken.ctypes.data, workspace) is not None:
            return False
    return True


def _specimens(
    words: npt.NDArray[np.int64], table: npt.NDArray[np.float32]
) -> Iterator[tuple[str, npt.NDArray[Any], Doubles]]:
    """Yield (kind, stored words, their values)."""
    floats = (words - 101.0).astype(np.float32) / np.float32(8)
    floats[words == 7] = -0.0
    yield "float32", floats, floats.astype(np.float64)
    halves = floats.astype(np.float16)
    yield "float16", halves, halves.astype(np.float64)
    yield "bfloat16", (floats.view(np.uint32) >> 16).astype(np.uint16), floats.astype(np.float64)
    for name in ("uint8", "int8", "int16", "uint16"):
        stored = words.astype(name)
        yield name, stored, stored.astype(np.float64)
    yield "table", words.astype(np.uint8), table[words].astype(np.float64)


def _aligned(shape: tuple[int, int], dtype: type[np.floating]) -> npt.NDArray[Any]:
    """Return zeros that begin at a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
