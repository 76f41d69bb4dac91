"""Safetensors files: of tensors that are made one after the other, one in memory at a time, and of
a single one that is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.chunks.chunkheader import LENGTH_BYTES, entry_text
from rankscope.errors import FolderError
from rankscope.record.dtypes import STORED_TYPES
from rankscope.run.replacing import replacing
from rankscope.run.reserving import reserve

__all__ = ["Outgoing", "link_tensor", "write_tensor", "write_tensors"]

_WORTH_RESERVING: Final = 128 << 10

Outgoing = tuple[str, str, tuple[int, ...], Callable[[], NDArray[Any]]]
"""Key, dtype in torch's name, shape, and what makes its bytes."""


def write_tensors(out: Path, tensors: Sequence[Outgoing]) -> int:
    """Write the file, under another name until it is whole; one that is there is replaced, and the
    one a link points to, never a device or a folder.

    Returns:
        its size.

    Raises:
        FolderError: it cannot be written.
    """
    target = _target(out)
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape, _ in tensors:
        stored = STORED_TYPES[dtype]
        end = offset + stored.nbytes(shape)
        header[key] = {"dtype": stored.name, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = _framed(json.dumps(header, separators=(",", ":")).encode("utf-8", "replace"))
    try:
        with replacing(target) as file:
            file.write(head)
            for key, dtype, shape, make in tensors:
                data = make()
                assert data.nbytes == STORED_TYPES[dtype].nbytes(shape), key
                file.write(data.data)
    except OSError as error:
        raise _refusal(out, error) from error
    return len(head) + offset


def write_tensor(path: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
    """Write a file of one tensor under the key `data`; one that has its name is removed before, for
    its bytes may be those of another name too (`link_tensor`).

    Args:
        path: of the file.
        dtype: torch's name.
        shape: of the tensor.
        data: its bytes in row-major order.

    Raises:
        OSError: it cannot be written.
    """
    entry = entry_text("data", STORED_TYPES[dtype].name, shape, 0, data.nbytes)
    head = _framed(f"{{{entry}}}".encode())
    left = [memoryview(head), data.data]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        descriptor = os.open(path, flags, 0o666)
    try:
        if data.nbytes >= _WORTH_RESERVING:
            reserve(descriptor, 0, len(head) + data.nbytes)
        while left:
            written = os.writev(descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
    finally:
        os.close(descriptor)


def _framed(header: bytes) -> bytes:
    """Return a header as a file begins with it: its length before it, blanks behind it."""
    header += b" " * (-len(header) % LENGTH_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def link_tensor(path: str, written: str) -> bool:
    """Give a file of a tensor one more name; False where the file system has no such names.

    Args:
        path: the name; what has it is removed before.
        written: the name that the file has.

    Raises:
        OSError: what has the name cannot be removed.
    """
    try:
        os.link(written, path)
    except FileExistsError:
        os.unlink(path)
        return link_tensor(path, written)
    except OSError:
        return False
    return True


def _target(out: Path) -> Path:
    """Return the file to be replaced or made, the folder it is in made.

    Raises:
        FolderError: it is no file, or its folder cannot be made.
    """
    try:
        target = out.expanduser().resolve()
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "no regular file"
            raise FolderError(f"--out {out}: is {kind}: give the name of a file to write")
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise _refusal(out, error) from error
    return target


def _refusal(out: Path, error: Exception) -> FolderError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return FolderError(
        f"--out {out}: cannot be written: {reason}; nothing was left there: make room, or give "
        f"another name"
    )
