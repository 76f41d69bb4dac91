"""A chunk of full tensors: where it lies, and the header that makes it a safetensors file.

<trace>/tensors/rank00003/000001.safetensors      rank 3; rank00003.1/ in its incarnation 1

    u64        length N of the header region, written when the file is made
    N bytes    zeros as long as the chunk is written to; then the JSON header, filled with spaces,
               its first byte last: a chunk is finished when that is no zero. Behind a zero stands
               the header of a chunk without tensors, which says whose it is
    the rest   the bytes of the tensors, one behind the other

A tensor's key is its reference, a number in decimal. Bytes that no record accounts for are named
"unrecorded.<n>", because a safetensors file may have no holes. The metadata says whose chunk it is
and, under "xxh3", the checksum of each tensor: 16 hexadecimal digits, in the order of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from rankscope.errors import ChunkError
from rankscope.record.dtypes import STORED_TYPES
from rankscope.record.streams import MAX_INCARNATIONS, MAX_RANKS, StreamId
from rankscope.run.filenames import TENSOR_FOLDER
from rankscope.spool.chunks.safetensors import (
    CHECKSUM_DIGITS,
    LENGTH_BYTES,
    entry_text,
    framed,
    header_text,
    parse_entries,
    write_all,
)

CHUNK_FORMAT: Final = "rankscope.tensors/1"
CHUNK_TEXT_BYTES: Final = 256  # more than the header takes without entries and checksums
_CHUNK_NAME: Final = re.compile(r"(\d{6,9})\.safetensors")
_FOLDER_NAME: Final = re.compile(r"rank(\d{5,8})(?:\.([1-9]\d{0,4}))?")
_UNRECORDED: Final = "unrecorded."
_REFERENCE: Final = re.compile(r"[1-9][0-9]{0,19}")


class HeldTensor(NamedTuple):
    """One tensor of a chunk: its reference (0 for bytes that no record accounts for), torch's name
    of its dtype, its place from the end of the header region, and xxh3_64 of the stored bytes."""

    reference: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int


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
    Raises ChunkError where the folder cannot be listed."""
    try:
        found = [_CHUNK_NAME.fullmatch(path.name) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ChunkError(f"{folder}: cannot be listed: {error.strerror}") from error
    return sorted(int(match[1]) for match in found if match is not None)


def header_json(stream: StreamId, number: int, texts: Sequence[str], checksums: str) -> bytes:
    """Return the header of a chunk without its padding."""
    metadata = {
        "format": CHUNK_FORMAT,
        "rank": str(stream.rank),
        "incarnation": str(stream.incarnation),
        "chunk": str(number),
        "xxh3": checksums,
    }
    return header_text(texts, metadata)


def begun_chunk(stream: StreamId, number: int, region_bytes: int) -> bytes:
    """Return what an unfinished chunk begins with: a header region whose first byte is a zero."""
    header = b"\0" + header_json(stream, number, (), "")[1:]
    return framed(header.ljust(region_bytes, b"\0"), region_bytes)


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


def write_header(descriptor: int, text: bytes, region_bytes: int) -> None:
    """Fill the header region of a chunk; the first byte last, as it marks the chunk as finished."""
    write_all(descriptor, text[1:].ljust(region_bytes - 1, b" "), LENGTH_BYTES + 1)
    write_all(descriptor, text[:1], LENGTH_BYTES)


def parse_header(text: bytes, data_bytes: int) -> ChunkHeader:
    """Return the header of a finished chunk, checked against the bytes that follow it in the file.
    Raises ChunkError where it is no header of ours, or does not fit the file."""
    try:
        about, found = parse_entries(text, data_bytes)
        if about["format"] != CHUNK_FORMAT:
            raise ValueError(f"format {about['format']!r}, expected {CHUNK_FORMAT!r}")
        stream = StreamId(rank=int(about["rank"]), incarnation=int(about["incarnation"]))
        number, digits, size = int(about["chunk"]), about["xxh3"], CHECKSUM_DIGITS
        if len(digits) != size * len(found):
            raise ValueError(f"{len(digits)} digits of checksums for {len(found)} tensors")
        checksums = [int(digits[at : at + size], 16) for at in range(0, len(digits), size)]
        tensors = tuple(
            HeldTensor(_reference(key), dtype, shape, begin, end, checksum)
            for (key, dtype, shape, begin, end), checksum in zip(found, checksums)
        )
    except KeyError as error:
        raise ChunkError(f"its header does not say its {error}") from error
    except ValueError as error:
        raise ChunkError(str(error)) from error
    return ChunkHeader(stream=stream, number=number, tensors=tensors)


def _reference(key: str) -> int:
    if key.startswith(_UNRECORDED):
        return 0
    if _REFERENCE.fullmatch(key) is None:
        raise ValueError(f"key {key!r} is no reference")
    return int(key)
