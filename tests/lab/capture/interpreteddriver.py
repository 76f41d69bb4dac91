"""A driver whose GPU is Triton's interpreter: it runs the fused kernels on memory of this process.

Everything before the driver's door is rankscope's own: plans, tables, arguments, rows. Import this
module before anything imports Triton, which decides at its import whether it interprets.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter

from rankscope.capture.device import fusedkernels
from rankscope.capture.device.fusedcache import CombineVariant, CompiledImage, ReadVariant
from rankscope.capture.device.fusedcompile import constants_of
from rankscope.capture.device.fusedforms import GpuDriver

_VARIANTS: list[ReadVariant | CombineVariant] = []
_READ = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3
)
THREADS = 128
LAUNCH_FAILED = 719
"""As CUDA counts."""
POINTERS = {"words", "table", "same", "row_keys", "row_offsets", "row_limits", "row_weights",
            "column_keys", "column_offsets", "column_factors", "numbers", "counts",
            "row"}  # fmt: skip
TYPES = {"table": torch.float32, "same": torch.uint8, "row_limits": torch.int32,
         "row_weights": torch.float32, "column_factors": torch.float32,
         "row": torch.float64}  # fmt: skip
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

launches: list[str] = []
"""Names of the kernels that were launched."""
failures: list[Exception] = []
"""What launches raised: `LAUNCH_FAILED` is all that the driver's door lets through."""


# What the interpreters of older Tritons have wrong, and their compilers right:
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, *scope: Any) -> None:
    """Let a number bound a `range`: numpy 2.4 refuses what Triton before 3.7 does for that."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
# `tl.minimum` and `tl.maximum` leave a NaN out; numpy's functions of these names keep it
interpreter.InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)


def find(variant: ReadVariant | CombineVariant) -> CompiledImage:
    """An image that says which kernel it stands for."""
    if variant not in _VARIANTS:
        _VARIANTS.append(variant)
    return CompiledImage(variant.name, str(_VARIANTS.index(variant)).encode(), THREADS, 0)


def _load(module: int, image: int, unused: int = 0) -> int:
    ctypes.c_void_p.from_address(module).value = 1 + int(ctypes.string_at(image))
    return 0


def _find(function: int, module: int, name: int) -> int:
    assert ctypes.string_at(name).decode() == _VARIANTS[module - 1].name
    ctypes.c_void_p.from_address(function).value = module
    return 0


def _launch(function: int, x: int, y: int, z: int, *rest: Any) -> int:
    threads, _, _, _, _, arguments, _ = rest
    assert (z, threads) == (1, THREADS)
    variant = _VARIANTS[function - 1]
    is_read = isinstance(variant, ReadVariant)
    kernel = fusedkernels.read_value if is_read else fusedkernels.combine_partials
    constants = constants_of(variant)
    values = {}
    for place, name in enumerate(n for n in kernel.arg_names if n not in constants):
        at = ctypes.c_void_p.from_address(arguments + 8 * place).value
        assert at is not None
        if name in POINTERS:
            values[name] = _memory(ctypes.c_uint64.from_address(at).value, _type(variant, name))
        elif name == "elements":
            values[name] = ctypes.c_int64.from_address(at).value
        else:
            values[name] = ctypes.c_int32.from_address(at).value
    launches.append(variant.name)
    try:
        with np.errstate(all="ignore"):
            kernel[(x, y)](**values, **constants)
    except Exception as error:  # ctypes would print it and say that all went well
        failures.append(error)
        return LAUNCH_FAILED
    return 0


def _type(variant: ReadVariant | CombineVariant, name: str) -> torch.dtype:
    if name == "numbers":
        return torch.float64 if variant.is_double else torch.float32
    if name == "words":
        assert isinstance(variant, ReadVariant)
        return WORDS[variant.word_bytes]
    return TYPES.get(name, torch.int64)


def _memory(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at an address; the interpreter follows pointers wherever they lead."""
    if not address:
        return torch.zeros(1, dtype=dtype)
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


_KEPT = (_READ(_load), _READ(_find), _LAUNCH(_launch))


def driver() -> GpuDriver:
    """The driver."""
    library = SimpleNamespace(
        load=ctypes.cast(_KEPT[0], ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 2)),
        find=_KEPT[1],
        launch=_KEPT[2],
    )
    return GpuDriver(library, "load", "find", "launch")
