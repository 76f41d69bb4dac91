"""The digest in one pass over memory: `kernel.c`, compiled on this host, loaded by its ranks.

Whoever starts a job on a host calls `build` once, outside of any rank; ranks only `load` what lies
ready. Where there is no compiler, no folder that is ours alone, or no library that gives numpy's
numbers, there is no kernel, and numpy goes on doing all of it.

RANKSCOPE_KERNEL=off takes numpy wherever it is set; CC names the compiler.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope.record.value import MAX_SAMPLES, SKETCH_SIZE


def is_off() -> bool:
    """True where RANKSCOPE_KERNEL asks for no compiled code."""
    return os.environ.get("RANKSCOPE_KERNEL", "").lower() in ("off", "0", "no", "false")


def code_folders() -> Iterator[Path]:
    """Yield where compiled code may lie: the user's cache, else next to the spools."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if os.path.isabs(cache):
        yield Path(cache) / "rankscope"
    elif os.path.isabs(home):
        yield Path(home) / ".cache" / "rankscope"
    yield Path(tempfile.gettempdir()) / f"rankscope-{os.getuid()}" / "kernel"


def trusted_files(name: str) -> Iterator[Path]:
    """Yield the files of this name in the folders of code that nobody else can have put there."""
    for folder in code_folders():
        # code is loaded from here into the training process: whoever could write it could run as
        # this user
        if _is_safe(folder) and _is_ours(folder / name):
            yield folder / name


def no_folder() -> str:
    """Return why no compiled code of ours can lie on this host, "" where it can."""
    if is_off():
        return "RANKSCOPE_KERNEL switches compiled code off"
    if next(made_folders(), None) is None:
        return f"none of the folders {[*map(str, code_folders())]} can be this user's alone"
    return ""


def made_folders() -> Iterator[Path]:
    """Yield the `code_folders` that exist and that no other user can write to."""
    for folder in code_folders():
        try:
            for part in (folder.parent, folder):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_safe(folder):
            yield folder


def _is_safe(folder: Path) -> bool:
    return _is_ours(folder.parent) and _is_ours(folder)  # else another folder could take its place


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        status.st_uid == os.getuid()
        and not status.st_mode & 0o022
        and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))
    )


Doubles = npt.NDArray[np.float64]

_PADDING: Final = 16  # columns of factors are a multiple of it: the widest vectors hold 16 floats
_ALIGNMENT: Final = 64
_MOST_WITH_LOCK: Final = 1 << 15
"""Elements up to which releasing the interpreter lock costs more than it gains."""
_KINDS: Final = {
    "float32": 0, "bfloat16": 1, "float16": 2, "uint8": 3, "int8": 4, "int16": 5, "uint16": 6,
    "table": 7,
}  # fmt: skip
"""Types of stored words that the kernel reads, in the order of its numbers for them."""

_NUMBERS: Final = struct.Struct("=6d8d2q")
_RESULT_BYTES: Final = _NUMBERS.size + MAX_SAMPLES * SKETCH_SIZE * (8 + 4)
_ROWS32_OFFSET: Final = _NUMBERS.size + MAX_SAMPLES * SKETCH_SIZE * 8


class _KernelPlan(ctypes.Structure):
    """`struct plan` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "before", "samples", "after", "inner")),
        *((name, ctypes.c_int64) for name in ("pitch", "weight_pitch")),
        *((name, ctypes.c_void_p) for name in ("factors", "weights", "batch", "table")),
    )


class Workspace:
    """Memory for one thread's results."""

    __slots__ = ("_rows32", "address", "memory")

    _rows32: npt.NDArray[np.float32]

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * _RESULT_BYTES)()
        self.address = ctypes.addressof(self.memory)
        shape = (MAX_SAMPLES, SKETCH_SIZE)
        memory: Any = self.memory  # the stubs do not know that ctypes memory is a buffer
        self._rows32 = np.ndarray(shape, np.float32, memory, _ROWS32_OFFSET)

    def rows32(self, samples: int) -> npt.NDArray[np.float32]:
        """Return the sketches of the single samples, [samples, 8]."""
        return np.array(self._rows32[:samples])


class BoundKernel:
    """The kernel for values of one dtype and fold; holds the memory it points to."""

    __slots__ = ("_look", "_plan", "_references")

    def __init__(self, look: Any, plan: _KernelPlan, tables: tuple[object, ...]) -> None:
        self._look = look
        self._plan = ctypes.addressof(plan)
        # the kernel reads their memory by address: Python would free it
        self._references = (plan, tables)

    def look(self, address: int, into: Workspace) -> tuple[Any, ...] | None:
        """Measure the contiguous stored words at `address`: return low, high, mean, std, norm,
        deviation, the sketch's 8 numbers, zeros, has -0; None for values that need care: NaN,
        infinities, extreme magnitudes."""
        if self._look(self._plan, address, into.address):
            return None
        return _NUMBERS.unpack_from(into.memory)


class Kernel:
    """A compiled kernel."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError if that fails, AttributeError for another library."""
        self.path = path
        library = ctypes.CDLL(str(path))
        self._without_lock: Any = library.rankscope_look
        # the same function twice: giving the interpreter lock back takes longer than a small value
        # does
        self._with_lock: Any = ctypes.PyDLL(str(path)).rankscope_look
        for look in (self._without_lock, self._with_lock):
            look.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
            look.restype = ctypes.c_int
        self._squares: Any = library.rankscope_squares_around
        self._squares.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
        self._squares.restype = ctypes.c_double

    def squares_around(self, address: int, count: int, center: float) -> float:
        """Return the sum of (x - center)**2 over `count` float32 at `address`, added in double."""
        return float(self._squares(address, count, center))

    def bind(
        self,
        kind: str,
        rows: tuple[int, int, int],
        matrix: npt.NDArray[np.float32],
        weights: Doubles,
        batch: Doubles | None = None,
        table: npt.NDArray[np.float32] | None = None,
    ) -> BoundKernel:
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
        # turned and padded with zeros: the kernel reads whole vectors of one projection, and the
        # rest adds nothing
        factors[:, :inner] = matrix.T
        # row weights in double: they multiply sums, whose digits a float would cut
        turned = _aligned((SKETCH_SIZE, len(weights)), np.float64)
        turned[:] = weights.T
        batch = None if batch is None else np.ascontiguousarray(batch)
        plan = _KernelPlan(
            _KINDS[kind], *rows, inner, pitch, len(weights), factors.ctypes.data,
            turned.ctypes.data, None if batch is None else batch.ctypes.data,
            None if table is None else table.ctypes.data,
        )  # fmt: skip
        is_small = len(weights) * inner <= _MOST_WITH_LOCK
        look = self._with_lock if is_small else self._without_lock
        return BoundKernel(look, plan, (factors, turned, batch, table))


def gives_numpys_numbers(kernel: Kernel) -> bool:
    """Compare one value of every kind, with rows and columns left over, to plain arithmetic."""
    rows, samples, inner = 14, 2, 613
    counter = np.arange(rows * inner, dtype=np.int64)
    words = (counter * 7919 + (counter * counter) % 257) % 251
    matrix = np.cos(np.arange(inner * SKETCH_SIZE)).astype(np.float32).reshape(inner, SKETCH_SIZE)
    weights = np.sin(np.arange(rows * SKETCH_SIZE)).reshape(rows, SKETCH_SIZE)
    batch = 1.0 + np.arange(samples * SKETCH_SIZE, dtype=np.float64).reshape(samples, SKETCH_SIZE)
    table = np.ascontiguousarray(np.arange(256)[::-1], dtype=np.float32)
    workspace = Workspace()
    # a compiler may be wrong for one type and right for others: every kind is held to numpy
    for kind, stored, values in _specimens(words, table):
        bound = kernel.bind(kind, (1, samples, rows // samples), matrix, weights, batch, table)
        numbers = bound.look(stored.ctypes.data, workspace)
        if numbers is None:
            return False
        got = numbers[:5]
        sketch, (zero, has_minus_zero) = numbers[6:14], numbers[14:]
        sums = (values.reshape(rows, inner) @ matrix.astype(np.float64)) * weights
        per_sample = sums.reshape(samples, -1, SKETCH_SIZE).sum(axis=1)
        norm = float(np.linalg.norm(values))
        moments = (float(np.mean(values)), float(np.std(values, ddof=1)), norm)
        if (
            got[:2] != (float(values.min()), float(values.max()))
            or zero != int(np.count_nonzero(values == 0))
            or has_minus_zero != bool(np.any(np.signbit(values) & (values == 0)))
            or not np.allclose(got[2:], moments, rtol=1e-6, atol=0)
            or not np.allclose(workspace.rows32(samples), per_sample, rtol=0, atol=1e-5 * norm)
            or not np.allclose(sketch, (per_sample * batch).sum(0), rtol=0, atol=1e-4 * norm)
        ):
            return False
    broken = words.astype(np.float32)
    around = kernel.squares_around(broken.ctypes.data, broken.size, 101.25)
    if not math.isclose(around, float(((words - 101.25) ** 2).sum()), rel_tol=1e-12):
        return False
    for bad in (math.nan, math.inf, -math.inf):
        broken[-1] = bad
        bound = kernel.bind("float32", (1, 1, rows), matrix, weights)
        if bound.look(broken.ctypes.data, workspace) is not None:
            return False
    return True


def _specimens(
    words: npt.NDArray[np.int64], table: npt.NDArray[np.float32]
) -> Iterator[tuple[str, npt.NDArray[Any], Doubles]]:
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
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


_SOURCE: Final = Path(__file__).with_name("kernel.c")
_FLAGS: Final = (
    *("-O3", "-std=gnu99", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: NaN has to stay NaN
)
_TARGETS: Final = (("-march=native",), ("-mcpu=native",), ())
"""Options for the machine at hand: compilers differ in the name."""
_BUILD_TIMEOUT_S: Final = 30.0

_TRUSTED: Final[dict[Path, Kernel]] = {}
_TOLD: Final[set[str]] = set()


def build() -> Path | None:
    """Return the library compiled for this machine, compiling it if needed; None without a
    compiler, a safe folder, or a working result.

    Takes a second, ten at most; safe in many processes at once: each may compile, and the last
    rename stays. For whoever starts ranks, never for a rank.
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
    """Build the kernel; if that fails, tell the user once."""
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
    """Return the kernel that `build` left on this host, None without a trusted one: library and
    folder belong to this user alone, and its numbers are those of numpy."""
    if is_off():
        return None
    name = _library_name()
    if name is None:
        return None
    checked = map(_checked, trusted_files(name))
    return next((kernel for kernel in checked if kernel is not None), None)


@functools.cache
def _library_name() -> str | None:
    """Return the library's name for this source and kind of machine, None without the source. A
    home shared by machines of several kinds has one library for each."""
    try:
        source = _SOURCE.read_bytes()
    except OSError:
        return None
    # flags and processor too: -march=native of another machine ends a rank with an illegal
    # instruction
    parts = (source, repr((_FLAGS, _TARGETS)).encode(), _processor().encode())
    name = hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    return f"digest-{name}.so"


def _processor() -> str:
    """Return what tells machines apart that cannot run each other's code."""
    keys = ("flags", "features", "model name", "vendor_id", "cpu family", "model",
              "cpu implementer", "cpu architecture", "cpu part", "isa")  # fmt: skip
    facts = [platform.machine()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip() and len(facts) > 1:
                    break
                if line.partition(":")[0].strip().lower() in keys:
                    facts.append(line.strip())
    except OSError:
        facts.append(platform.processor())
    return "\n".join(facts)


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
    kernel = _TRUSTED.get(path)
    if kernel is None:
        try:
            kernel = Kernel(path)
        except (OSError, AttributeError):
            return None
        if not gives_numpys_numbers(kernel):
            return None
        _TRUSTED[path] = kernel
    return kernel
