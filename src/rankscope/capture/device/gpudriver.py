"""Compiled kernels on a GPU: loaded and launched through the driver's own library.

Nothing is compiled here and Triton is not imported. CUDA and HIP have the same three calls under
other names; the library is the one torch has loaded already. A launch costs a few microseconds in
Python: the addresses of all arguments are written down once, and only the numbers there change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope.capture.device.fusedcache import CompiledImage

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
    """Launches of one kernel over one grid, with the numbers that its ctypes arguments then
    have."""

    __slots__ = ("_arguments", "_before", "_call", "_name", "_pointers")

    def __init__(
        self, kernel: LoadedKernel, grid: tuple[int, int], arguments: Sequence[Any]
    ) -> None:
        self._call = kernel.call
        self._arguments = (*arguments, *(ctypes.c_uint64(0) for _ in range(_SCRATCH_POINTERS)))
        addresses = [ctypes.addressof(argument) for argument in self._arguments]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        image = kernel.image
        self._name = image.name
        self._before = (kernel.function, *grid, 1, image.threads, 1, 1, image.shared)

    def __call__(self, stream: int) -> None:
        """Enqueue; raises OSError where the driver refuses."""
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
