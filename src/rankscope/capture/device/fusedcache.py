"""The fused kernels of this host: which there are, where they lie compiled, who compiles them, and
for which GPUs.

A process of its own compiles them ahead, once for each kind of GPU and version of the source, into
a folder that only this user can write; ranks load what lies ready, and use torch operations until
then. GPUs are asked for without touching one (no context, no torch): NVIDIA's management library
tells its own; the kernel's driver of AMD's writes its own down.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from rankscope.capture.kernel import is_off, made_folders, no_folder, trusted_files
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.run.files import replacing
from rankscope.run.folders import FolderLock

COMPILER: Final = "rankscope.capture.device.fusedcompile"
_SOURCES: Final = ("fusedkernels.py", "fusedcompile.py", "fusedplan.py")
_KINDS: Final = (
    "bfloat16", "float32", "float16", "uint8", "int64", "table", "float64", "int32", "int8",
    "int16", "uint16", "uint32", "uint64",
)  # fmt: skip
"""Types of stored words, common ones first; bools are uint8, 8-bit floats `table`."""
_DOUBLES: Final = ("float64", "int32", "int64", "uint32", "uint64")
_WIDE: Final = ("float32", "bfloat16", "float64", "table")
_WORD_BYTES: Final = {"bfloat16": 2, "table": 1}
_VECTOR_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CompiledImage:
    """A kernel (cubin or hsaco), with the threads and bytes of shared memory of a block."""

    name: str
    image: bytes
    threads: int
    shared: int


class ReadVariant(NamedTuple):
    """A kernel that reads values. `is_plain`: neighbouring columns are neighbours in memory;
    `is_aligned`: rows are full (`fusedplan`) and begin at multiples of 16 bytes, as most
    activations."""

    kind: str
    is_plain: bool
    is_aligned: bool

    @property
    def name(self) -> str:
        """Name of its file."""
        columns = "plain" if self.is_plain else "scattered"
        return f"read-{self.kind}-{columns}{'-aligned' if self.is_aligned else ''}"

    @property
    def is_double(self) -> bool:
        """Computes in float64: values of 32 bits and more that float32 does not hold."""
        return self.kind in _DOUBLES

    @property
    def is_floating(self) -> bool:
        """Values may not be finite."""
        return self.kind == "table" or "float" in self.kind

    @property
    def is_wide(self) -> bool:
        """Squares of values may leave the range of the float they are computed in."""
        return self.kind in _WIDE

    @property
    def word_bytes(self) -> int:
        """Size of a word."""
        return _WORD_BYTES.get(self.kind) or int(self.kind.lstrip("uintfloa")) // 8

    @property
    def step(self) -> int:
        """Words that divide every row's offset."""
        return _VECTOR_BYTES // self.word_bytes if self.is_aligned else 1


class CombineVariant(NamedTuple):
    """A kernel that puts partial results together, float64 or float32."""

    is_double: bool

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"combine-{'float64' if self.is_double else 'float32'}"


def variants() -> Iterator[ReadVariant | CombineVariant]:
    """Yield all kernels there are, the usual ones first."""
    yield CombineVariant(is_double=False)
    yield CombineVariant(is_double=True)
    for is_plain, is_aligned in ((True, True), (True, False), (False, False)):
        for kind in _KINDS:
            yield ReadVariant(kind, is_plain, is_aligned)


def find_image(architecture: str, variant: ReadVariant | CombineVariant) -> CompiledImage | None:
    """Return a compiled kernel, None where none that is to be trusted lies on this host."""
    if is_off():
        return None
    for fields in _cached_contents(_file_name(architecture, variant)):
        with contextlib.suppress(TypeError):
            return CompiledImage(**fields)
    return None


def save_image(
    architecture: str, variant: ReadVariant | CombineVariant, image: CompiledImage
) -> Path | None:
    """Save a compiled kernel; None if no folder belongs to this user alone."""
    return _save(_file_name(architecture, variant), asdict(image))


def save_failure(architecture: str, sentence: str) -> None:
    """File what this Triton failed to compile, so that no job tries again; "" where it did not."""
    fields = {"triton": triton_version(), "sentence": sentence}
    _save(f"{architecture}-{_source_key()}.failure", fields)


def triton_version() -> str:
    """Return which Triton is installed, without importing it; "" where none is."""
    spec = importlib.util.find_spec("triton")
    text = Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    return "".join(re.findall(r"__version__ = ['\"](.+)['\"]", text)[:1])


def obstacle(architecture: str = "") -> str:
    """Return why kernels cannot be compiled here (for this architecture), "" where they may be."""
    if reason := no_folder():
        return reason
    if not triton_version():
        return "Triton is not installed"
    for fields in _cached_contents(f"{architecture}-{_source_key()}.failure"):
        with contextlib.suppress(KeyError, TypeError):
            return str(fields["sentence"]) if fields["triton"] == triton_version() else ""
    return ""


@contextlib.contextmanager
def lock_for_building(architecture: str) -> Iterator[bool]:
    """Hold the lock for compiling the kernels of an architecture; False where another does."""
    with contextlib.ExitStack() as stack:
        is_held = False
        for folder in made_folders():
            try:
                lock = FolderLock(folder / f"{architecture}.lock", "compiler")
            except FolderBusyError:
                break
            except SpoolError:
                continue
            stack.callback(lock.release)
            is_held = True
            break
        yield is_held


def missing_variants(architecture: str) -> list[ReadVariant | CombineVariant]:
    """Return the kernels that are not compiled; all where RANKSCOPE_KERNEL asks for none."""
    return [variant for variant in variants() if find_image(architecture, variant) is None]


def compiler_of(architecture: str) -> tuple[list[str], Path] | None:
    """Return the command that compiles missing kernels, and its output file; None if none is
    missing, none can be compiled, or this Triton failed before."""
    if not missing_variants(architecture) or obstacle(architecture):
        return None
    folder = next(made_folders())
    return [sys.executable, "-m", COMPILER, architecture], folder / f"{architecture}.log"


@functools.cache
def _source_key() -> str:
    folder = Path(__file__).parent
    source = b"\0".join((folder / name).read_bytes() for name in _SOURCES)
    return hashlib.blake2b(source, digest_size=8).hexdigest()


def _cached_contents(name: str) -> Iterator[Any]:
    for path in trusted_files(name):
        with contextlib.suppress(OSError, ValueError):
            # from a folder that only this user can write: the image becomes code in the driver
            yield msgpack.unpackb(path.read_bytes())


def _save(name: str, fields: dict[str, Any]) -> Path | None:
    for folder in made_folders():
        with contextlib.suppress(OSError):
            with replacing(folder / name, is_synced=False) as file:
                file.write(msgpack.packb(fields))
            return folder / name
    return None


def _file_name(architecture: str, variant: ReadVariant | CombineVariant) -> str:
    return f"{architecture}-{variant.name}-{_source_key()}.kernel"


_LIBRARY: Final = "libnvidia-ml.so.1"
_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")


def architectures_of_host(library: str = _LIBRARY, nodes: Path = _NODES) -> list[str]:
    """Return the GPU architectures of this host (`cuda-90`, `hip-gfx942`), by NVIDIA's management
    library and the folder in which AMD's driver (KFD) describes its GPUs."""
    return sorted({*_of_nvidia(library), *_of_amd(nodes)})


def compilers_of_host() -> list[tuple[list[str], Path]]:
    """Return the commands that compile missing kernels for this host's GPUs, each with its output
    file. Run them beside the job: ranks load kernels that are ready."""
    compilers = (compiler_of(architecture) for architecture in architectures_of_host())
    return [compiler for compiler in compilers if compiler is not None]


def _of_nvidia(name: str) -> Iterator[str]:
    try:
        library: Any = ctypes.CDLL(name)
        if library.nvmlInit_v2() != 0:
            return
    except (OSError, AttributeError):
        return
    count = ctypes.c_uint()
    try:
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            status = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            if status == 0:
                status = library.nvmlDeviceGetCudaComputeCapability(
                    device, ctypes.byref(major), ctypes.byref(minor)
                )
            if status == 0:
                yield f"cuda-{major.value}{minor.value}"
    finally:
        library.nvmlShutdown()


def _of_amd(nodes: Path) -> Iterator[str]:
    for properties in nodes.glob("*/properties"):
        with contextlib.suppress(OSError, ValueError):
            for line in properties.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "gfx_target_version" and int(number):
                    major, minor, step = int(number) // 10000, int(number) // 100 % 100, int(number)
                    yield f"hip-gfx{major}{minor:x}{step % 100:x}"
