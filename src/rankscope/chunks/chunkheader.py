"""A chunk of full tensors: where it lies, and the header that makes it a safetensors file.

<trace>/tensors/rank00003/000001.safetensors      rank 3; rank00003.1/ in its incarnation 1

    u64        length N of the header region, written when the file is made
    N bytes    zeros as long as the chunk is written to; then the JSON header, filled with spaces,
               its first byte last: a chunk is finished when that is no zero. Behind a zero stands
               the header of a chunk without tensors, which says whose it is
    the rest   the bytes of the tensors, one behind the other

A tensor's key is its reference, a number in decimal. Bytes that no record accounts for are named
"unrecorded.<n>", because a safetensors file may have no holes. `__metadata__` says whose chunk it
is and, under "xxh3", the checksum of each tensor: 16 hexadecimal digits, in the order of the keys.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rankscope.errors import ChunkError
from rankscope.record.dtypes import STORED_TYPES, TORCH_NAMES
from rankscope.record.streams import MAX_INCARNATIONS, MAX_RANKS, StreamId
from rankscope.run.filenames import TENSOR_FOLDER

CHUNK_FORMAT: Final = "rankscope.tensors/1"
LENGTH_BYTES: Final = 8
MOST_HEADER_BYTES: Final = 100_000_000
"""What safetensors itself reads at most."""
CHUNK_TEXT_BYTES: Final = 256
"""More than the header takes without entries and checksums."""
CHECKSUM_DIGITS: Final = 16
_CHUNK_NAME: Final = re.compile(r"(\d{6,9})\.safetensors")
_FOLDER_NAME: Final = re.compile(r"rank(\d{5,8})(?:\.([1-9]\d{0,4}))?")
_UNRECORDED: Final = "unrecorded."
_MOST_DIMS: Final = 64
_REFERENCE: Final = re.compile(r"[1-9][0-9]{0,19}")


class HeldTensor(NamedTuple):
    """One tensor of a chunk."""

    reference: int
    """0 for bytes that no record accounts for."""
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header region."""
    end: int
    checksum: int
    """xxh3_64 of the bytes as stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """What the header of a finished chunk says."""

    stream: StreamId
    number: int
    tensors: tuple[HeldTensor, ...]


def chunk_folder(trace: Path, stream: StreamId) -> Path:
    """Where the chunks of one stream lie; the name is made of integers only."""
    life = f".{stream.incarnation}" if stream.incarnation else ""
    return trace / TENSOR_FOLDER / f"rank{stream.rank:05d}{life}"


def stream_of_folder(folder: Path) -> StreamId | None:
    """The stream whose chunks a folder holds, None where it is no such folder."""
    found = _FOLDER_NAME.fullmatch(folder.name)
    if found is None or int(found[1]) >= MAX_RANKS or int(found[2] or 0) >= MAX_INCARNATIONS:
        return None
    stream = StreamId(rank=int(found[1]), incarnation=int(found[2] or 0))
    return stream if chunk_folder(Path(), stream).name == folder.name else None


def chunk_path(folder: Path, number: int) -> Path:
    """Where chunk `number` (from 1) of a stream lies."""
    return folder / f"{number:06d}.safetensors"


def chunk_numbers(folder: Path) -> list[int]:
    """Numbers of the chunks in a stream's folder, ascending; [] where there is no such folder.

    Raises:
        ChunkError: the folder cannot be listed.
    """
    try:
        found = [_CHUNK_NAME.fullmatch(path.name) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ChunkError(f"{folder}: cannot be listed: {error.strerror}") from error
    return sorted(int(match[1]) for match in found if match is not None)


def entry_text(key: str, stored_type: str, shape: Sequence[int], begin: int, end: int) -> str:
    """Return the header's JSON for one tensor; the key is ours, never a name out of a model."""
    dims = ",".join(map(str, shape))
    return f'"{key}":{{"dtype":"{stored_type}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'


def header_json(stream: StreamId, number: int, texts: Sequence[str], checksums: str) -> bytes:
    """Return the header of a chunk without its padding."""
    metadata = {
        "format": CHUNK_FORMAT,
        "rank": str(stream.rank),
        "incarnation": str(stream.incarnation),
        "chunk": str(number),
        "xxh3": checksums,
    }
    head = f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'
    return f"{{{','.join([head, *texts])}}}".encode("ascii")


def begun_region(stream: StreamId, number: int, region_bytes: int) -> bytes:
    """Return the header region of a chunk that is written to: it says whose it is, and begins with
    a zero."""
    return (b"\0" + header_json(stream, number, (), "")[1:]).ljust(region_bytes, b"\0")


def begun_rank(region: bytes) -> tuple[int, int] | None:
    """Return the rank and the number of an unfinished chunk, None where it does not say them: older
    ranks left zeros, and one that was killed may have begun to write the header of all tensors."""
    try:
        header = parse_header(b"{" + region[1:].rstrip(b"\0"), 0)
    except ChunkError:
        return None
    return header.stream.rank, header.number


def rebuilt_json(stream: StreamId, number: int, tensors: Iterable[HeldTensor]) -> bytes:
    """Return the header for these tensors, which follow each other without a hole."""
    texts, checksums = [], []
    for index, held in enumerate(tensors):
        key = str(held.reference) if held.reference else f"{_UNRECORDED}{index}"
        stored_type = STORED_TYPES[held.dtype].name
        texts.append(entry_text(key, stored_type, held.shape, held.begin, held.end))
        checksums.append(f"{held.checksum:016x}")
    return header_json(stream, number, texts, "".join(checksums))


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes at an offset, however often it takes."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        at, left = at + written, left[written:]


def write_header(descriptor: int, text: bytes, region_bytes: int) -> None:
    """Fill the header region of a chunk; its first byte last, for with that it is finished."""
    write_all(descriptor, text[1:].ljust(region_bytes - 1, b" "), LENGTH_BYTES + 1)
    write_all(descriptor, text[:1], LENGTH_BYTES)


def parse_header(text: bytes, data_bytes: int) -> ChunkHeader:
    """Read the header of a finished chunk; everything in it is checked against the file.

    Args:
        text: the header region.
        data_bytes: what follows it in the file.

    Raises:
        ChunkError: it is no header of ours, or does not fit the file.
    """
    try:
        # json looks at blanks one by one, and most of a header is blanks
        end = text.rfind(b"}") + 1
        decoded = json.loads(text[:end])
        if text[end:] != b" " * (len(text) - end):
            raise ValueError("something follows its JSON")
        metadata: Any = decoded.pop("__metadata__")
        if metadata["format"] != CHUNK_FORMAT:
            raise ChunkError(f"format {metadata['format']!r}, expected {CHUNK_FORMAT!r}")
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ChunkError("its metadata is not text alone")
        stream = StreamId(rank=int(metadata["rank"]), incarnation=int(metadata["incarnation"]))
        number, checksums = int(metadata["chunk"]), metadata["xxh3"]
        if len(checksums) != CHECKSUM_DIGITS * len(decoded):
            raise ChunkError(f"{len(checksums)} digits of checksums for {len(decoded)} tensors")
        tensors = [
            _held(key, entry, int(checksums[at : at + CHECKSUM_DIGITS], 16))
            for key, entry, at in zip(
                decoded, decoded.values(), range(0, len(checksums), CHECKSUM_DIGITS)
            )
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkError(f"its header cannot be read ({type(error).__name__}: {error})") from error
    end = 0
    for held in sorted(tensors, key=lambda held: (held.begin, held.end)):
        if held.begin != end:
            raise ChunkError(f"a tensor begins at byte {held.begin}, expected {end}")
        end = held.end
    if end != data_bytes:
        raise ChunkError(f"holds {data_bytes} bytes of tensors, its header says {end}")
    return ChunkHeader(stream=stream, number=number, tensors=tuple(tensors))


def _held(key: str, entry: Any, checksum: int) -> HeldTensor:
    dtype, shape = TORCH_NAMES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    numbers = (*shape, begin, end)
    if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"tensor {key!r} has no shape and place that a tensor can have")
    if STORED_TYPES[dtype].nbytes(shape) != end - begin:
        raise ValueError(f"tensor {key!r} of {dtype} {list(shape)} takes {end - begin} bytes")
    is_reference = _REFERENCE.fullmatch(key) is not None
    if not is_reference and not key.startswith(_UNRECORDED):
        raise ValueError(f"key {key!r} is no reference")
    reference = int(key) if is_reference else 0
    return HeldTensor(reference, dtype, shape, begin, end, checksum)
