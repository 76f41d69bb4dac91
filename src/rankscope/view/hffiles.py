"""The safetensors files of one forward: written by a thread of their own, while the next tensor is
measured.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rankscope.record.dtypes import STORED_TYPES

__all__ = ["TensorWriter"]

_MOST_WAITING: Final = 16
"""Tensors that wait to be written: they may take memory."""


class TensorWriter:
    """Writes files in the order they are asked for; all of them are there when it is left."""

    def __init__(self) -> None:
        self._waiting: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> TensorWriter:
        """Begin; the thread comes with the first file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the last file.

        Raises:
            OSError: a file could not be written.
        """
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            while self._waiting:
                self._waiting.popleft().result()

    def write(self, path: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
        """Have a tensor written under the one key `data`, in place of what has that name.

        Args:
            path: of the file.
            dtype: torch's name.
            shape: of the tensor.
            data: its bytes in row-major order; they stay as they are until this is left.

        Raises:
            OSError: a file could not be written; one of those asked for before.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1)
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(_write, path, dtype, shape, data))


def _write(path: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
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
