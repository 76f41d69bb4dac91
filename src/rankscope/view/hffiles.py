"""One tensor in a safetensors file of its own."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from rankscope.record.dtypes import STORED_TYPES

__all__ = ["write_tensor"]


def write_tensor(path: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
    """Write a safetensors file with the one key `data`, in place of what has its name.

    Args:
        path: of the file.
        dtype: torch's name.
        shape: of the tensor.
        data: its bytes in row-major order.

    Raises:
        OSError: it cannot be written.
    """
    header = (
        f'{{"data":{{"dtype":"{STORED_TYPES[dtype].name}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[0,{data.nbytes}]}}}}'
    )
    text = header.encode()
    text += b" " * (-len(text) % 8)
    left = [memoryview(len(text).to_bytes(8, "little") + text), data.data]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        while left:
            written = os.writev(descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
    finally:
        os.close(descriptor)
