"""The digest in one pass over memory (`kernel.c` behind `hash.c`) and the hooks that use it
(`native.c`), compiled on this host, loaded by its ranks.

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
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

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
    "table": 7, "float64": 8, "int32": 9, "int64": 10, "uint32": 11,
}  # fmt: skip
"""Types of stored words that the kernel reads, in the order of its numbers for them."""

_NUMBERS: Final = struct.Struct("=2Q4q6d8d")
_RESULT_BYTES: Final = _NUMBERS.size + MAX_SAMPLES * SKETCH_SIZE * (8 + 4)
_ROWS32_OFFSET: Final = _NUMBERS.size + MAX_SAMPLES * SKETCH_SIZE * 8


class _KernelPlan(ctypes.Structure):
    """`struct plan` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "before", "samples", "after", "inner")),
        *((name, ctypes.c_int64) for name in ("pitch", "weight_pitch")),
        *((name, ctypes.c_void_p) for name in ("factors", "weights", "batch", "table")),
    )


class Workspace(threading.local):
    """Memory for results, each thread's own: hooks run on autograd's threads too."""

    _rows32: npt.NDArray[np.float32]

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * _RESULT_BYTES)()
        self.address = ctypes.addressof(self.memory)
        shape = (MAX_SAMPLES, SKETCH_SIZE)
        memory: Any = self.memory  # the stubs do not know that ctypes memory is a buffer
        self._rows32 = np.ndarray(shape, np.float32, memory, _ROWS32_OFFSET)

    def numbers(self) -> tuple[Any, Any]:
        """Return the numbers of the value that was read last, and its sketch: hash of the bytes,
        the same without -0 and payloads of NaN, counts of NaN, inf, -inf and 0; min, max, mean,
        std, norm, and the root of the squared deviations, of the finite elements."""
        numbers = _NUMBERS.unpack_from(self.memory)
        return numbers[:-SKETCH_SIZE], numbers[-SKETCH_SIZE:]

    def rows32(self, samples: int) -> npt.NDArray[np.float32]:
        """Return the sketches of the single samples, [samples, 8]."""
        return np.array(self._rows32[:samples])


READ, KNOWN, REFUSED = range(3)
"""Outcomes of a reading, as in kernel.c. KNOWN: the same bytes were read at that address before,
the numbers are those of then. REFUSED: only the hash of the bytes was computed."""


class ValueMemory:
    """What a kernel has read in this step; serves any number of threads."""

    __slots__ = ("_library", "address")

    def __init__(self, library: Any) -> None:
        self._library = library
        self.address: int = library.rankscope_new_memory()
        if not self.address:
            raise MemoryError

    def forget(self) -> None:
        """Forget every value: the step is over."""
        self._library.rankscope_forget(self.address)

    def __del__(self) -> None:
        self._library.rankscope_free_memory(self.address)


class BoundKernel:
    """The kernel for values of one dtype and fold; holds the memory it points to."""

    __slots__ = ("_look", "_read", "_references", "plan")

    def __init__(
        self, functions: tuple[Any, Any], plan: _KernelPlan, tables: tuple[object, ...]
    ) -> None:
        self._read, self._look = functions
        self.plan = ctypes.addressof(plan)
        # the kernel reads their memory by address: Python would free it
        self._references = (plan, tables)

    def read(self, memory: ValueMemory, address: int, words: int, into: Workspace) -> int:
        """Measure a tensor at `address` whose contiguous stored words are at `words`."""
        outcome: int = self._read(memory.address, self.plan, address, words, into.address)
        return outcome

    def look(self, words: int, into: Workspace) -> bool:
        """Measure contiguous stored words without hashing them; False where they are refused."""
        return bool(self._look(self.plan, words, into.address) == READ)


class Kernel:
    """A compiled kernel."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError if that fails, AttributeError for another library."""
        self.path = path
        library = self._library = ctypes.CDLL(str(path))
        # the same functions twice: giving the interpreter lock back takes longer than a small value
        # does
        address, with_lock = ctypes.c_void_p, ctypes.PyDLL(str(path))
        self._without_lock, self._with_lock = (
            (handle.rankscope_read, handle.rankscope_look) for handle in (library, with_lock)
        )
        for read, look in (self._without_lock, self._with_lock):
            read.argtypes = (address, address, ctypes.c_uint64, address, address)
            look.argtypes = (address, address, address)
        library.rankscope_new_memory.restype = address
        for function in (library.rankscope_free_memory, library.rankscope_forget):
            function.argtypes, function.restype = (address,), None
        self._hooks: Any = with_lock.rankscope_hooks
        self._hooks.argtypes, self._hooks.restype = (ctypes.py_object,), ctypes.py_object
        self._squares: Any = library.rankscope_squares_around
        self._squares.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
        self._squares.restype = ctypes.c_double

    def new_memory(self) -> ValueMemory:
        """Return an empty memory."""
        return ValueMemory(self._library)

    def hooks(self, things: tuple[object, ...]) -> tuple[Any, Any, Any] | None:
        """Return (before, after, close) of `rankscope_hooks` in native.c, None where this Python is
        none that they can work in."""
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            return None
        functions: tuple[Any, Any, Any] = self._hooks(things)
        return functions

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
        functions = self._with_lock if is_small else self._without_lock
        return BoundKernel(functions, plan, (factors, turned, batch, table))


def gives_numpys_numbers(kernel: Kernel) -> bool:
    """Compare values of every kind, with rows and columns left over, to plain arithmetic."""
    rows, samples, inner = 14, 2, 613
    counter = np.arange(rows * inner, dtype=np.int64)
    words = (counter * 7919 + (counter * counter) % 257) % 251
    matrix = np.cos(np.arange(inner * SKETCH_SIZE)).astype(np.float32).reshape(inner, SKETCH_SIZE)
    weights = np.sin(np.arange(rows * SKETCH_SIZE)).reshape(rows, SKETCH_SIZE)
    batch = 1.0 + np.arange(samples * SKETCH_SIZE, dtype=np.float64).reshape(samples, SKETCH_SIZE)
    table = np.ascontiguousarray(np.arange(256)[::-1], dtype=np.float32)
    workspace, memory = Workspace(), kernel.new_memory()
    # a compiler may be wrong for one type and right for others: every kind is held to numpy
    for kind, stored, normal, values in _specimens(words, table):
        bound = kernel.bind(kind, (1, samples, rows // samples), matrix, weights, batch, table)
        address = stored.ctypes.data
        memory.forget()  # it knows plans by addresses, which are given again
        if bound.read(memory, address, address, workspace) != READ:
            return False
        numbers, sketch = workspace.numbers()
        finite = values[np.isfinite(values)]
        cleared = np.where(np.isfinite(values), values, 0.0)
        sums = (cleared.reshape(rows, inner) @ matrix.astype(np.float64)) * weights
        per_sample = sums.reshape(samples, -1, SKETCH_SIZE).sum(axis=1)
        norm = float(np.linalg.norm(finite))
        moments = (float(np.mean(finite)), float(np.std(finite, ddof=1)), norm)
        counts = (np.isnan(values), values == np.inf, values == -np.inf, values == 0)
        hashes = tuple(xxhash.xxh3_64_intdigest(words.tobytes()) for words in (stored, normal))
        if (
            numbers[:6] != (*hashes, *map(np.count_nonzero, counts))
            or numbers[6:8] != (float(finite.min()), float(finite.max()))
            or not np.allclose(numbers[8:11], moments, rtol=1e-6, atol=0)
            or not np.allclose(workspace.rows32(samples), per_sample, rtol=0, atol=1e-5 * norm)
            or not np.allclose(sketch, (per_sample * batch).sum(0), rtol=0, atol=1e-4 * norm)
            or bound.read(memory, address, address, workspace) != KNOWN
            or workspace.numbers() != (numbers, sketch)
            or not np.allclose(workspace.rows32(samples), per_sample, rtol=0, atol=1e-5 * norm)
        ):
            return False
    size = words.size
    for length in (0, 1, 4, 9, 17, 100, 130, 241, 1024, 1025):
        stored, end = words.astype(np.uint8), size - length
        bound = kernel.bind("uint8", (1, 1, 1), np.zeros((length, SKETCH_SIZE), np.float32), batch)
        bound.read(memory, length + 1, stored.ctypes.data + end, workspace)
        if workspace.numbers()[0][1] != xxhash.xxh3_64_intdigest(stored[end:].tobytes()):
            return False
    floats = words.astype(np.float32)
    around = kernel.squares_around(floats.ctypes.data, floats.size, 101.25)
    return math.isclose(around, float(((words - 101.25) ** 2).sum()), rel_tol=1e-12)


def _specimens(
    words: npt.NDArray[np.int64], table: npt.NDArray[np.float32]
) -> Iterator[tuple[str, npt.NDArray[Any], npt.NDArray[Any], Doubles]]:
    """Yield (kind, stored words, the same without -0 and payloads of NaN, values)."""
    floats = (words - 101.0).astype(np.float32) / np.float32(8)
    floats[words == 7] = -0.0
    broken, far = floats.copy(), floats * np.float32(1e30)
    broken[words == 9], broken[words == 11], broken[words == 12] = -np.nan, np.inf, -np.inf
    for values in (floats, broken, far):
        normal = values + np.float32(0)
        normal[np.isnan(normal)] = np.nan
        doubles = values.astype(np.float64)
        yield "float32", values, normal, doubles
        yield "float64", doubles, normal.astype(np.float64), doubles
        if values is not far:
            yield "float16", values.astype(np.float16), normal.astype(np.float16), doubles
            wide, wide_normal = (floats32.view(np.uint32) >> 16 for floats32 in (values, normal))
            yield "bfloat16", wide.astype(np.uint16), wide_normal.astype(np.uint16), doubles
    for name in ("uint8", "int8", "int16", "uint16", "int32", "int64", "uint32"):
        stored = words.astype(name)
        yield name, stored, stored, stored.astype(np.float64)
    tabled = words.astype(np.uint8)
    yield "table", tabled, tabled, table[words].astype(np.float64)


def _aligned(shape: tuple[int, int], dtype: type[np.floating]) -> npt.NDArray[Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


_SOURCES: Final = tuple(map(Path(__file__).with_name, ("hash.c", "kernel.c", "native.c")))
_FLAGS: Final = (
    *("-O3", "-std=gnu99", "-shared", "-fPIC", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: NaN has to stay NaN
)
_TARGETS: Final = (("-march=native",), ("-mcpu=native",), ())
"""Options for the machine at hand: compilers differ in the name."""
_BUILD_TIMEOUT_S: Final = 60.0

_TRUSTED: Final[dict[Path, Kernel]] = {}
_TOLD: Final[set[str]] = set()


def build() -> Path | None:
    """Return the library compiled for this machine, compiling it if needed; None without a
    compiler, a safe folder, or a working result.

    Takes two seconds of a core; safe in many processes at once: each may compile, and the last
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
        source = _source()
    except OSError:
        return None
    # flags and processor too: -march=native of another machine ends a rank with an illegal
    # instruction
    parts = (source, repr((_FLAGS, _TARGETS)).encode(), _processor().encode())
    name = hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    return f"digest-{name}.so"


def _source() -> bytes:
    return b"".join(path.read_bytes() for path in _SOURCES)


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
    source = _source()
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
