"""The fused digest of one device's values: two launches a value, and nothing else.

What a launch needs is made once for a dtype, shape, strides and layout. A value then changes three
numbers: where it lies, where its row lies, and the stream. Compiled kernels are loaded and launched
through the driver library that torch has loaded already; Triton is not imported. CUDA and HIP have
the same three calls under other names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.accelerator import Accelerator
from rankscope.capture.device.fusedcache import CombineVariant, CompiledImage, ReadVariant
from rankscope.capture.device.fusedplan import COUNTS, NUMBERS, FusedPlan, make_fused_plan
from rankscope.capture.dtypestorage import Storage
from rankscope.capture.fold import FoldPlan
from rankscope.layout.placement import Ranges

_SCRATCH_POINTERS: Final = 2
"""Triton's kernels end in up to two pointers to memory that ours do not use."""


class GpuDriver:
    """The calls of one driver library, by their names there:

    load      (module*, image) -> status
    find      (function*, module, name) -> status
    launch    (function, 3 x grid, 3 x block, shared, stream, arguments, extra) -> status
    """

    def __init__(self, library: Any, load: str, find: str, launch: str) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._load = getattr(library, load)
        self._load.argtypes = (pointer, ctypes.c_char_p)
        self._find = getattr(library, find)
        self._find.argtypes = (pointer, pointer, ctypes.c_char_p)
        self._launch = getattr(library, launch)
        self._launch.argtypes = (pointer, *(number,) * 7, pointer, pointer, pointer)

    def load(self, image: CompiledImage) -> LoadedKernel:
        """Load a kernel into the current context; OSError where the driver does not take it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._load(ctypes.byref(module), image.image)
        if status == 0:
            status = self._find(ctypes.byref(function), module, image.name.encode())
        if status != 0:
            raise OSError(f"the driver refuses the kernel {image.name} with status {status}")
        return LoadedKernel(self._launch, function, image)


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that can be launched in the context in which it was loaded."""

    call: Any
    function: ctypes.c_void_p
    image: CompiledImage


class BoundLaunch:
    """Launches of one kernel over one grid; the numbers are its ctypes arguments."""

    __slots__ = ("_arguments", "_before", "_call", "_name", "_pointers")

    def __init__(
        self, kernel: LoadedKernel, grid: tuple[int, int], arguments: Sequence[Any]
    ) -> None:
        self._call = kernel.call
        self._arguments = (*arguments, *(ctypes.c_uint64(0) for _ in range(_SCRATCH_POINTERS)))
        # the driver reads arguments by address at each launch: to change a value is to change one
        # number
        addresses = [ctypes.addressof(argument) for argument in self._arguments]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        image = kernel.image
        self._name = image.name
        self._before = (kernel.function, *grid, 1, image.threads, 1, 1, image.shared)

    def __call__(self, stream: int) -> None:
        """Enqueue the kernel. Raises OSError if the driver refuses."""
        status: int = self._call(*self._before, stream, self._pointers, None)
        if status != 0:
            raise OSError(f"the driver refuses to launch {self._name} with status {status}")


def driver_of(device: torch.device) -> GpuDriver | None:
    """Return the driver of an NVIDIA or AMD GPU; None for others, or where it is not found."""
    if device.type != "cuda":
        return None
    try:
        if torch.version.hip is None:
            library = ctypes.CDLL("libcuda.so.1")
            return GpuDriver(library, "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
        library = ctypes.CDLL("libamdhip64.so")
        return GpuDriver(
            library, "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"
        )
    except (OSError, AttributeError):
        return None


def architectures() -> list[str]:
    """Return those of all GPUs that torch can use here."""
    if not torch.cuda.is_available():
        return []
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return sorted({architecture_of(device) for device in devices})


def architecture_of(device: torch.device) -> str:
    """Return what kernels for a GPU are compiled for: `cuda-90`, `hip-gfx942`."""
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-{major}{minor}"
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return f"hip-{name.partition(':')[0]}"


_SCRATCH_PROGRAMS: Final = 1 << 12

FindImage = Callable[[ReadVariant | CombineVariant], CompiledImage | None]


@dataclass(slots=True)
class _PartialResults:
    """Partial results of the value that is being read on one stream."""

    programs: int
    memory: torch.Tensor

    @property
    def counts(self) -> int:
        return self.memory.data_ptr()

    @property
    def numbers(self) -> int:
        """Address of the floating-point results, a multiple of 16 like that of `counts`."""
        return self.memory.data_ptr() + 8 * COUNTS * self.programs


class FusedForm:
    """How values of one dtype, shape, strides and layout are read on one stream."""

    __slots__ = ("_combine", "_read", "_row", "_tables", "_words", "held_bytes")

    def __init__(
        self,
        tables: tuple[torch.Tensor, ...],
        words: ctypes.c_uint64,
        read: dict[bool, tuple[ReadVariant, BoundLaunch]],
        row: ctypes.c_uint64,
        combine: BoundLaunch,
    ) -> None:
        self._tables = tables
        self._words, self._read = words, read
        self._row, self._combine = row, combine
        self.held_bytes = sum(table.nbytes for table in tables[:-1])

    def fill(self, row: int, words: int, stream: int) -> ReadVariant:
        """Enqueue the row of a value, and return the kernel that reads it.
        `row` and `words` are addresses, of the row and of the value with conjugate and negative
        bits resolved; `stream` is the driver's handle. Raises OSError if the driver refuses: then
        nothing, or a part, is enqueued."""
        # shared with both launches: written before either is enqueued, and read by the driver at
        # once
        self._words.value, self._row.value = words, row
        # wide loads from an address that is no multiple of 16 stop the kernel
        variant, read = self._read[words % 16 == 0]
        read(stream)
        self._combine(stream)
        return variant


class FusedReader:
    """Makes the forms of one device; `find` gives a compiled kernel, None while it is not there."""

    def __init__(self, device: torch.device, driver: GpuDriver, find: FindImage) -> None:
        self._accelerator = Accelerator(device)
        self._device = device
        self._driver = driver
        self._find = find
        self._loaded: dict[ReadVariant | CombineVariant, LoadedKernel] = {}
        self._scratch: dict[Any, _PartialResults] = {}
        self._missing_variants: set[ReadVariant | CombineVariant] = set()

    def make_form(
        self,
        local: torch.Tensor,
        ranges: tuple[Ranges, ...] | None,
        plan: FoldPlan,
        storage: Storage,
        stream: Any,
    ) -> FusedForm | None:
        """Return the form of values like `local`, which is not empty, its tables enqueued on the
        current stream; None if a kernel is missing, or no plan of bounded size exists. Raises
        OSError if the driver refuses a kernel."""
        shape, strides = plan.shape, _word_strides(local, storage)
        spans = None
        if ranges is not None:
            spans = [*ranges, *(((0, n),) for n in shape[len(ranges) :])]
        fused = make_fused_plan(shape, strides, spans, plan.batch_dim)
        if fused is None:
            return None
        kind = storage.kernel_kind or storage.dtype.name
        variants = [ReadVariant(kind, fused.is_plain, is_aligned=False)]
        aligned = ReadVariant(kind, fused.is_plain, is_aligned=True)
        if fused.is_plain and fused.is_full and fused.step % aligned.step == 0:
            variants.append(aligned)
        combine = self._kernel(CombineVariant(aligned.is_double))
        read = [(variant, self._kernel(variant)) for variant in variants]
        loaded = [(variant, kernel) for variant, kernel in read if kernel is not None]
        if combine is None or len(loaded) < len(variants):
            return None
        return self._bind(fused, storage, loaded, combine, plan.count, stream)

    def _bind(
        self,
        fused: FusedPlan,
        storage: Storage,
        read: list[tuple[ReadVariant, LoadedKernel]],
        combine: LoadedKernel,
        count: int,
        stream: Any,
    ) -> FusedForm:
        arrays: list[npt.NDArray[Any]] = [
            fused.row_keys, fused.row_offsets, fused.row_limits, fused.row_weights,
            fused.column_keys, fused.column_offsets, fused.column_factors,
        ]  # fmt: skip
        if storage.table is not None and storage.normalize is not None:
            words = np.arange(256, dtype=np.uint8)
            arrays = [storage.table, storage.normalize(words), *arrays]
        tables = tuple(self._table(array) for array in arrays)
        addresses = [ctypes.c_uint64(table.data_ptr()) for table in tables]
        if storage.table is None:
            addresses = [ctypes.c_uint64(0), ctypes.c_uint64(0), *addresses]
        scratch = self._scratch_for(stream, fused.programs)
        numbers, counts = ctypes.c_uint64(scratch.numbers), ctypes.c_uint64(scratch.counts)
        columns = len(fused.column_keys)
        sizes = (fused.rows_per_sample, fused.groups, fused.rows_per_program, columns)
        words_at, row_at = ctypes.c_uint64(0), ctypes.c_uint64(0)
        arguments = (words_at, *addresses, numbers, counts, *map(ctypes.c_int32, sizes))
        grid = (fused.column_blocks, fused.samples * fused.groups)
        bound = [(variant, BoundLaunch(kernel, grid, arguments)) for variant, kernel in read]
        per_sample = fused.groups * fused.column_blocks
        last = (ctypes.c_int64(count), ctypes.c_int32(fused.programs), ctypes.c_int32(per_sample))
        combined = BoundLaunch(combine, (1 + fused.samples, 1), (numbers, counts, row_at, *last))
        # by whether the value begins at a multiple of 16 bytes; without an aligned kernel both are
        # one
        launches = {False: bound[0], True: bound[-1]}
        return FusedForm((*tables, scratch.memory), words_at, launches, row_at, combined)

    def has_news(self) -> bool:
        """True, once, when a missing kernel has become available."""
        arrived = {variant for variant in self._missing_variants if self._find(variant) is not None}
        self._missing_variants -= arrived
        return bool(arrived)

    def _kernel(self, variant: ReadVariant | CombineVariant) -> LoadedKernel | None:
        kernel = self._loaded.get(variant)
        if kernel is None:
            image = self._find(variant)
            if image is None:
                self._missing_variants.add(variant)
                return None
            kernel = self._loaded[variant] = self._driver.load(image)
        return kernel

    def _table(self, array: npt.NDArray[Any]) -> torch.Tensor:
        memory = torch.frombuffer(bytearray(np.ascontiguousarray(array)), dtype=torch.uint8)
        return self._accelerator.to_device(memory)

    def _scratch_for(self, stream: Any, programs: int) -> _PartialResults:
        # one for each stream: values of one stream are read one after the other, those of two may
        # overlap
        scratch = self._scratch.get(stream)
        if scratch is None or scratch.programs < programs:
            size = -(-max(_SCRATCH_PROGRAMS, programs) // 64) * 64  # keeps both parts aligned
            memory = torch.empty(
                8 * (NUMBERS + COUNTS) * size, dtype=torch.uint8, device=self._device
            )
            scratch = self._scratch[stream] = _PartialResults(size, memory)
        return scratch


def _word_strides(local: torch.Tensor, storage: Storage) -> list[int]:
    """Return the strides of a fold's dims in words; a scalar has one dim, a complex number two."""
    if not storage.is_complex:
        return list(local.stride()) or [1]
    return [*(2 * step for step in local.stride() or (1,)), 1]
