"""A chunk of full tensors: where it lies, the header that makes it a safetensors file, and how one
that its rank left unfinished is finished.

<trace>/tensors/rank00003/000001.safetensors      rank 3; rank00003.1/ in its incarnation 1

    u64        length N of the header region, written when the file is made
    N bytes    zeros as long as the chunk is written to; then the JSON header, filled with spaces,
               its first byte last: a chunk is finished when that is no zero. Behind a zero stands
               the header of a chunk without tensors, which says whose it is
    the rest   the bytes of the tensors, one behind the other

A tensor's key is its reference, a number in decimal. Bytes that no record accounts for are named
"unrecorded.<n>", because a safetensors file may have no holes. The metadata says whose chunk it is
and, under "xxh3", the checksum of each tensor: 16 hexadecimal digits, in the order of the keys.

A rank that was killed leaves one chunk without its header, and perhaps the first bytes of a tensor
behind the last whole one. The TENSOR records say where each whole tensor lies: the header is made
of them, and what follows the last is cut off.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.errors import ChunkError, os_errors_as
from rankscope.record.ranks import MAX_INCARNATIONS, MAX_RANKS, StreamId
from rankscope.record.value import STORED_TYPES
from rankscope.run.folders import TENSOR_FOLDER
from rankscope.spool.chunks.safetensors import (
    CHECKSUM_DIGITS,
    LENGTH_BYTES,
    MOST_HEADER_BYTES,
    MappedFile,
    checksum_of,
    entry_text,
    fits,
    framed_header,
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
    """Folder of the chunks of one stream; its name is made of integers only."""
    life = f".{stream.incarnation}" if stream.incarnation else ""
    return trace / TENSOR_FOLDER / f"rank{stream.rank:05d}{life}"


def stream_of_folder(folder: Path) -> StreamId | None:
    """The stream whose chunks a folder holds, None for any other folder."""
    match = _FOLDER_NAME.fullmatch(folder.name)
    if match is None or int(match[1]) >= MAX_RANKS or int(match[2] or 0) >= MAX_INCARNATIONS:
        return None
    stream = StreamId(rank=int(match[1]), incarnation=int(match[2] or 0))
    return stream if chunk_folder(Path(), stream).name == folder.name else None


def chunk_path(folder: Path, number: int) -> Path:
    """Path of chunk `number` (from 1) of a stream."""
    return folder / f"{number:06d}.safetensors"


def chunk_numbers(folder: Path) -> list[int]:
    """Numbers of the chunks in a folder, ascending, or []. Raises ChunkError if unlistable."""
    try:
        matches = [_CHUNK_NAME.fullmatch(path.name) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ChunkError(f"{folder}: cannot be listed: {error.strerror}") from error
    return sorted(int(match[1]) for match in matches if match is not None)


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
    return framed_header(header.ljust(region_bytes, b"\0"), region_bytes)


def begun_rank(region: bytes) -> tuple[int, int] | None:
    """Return the rank and the number of an unfinished chunk, None if it does not have them: older
    ranks left zeros, and a killed rank may have begun to write the final header."""
    try:
        header = parse_header(b"{" + region[1:].rstrip(b"\0"), 0)
    except ChunkError:
        return None
    return header.stream.rank, header.number


def rebuilt_json(stream: StreamId, number: int, tensors: Iterable[HeldTensor]) -> bytes:
    """Return the header for these tensors, which follow each other without a hole."""
    texts, checksums = [], []
    for index, tensor in enumerate(tensors):
        key = str(tensor.reference) if tensor.reference else f"{_UNRECORDED}{index}"
        stored_type = STORED_TYPES[tensor.dtype].name
        texts.append(entry_text(key, stored_type, tensor.shape, tensor.begin, tensor.end))
        checksums.append(f"{tensor.checksum:016x}")
    return header_json(stream, number, texts, "".join(checksums))


def write_header(descriptor: int, text: bytes, region_bytes: int) -> None:
    """Fill the header region of a chunk; the first byte last, as it marks the chunk as finished."""
    # all but the first byte: it is a zero until the rest of the header is there
    write_all(descriptor, text[1:].ljust(region_bytes - 1, b" "), LENGTH_BYTES + 1)
    # a rank killed before this line leaves a chunk that is still unfinished
    write_all(descriptor, text[:1], LENGTH_BYTES)


def parse_header(text: bytes, data_bytes: int) -> ChunkHeader:
    """Return the header of a finished chunk, checked against the bytes that follow it in the file.
    Raises ChunkError for other headers, or one that does not fit the file."""
    try:
        about, entries = parse_entries(text, data_bytes)
        if about["format"] != CHUNK_FORMAT:
            raise ValueError(f"format {about['format']!r}, expected {CHUNK_FORMAT!r}")
        stream = StreamId(rank=int(about["rank"]), incarnation=int(about["incarnation"]))
        number, digits, size = int(about["chunk"]), about["xxh3"], CHECKSUM_DIGITS
        if len(digits) != size * len(entries):
            raise ValueError(f"{len(digits)} digits of checksums for {len(entries)} tensors")
        checksums = [int(digits[at : at + size], 16) for at in range(0, len(digits), size)]
        tensors = tuple(
            HeldTensor(_reference(key), dtype, shape, begin, end, checksum)
            for (key, dtype, shape, begin, end), checksum in zip(entries, checksums)
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
        raise ValueError(f"key {key!r} is not a reference")
    return int(key)


_UNFINISHED: Final = b"\0"
"""First byte of a header region that was never filled in."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """State of one chunk; `tensors` counts the readable ones."""

    path: Path
    tensors: int = 0
    lost: tuple[int, ...] = ()
    """References whose bytes are missing or differ from the recorded ones."""
    note: str = ""
    """What is wrong; "" where the chunk is whole and nothing was lost."""


def recorded_tensors(
    tensors: Array, definitions: Mapping[int, Mapping[str, Any]], number: int
) -> list[HeldTensor]:
    """Return the tensors of one chunk according to a stream's TENSOR records (TENSOR_DTYPE, in
    commit order), each place once, in the order of the data."""
    rows = tensors[tensors["chunk"] == number]
    _, firsts = np.unique(rows["index"], return_index=True)
    stored = []
    for row in rows[firsts]:
        meta = definitions.get(int(row["meta"]), {})
        dtype, shape = meta.get("dtype"), meta.get("shape")
        begin, nbytes = int(row["offset"]), int(row["nbytes"])
        if isinstance(dtype, str) and dtype in STORED_TYPES and fits(dtype, shape, nbytes):
            end, checksum = begin + nbytes, int(row["checksum"])
            stored.append(
                HeldTensor(int(row["reference"]), dtype, tuple(shape or ()), begin, end, checksum)
            )
    return sorted(stored, key=lambda tensor: (tensor.begin, tensor.end))


def read_header(
    path: Path, place: tuple[StreamId, int] | None = None
) -> tuple[MappedFile, ChunkHeader | None]:
    """Return a chunk, mapped, and what its header says, None where it is unfinished.

    An unfinished chunk may be of another life of the rank of `place`: its records tell whether its
    bytes are theirs. Raises ChunkError where it cannot be read, is no chunk, or says that it is of
    another place.
    """
    file, header = MappedFile(path, ChunkError), None
    try:
        if file.header[:1] == _UNFINISHED:
            says = begun_rank(file.header)
            is_other = place and says and says != (place[0].rank, place[1])
        else:
            header = parse_header(file.header, len(file.data))
            says = header.stream.rank, header.number
            is_other = place and (header.stream, header.number) != place
    except ChunkError as error:
        raise ChunkError(f"{path}: {error}; the chunk is damaged") from error
    if is_other and says:
        whose = header.stream.name if header else f"rank {says[0]}"
        raise ChunkError(f"{path}: says it is chunk {says[1]} of {whose}; it was moved or renamed")
    return file, header


def finish_chunks(
    folder: Path, stream: StreamId, tensors: Array, definitions: Mapping[int, Mapping[str, Any]]
) -> list[ChunkReport]:
    """Finish every chunk of a stream whose rank has ended, from its TENSOR records; safe to call
    again. Return one report per chunk, including missing chunks that records name. Raises
    ChunkError if the folder cannot be listed."""
    present = chunk_numbers(folder)
    reports = []
    for number in present:
        path = chunk_path(folder, number)
        recorded = recorded_tensors(tensors, definitions, number)
        try:
            reports.append(_finish(path, stream, number, recorded))
        except _StillWrittenError as error:
            reports.append(ChunkReport(path=path, tensors=len(recorded), note=str(error)))
        except (ChunkError, OSError) as error:
            lost = tuple(tensor.reference for tensor in recorded)
            text = str(error) if isinstance(error, ChunkError) else f"{path}: {error.strerror}"
            reports.append(ChunkReport(path=path, lost=lost, note=text))
    for number in sorted({*tensors["chunk"].tolist()} - {*present}):
        path = chunk_path(folder, number)
        lost = tuple(
            recorded.reference for recorded in recorded_tensors(tensors, definitions, number)
        )
        note = f"{path}: is not there; the records name {len(lost)} tensors in it"
        reports.append(ChunkReport(path=path, lost=lost, note=note))
    return reports


def _finish(path: Path, stream: StreamId, number: int, recorded: list[HeldTensor]) -> ChunkReport:
    if not recorded and _is_torn(path):
        path.unlink()
        return ChunkReport(path=path)
    file, header = read_header(path, (stream, number))
    start = file.start
    if header is not None:
        present = {(tensor.reference, tensor.checksum) for tensor in header.tensors}
        lost = tuple(t.reference for t in recorded if (t.reference, t.checksum) not in present)
        note = f"{path}: lacks {len(lost)} tensors that were recorded" if lost else ""
        count = sum(tensor.reference > 0 for tensor in header.tensors)
        return ChunkReport(path=path, tensors=count, lost=lost, note=note)
    with _held_alone(path) as descriptor:
        data_bytes = os.fstat(descriptor).st_size - start
        if not recorded:
            if data_bytes:
                return _set_aside(path, data_bytes)
            path.unlink()
            return ChunkReport(path=path)
        intact, lost = _whole_tensors(descriptor, start, data_bytes, recorded)
        end = intact[-1].end if intact else 0
        text = rebuilt_json(stream, number, intact)
        if len(text) > start - LENGTH_BYTES:
            raise ChunkError(f"{path}: its header has no room for {len(intact)} entries")
        os.ftruncate(descriptor, start + end)
        write_header(descriptor, text, start - LENGTH_BYTES)
    count = sum(tensor.reference > 0 for tensor in intact)
    cut = data_bytes - end
    parts = [f"was left unfinished with {count} whole tensors"]
    parts += [f"{cut} bytes of a tensor that never became whole were cut off"] if cut else []
    parts += [f"{len(lost)} recorded tensors are not as they were written"] if lost else []
    note = f"{path}: {'; '.join(parts)}"
    return ChunkReport(path=path, tensors=count, lost=lost, note=note)


def _is_torn(path: Path) -> bool:
    """True where a rank was killed while it made the chunk: not even its header region is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(LENGTH_BYTES + 1)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    is_blank = head[LENGTH_BYTES:] in (b"", _UNFINISHED)
    return size < LENGTH_BYTES or (
        is_blank and length <= MOST_HEADER_BYTES and size < LENGTH_BYTES + length
    )


def _set_aside(path: Path, data_bytes: int) -> ChunkReport:
    """Take a chunk out of the way in which no tensor became whole; nothing is thrown away."""
    aside = path.with_suffix(".unfinished")
    path.rename(aside)
    note = f"{path}: was left before its first tensor was whole; it is now {aside.name}"
    return ChunkReport(path=path, note=note)


def _whole_tensors(
    descriptor: int, start: int, data_bytes: int, recorded: Sequence[HeldTensor]
) -> tuple[list[HeldTensor], tuple[int, ...]]:
    """Return the recorded tensors in the file, holes filled, and the other references."""

    def checksum(begin: int, end: int) -> int:
        return checksum_of(descriptor, start + begin, start + end)

    intact: list[HeldTensor] = []
    lost: list[int] = []
    end = 0
    for tensor in recorded:
        is_inside = end <= tensor.begin <= tensor.end <= data_bytes
        # a record says that the bytes were written, not that they are still the same: they are read
        if not is_inside or checksum(tensor.begin, tensor.end) != tensor.checksum:
            lost.append(tensor.reference)
            continue
        # a safetensors file has no holes: what no record accounts for gets a name
        if tensor.begin > end:
            shape, digest = (tensor.begin - end,), checksum(end, tensor.begin)
            intact.append(HeldTensor(0, "uint8", shape, end, tensor.begin, digest))
        intact.append(tensor)
        end = tensor.end
    return intact, tuple(lost)


def damaged_references(path: Path, place: tuple[StreamId, int] | None = None) -> list[int]:
    """Return the references of a finished chunk whose bytes do not have their checksums. Raises as
    `read_header`, and ChunkError for an unfinished chunk."""
    chunk, header = read_header(path, place)
    if header is None:
        raise ChunkError(f"{path}: is unfinished; rankscope recover finishes it")
    start = chunk.start
    with os_errors_as(ChunkError, f"{path}: cannot be read"), path.open("rb") as file:
        digests = [
            checksum_of(file.fileno(), start + tensor.begin, start + tensor.end)
            for tensor in header.tensors
        ]
    return [
        tensor.reference
        for tensor, digest in zip(header.tensors, digests)
        if digest != tensor.checksum
    ]


class _StillWrittenError(ChunkError):
    """A chunk whose rank is alive: it finishes it itself."""


@contextmanager
def _held_alone(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _StillWrittenError(f"{path}: its rank still writes it") from error
        yield descriptor
    finally:
        os.close(descriptor)
