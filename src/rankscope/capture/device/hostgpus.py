"""Which GPUs this host has, asked without touching one: no context, no torch.

NVIDIA's management library tells its own; the kernel's driver of AMD's writes its own down.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rankscope.capture.device.fusedcache import compiler_of

_LIBRARY: Final = "libnvidia-ml.so.1"
_NODES: Final = Path("/sys/class/kfd/kfd/topology/nodes")


def architectures_of_host(library: str = _LIBRARY, nodes: Path = _NODES) -> list[str]:
    """Return what fused kernels have to be compiled for here (`cuda-90`, `hip-gfx942`), by NVIDIA's
    management library and the folder in which the driver of AMD GPUs (KFD) describes each."""
    return sorted({*_of_nvidia(library), *_of_amd(nodes)})


def compilers_of_host() -> list[tuple[list[str], Path]]:
    """Return the commands that compile what is missing for this host's GPUs, each with the file for
    its output. Run them beside the job: ranks load what lies ready."""
    found = (compiler_of(architecture) for architecture in architectures_of_host())
    return [compiler for compiler in found if compiler is not None]


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
