"""A safetensors file of tensors that are made one after the other: one is in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rankscope.errors import FolderError
from rankscope.record.dtypes import STORED_TYPES

__all__ = ["Outgoing", "write_tensors"]

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
        name, item_bytes = STORED_TYPES[dtype]
        end = offset + prod(shape) * item_bytes
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(draft, flags, 0o666)
    except OSError as error:
        raise _refusal(out, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for key, dtype, shape, make in tensors:
                data = make()
                assert data.nbytes == prod(shape) * STORED_TYPES[dtype].item_bytes, key
                file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        raise _refusal(out, error) from error
    finally:
        draft.unlink(missing_ok=True)
    return 8 + len(text) + offset


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
