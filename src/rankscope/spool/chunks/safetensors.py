"""Safetensors files: what writes or reads one asks this module, which alone knows the format.

    u64        length N of the header
    N bytes    {"__metadata__": {text: text}, key: {"dtype", "shape", "data_offsets"}, ...} as JSON,
               filled with blanks
    the rest   the bytes of the tensors, one behind the other

Where all shapes are known the header is written first (`write_tensors`, `write_tensor`), else last,
into room that was left for it (`write_arrays`, chunks).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from rankscope.errors import RankscopeError, TraceError, os_errors_as
from rankscope.record.value import STORED_TYPES, TORCH_NAMES
from rankscope.run.files import replacing, reserve

LENGTH_BYTES: Final = 8
MOST_HEADER_BYTES: Final = 100_000_000  # what safetensors itself reads at most
CHECKSUM_DIGITS: Final = 16
_METADATA: Final = "__metadata__"
_CHECKSUM: Final = "xxh3_64"
"""Of all bytes behind the header, then of the header with `_NOT_YET` in place of the checksum."""
_NOT_YET: Final = "0" * CHECKSUM_DIGITS
_MANY: Final = 10**15  # more rows, or bytes, no file has
_MOST_DIMS: Final = 64
_WORTH_RESERVING: Final = 128 << 10
_PIECE_BYTES: Final = 4 << 20

Outgoing = tuple[str, str, tuple[int, ...], Callable[[], NDArray[Any]]]
"""Key, dtype in torch's name, shape, and the function that makes the bytes."""
Entry = tuple[str, str, tuple[int, ...], int, int]
"""Key, dtype in torch's name, shape, offsets of the first byte and of the end behind the header."""


def entry_text(key: str, stored_type: str, shape: Sequence[int], begin: int, end: int) -> str:
    """Return the header's JSON for one tensor; the key as JSON has it between quotes."""
    dims = ",".join(map(str, shape))
    return f'"{key}":{{"dtype":"{stored_type}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'


def header_text(entries: Iterable[str], about: Mapping[str, str] | None = None) -> bytes:
    """Return a header, without its length and blanks, of the texts of its entries and metadata."""
    head = [] if about is None else [f'"{_METADATA}":{json.dumps(about, separators=(",", ":"))}']
    return f"{{{','.join([*head, *entries])}}}".encode("ascii")


def framed_header(header: bytes, room: int = 0) -> bytes:
    """Return a header as it begins a file: with its length in front, and padded with blanks to
    `room` bytes, or to a multiple of eight."""
    room = room or len(header) + -len(header) % LENGTH_BYTES
    return room.to_bytes(LENGTH_BYTES, "little") + header.ljust(room)


def write_tensors(path: Path, tensors: Sequence[Outgoing]) -> int:
    """Write tensors, one in memory at a time, under another name until the file is whole; an
    existing file is replaced. Return the size. Raises OSError if it cannot be written."""
    entries, offset = [], 0
    for key, dtype, shape, _ in tensors:
        stored, begin = STORED_TYPES[dtype], offset
        offset += stored.nbytes(shape)
        entries.append(entry_text(json.dumps(key)[1:-1], stored.name, shape, begin, offset))
    head = framed_header(header_text(entries))
    with replacing(path) as file:
        file.write(head)
        for key, dtype, shape, make in tensors:
            data = make()
            assert data.nbytes == STORED_TYPES[dtype].nbytes(shape), key
            file.write(data.data)
    return len(head) + offset


def write_arrays(
    path: Path,
    arrays: Mapping[str, Callable[[], NDArray[Any]]],
    about: Mapping[str, str],
    *,
    is_synced: bool = True,
) -> None:
    """Write arrays whose shapes are not known before, otherwise as `write_tensors`: each is made
    once, and the header, which has their places, is written last, with a checksum of the whole
    file. Raises OSError if it cannot be written."""
    about = {**about, _CHECKSUM: _NOT_YET}
    widest = [entry_text(key, "BOOL", (_MANY, _MANY), _MANY, _MANY) for key in arrays]
    # room for the widest entries there can be; the data begins 8 bytes behind a
    # multiple of 64
    room = len(header_text(widest, about)) + 63 & ~63
    entries, offset, checksum = [], 0, xxhash.xxh3_64()
    with replacing(path, is_synced=is_synced) as file:
        file.seek(LENGTH_BYTES + room)
        for key, make in arrays.items():
            array = np.ascontiguousarray(make())
            begin, offset = offset, offset + array.nbytes
            stored = STORED_TYPES[array.dtype.name].name
            entries.append(entry_text(key, stored, array.shape, begin, offset))
            data = array.reshape(-1).view(np.uint8).data
            checksum.update(data)
            file.write(data)
        header = header_text(entries, about).ljust(room)
        checksum.update(header)
        header = header.replace(_NOT_YET.encode(), checksum.hexdigest().encode(), 1)
        file.seek(0)
        file.write(framed_header(header, room))


def write_tensor(
    path: str,
    dtype: str,
    shape: tuple[int, ...],
    data: NDArray[np.uint8],
    written: str | None = None,
) -> None:
    """Write a file of one tensor under the key `data`. An existing file of that name is removed
    first, not overwritten: its bytes may have another name too. `written`, a file of the same
    tensor, gets one more name where the file system can. Raises OSError if it cannot be written."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    if written is not None:
        with contextlib.suppress(OSError):
            os.link(written, path)
            return
    entry = entry_text("data", STORED_TYPES[dtype].name, shape, 0, data.nbytes)
    head = framed_header(header_text([entry]))
    with open(path, "xb") as file:
        if data.nbytes >= _WORTH_RESERVING:
            reserve(file.fileno(), 0, len(head) + data.nbytes)
        file.write(head)
        file.write(data.data)


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes at an offset, however often it takes."""
    unwritten = memoryview(data)
    while unwritten:
        written = os.pwrite(descriptor, unwritten, at)
        at, unwritten = at + written, unwritten[written:]


class MappedFile:
    """A file whose header is read with its blanks, and whose other bytes are mapped."""

    def __init__(self, path: Path, error: type[RankscopeError]) -> None:
        """Read and map. Raises `error` if that fails or the header does not fit the size."""
        with os_errors_as(error, f"{path}: cannot be read"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
                raise error(
                    f"{path}: header of {length} bytes in a file of {size}: the file is damaged"
                )
            self.header, self.start = file.read(length), LENGTH_BYTES + length
            self.data: NDArray[np.uint8] = np.empty(0, np.uint8)
            if size > self.start:  # a mapping of nothing is an error
                self.data = np.memmap(file, np.uint8, "r", self.start)

    def is_unchanged(self, about: Mapping[str, str]) -> bool:
        """True where it has the checksum that `write_arrays` put into its metadata. Reads all."""
        expected, checksum = about.get(_CHECKSUM, ""), xxhash.xxh3_64(self.data.data)
        digits = expected.encode(errors="replace")
        checksum.update(self.header.replace(digits, _NOT_YET.encode(), 1))
        return checksum.hexdigest() == expected


def parse_entries(text: bytes, data_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    """Return the metadata of a header (with its blanks) and its entries, in its order. Raises
    ValueError for no header, or one that does not fit the `data_bytes` behind it."""
    try:
        # json looks at blanks one by one, and most of a header may be blanks
        end = text.rfind(b"}") + 1
        decoded = json.loads(text[:end])
        if text[end:] != b" " * (len(text) - end):
            raise ValueError("something follows its JSON")
        about: dict[str, str] = decoded.pop(_METADATA, {})
        if not all(isinstance(text_value, str) for text_value in about.values()):
            raise ValueError("its metadata is not text alone")
        entries = [_checked(key, entry) for key, entry in decoded.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__}: {error})") from error
    end = 0
    # no holes and no overlaps: two tensors on the same bytes would pass every other check
    for begin, behind in sorted(entry[3:] for entry in entries):
        if begin != end:
            raise ValueError(f"a tensor begins at byte {begin}, expected {end}")
        end = behind
    if end != data_bytes:
        raise ValueError(f"holds {data_bytes} bytes of tensors, its header says {end}")
    return about, entries


def _checked(key: str, entry: Any) -> Entry:
    dtype, shape, (begin, end) = TORCH_NAMES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not (type(begin) is type(end) is int and begin >= 0 and fits(dtype, shape, end - begin)):
        raise ValueError(f"{key!r} of {dtype} {shape} does not take the bytes {begin} to {end}")
    return key, dtype, tuple(shape), begin, end


def fits(dtype: str, shape: object, nbytes: int) -> bool:
    """True where a tensor of a dtype (torch's name) may have this shape, and then these bytes."""
    return (
        isinstance(shape, (list, tuple))
        and len(shape) <= _MOST_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
        and STORED_TYPES[dtype].nbytes(shape) == nbytes
    )


def as_array(data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return the bytes of a tensor as an array over them. Raises TraceError for dtypes that numpy
    lacks (bfloat16, the 8-bit floats)."""
    if dtype.startswith(("bfloat", "float8")):
        raise TraceError(f"numpy has no {dtype}: read its bytes, or open it with torch")
    array: NDArray[Any] = data.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return array


def checksum_of(descriptor: int, begin: int = 0, end: int = sys.maxsize) -> int:
    """Return xxh3_64 of a file's bytes from `begin` to `end` or its own end, read in pieces."""
    state: Any = xxhash.xxh3_64()
    while piece := os.pread(descriptor, min(_PIECE_BYTES, end - begin), begin):
        state.update(piece)
        begin += len(piece)
    return int(state.intdigest())
