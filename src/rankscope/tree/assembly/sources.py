"""Where the bytes of streams lie: replicas in a trace folder, segments in a spool folder, or both.

    <trace>/spool/rank00003.0.cells     replica, with its end marker rank00003.0.json beside it, and
                                        what stands for its settled begin, rank00003.0.settled
    <folder>/rank00003.0/000001.cells   segment 1 of that stream: bytes from 1 * its size on

The relay frees segments once they are acknowledged, so a spool often holds only the end of a stream
and a replica its beginning; together they are the whole. What processes of one rank and life wrote
(a node was replaced) is never joined: the later one has the next life.

Chunks of full tensors are finished and carried along here too. A node that was replaced wrote as
the same rank in the same life as the one before it; its chunks go where its records go, to a life
of its own. Each stream notes its losses: in `kept_notes` what its rank did not keep (a full disk, a
chunk that a kill left unfinished), in `notes` recorded bytes that are not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import ChunkError, FolderError, SpoolError, os_errors_as
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.value import ValueFlag
from rankscope.run.files import piece_of
from rankscope.run.folders import (
    CELLS_SUFFIX,
    REPLICA_FOLDER,
    segment_indexes,
    segment_path,
    stream_named,
)
from rankscope.run.processes import is_alive
from rankscope.spool.chunks.chunkfiles import (
    chunk_folder,
    chunk_numbers,
    chunk_path,
    finish_chunks,
    read_header,
    rebuilt_json,
    recorded_tensors,
    write_header,
)
from rankscope.spool.chunks.safetensors import LENGTH_BYTES, write_all
from rankscope.spool.chunks.tensorfiles import TensorFiles, standing_references
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    MAX_RECORD_CELLS,
    UNKNOWN,
    first_record,
    origin_of,
)
from rankscope.spool.replicas import (
    NOTHING_SETTLED,
    as_cells,
    lock_for_reading,
    read_end,
    read_replica,
    replica_path,
    replicated,
    valid_prefix,
    valid_runs,
)
from rankscope.tree.assembly.rankstreams import Array, RankStream, StreamBytes, ValueColumns

_FIRST_BYTES = MAX_RECORD_CELLS * CELL_BYTES
"""The first record of a stream is whole in so many."""


_Length = int | SpoolError | None
"""Valid bytes of a replica, or why it cannot be read; None of a stream folder."""


@dataclass(slots=True)
class _StreamCopies:
    """What several places hold of one process's stream."""

    stream: StreamId
    """As the first trace folder that has it calls it, else as its spool does."""
    replicas: list[tuple[Path, int]] = field(default_factory=list)
    """Path and valid length."""
    segments: list[Path] = field(default_factory=list)
    markers: list[Path] = field(default_factory=list)
    """The replicas whose end markers are those of this stream."""
    faults: list[str] = field(default_factory=list)
    """Why files of it cannot be read, and which have the name of another stream."""

    def add(self, entry: Path, length: _Length, *, is_misnamed: bool = False) -> None:
        if is_misnamed:
            self.faults.append(
                f"{entry}: its first record says that it is of {self.stream.name}; it was moved or "
                f"renamed, and is read as that"
            )
        if length is None:
            self.segments.append(entry)
        elif isinstance(length, SpoolError):
            self.faults.append(str(length))
        else:
            self.replicas.append((entry, length))
            self.markers += [] if is_misnamed else [entry]


def find_streams(folders: Sequence[Path]) -> list[StreamBytes]:
    """Return the bytes of every stream found in trace, spool and replica folders, lowest rank
    first; a file that cannot be read is named in the notes of its stream. FolderError: one of the
    folders does not exist; SpoolError: a folder cannot be listed."""
    entries = []
    for folder in folders:
        if not folder.is_dir():
            raise FolderError(f"{folder}: no such folder")
        entries += _entries(folder)
    return _told_apart([_join(copies) for copies in _by_process(entries)])


def run_in(folder: Path) -> dict[str, Any]:
    """Return `id` and `settings` of the run whose records are in a trace folder, as the first rank
    that wrote some says; {} where none has."""
    for stream in sorted(replicated(folder)):
        with contextlib.suppress(OSError):
            data = piece_of(replica_path(folder, stream), 0, MAX_RECORD_CELLS * CELL_BYTES)
            first = _first_definition(data)
            if first.get("kind") == "rank" and isinstance(first.get("settings"), dict):
                return {"id": str(first.get("run_id", "")), "settings": first["settings"]}
    return {}


def origins_in(folder: Path) -> dict[StreamId, int]:
    """Return which process wrote each stream of one folder, as far as that is known there."""
    origins: dict[StreamId, int] = {}
    for stream, entry, length in _places(_entries(folder)):
        origin, writer = _writer_of(entry, length)
        if origin != UNKNOWN:
            origins.setdefault(_named(stream, writer), origin)
    return origins


def _entries(folder: Path) -> list[Path]:
    """Return what may be replicas or stream folders of a trace folder or a host's run folder."""
    places = [place for place in (folder, folder / REPLICA_FOLDER) if place.is_dir()]
    return [entry for place in places for entry in sorted(place.iterdir())]


def _places(entries: Sequence[Path]) -> Iterator[tuple[StreamId, Path, _Length]]:
    """Yield every replica with its valid length or error, then every stream folder (no length)."""
    # replicas before folders: the first one that has a first record names the stream
    replicas = [(path, path.stem, True) for path in entries if path.suffix == CELLS_SUFFIX]
    for entry, name, is_file in replicas + [(path, path.name, False) for path in entries]:
        stream = stream_named(name)
        if stream is not None and (entry.is_file() if is_file else segment_indexes(entry)):
            try:
                yield stream, entry, valid_prefix(entry) if is_file else None
            except SpoolError as error:
                yield stream, entry, error


def _by_process(entries: Sequence[Path]) -> list[_StreamCopies]:
    """Sort replicas and stream folders by the process that wrote them, as their first records say,
    whatever their names are.

    A part without its first record (an empty replica, a spool whose begin was freed) goes to the
    first process of that rank and life.
    """
    copies_of: dict[tuple[int, int], _StreamCopies] = {}
    vague: list[tuple[StreamId, Path, _Length]] = []
    places = [(place, *_writer_of(*place[1:])) for place in _places(entries)]
    writers = {origin: writer for _, origin, writer in places if writer is not None}
    for (named, entry, length), origin, _ in places:
        if origin == UNKNOWN:
            vague.append((named, entry, length))
            continue
        stream = _named(named, writers.get(origin))
        # by the process and not by the file: two nodes may have written one name, and one stream
        # lie under two
        copies = copies_of.setdefault((stream.rank, origin), _StreamCopies(stream))
        copies.add(entry, length, is_misnamed=stream != named)
    all_copies = list(copies_of.values())
    for stream, entry, length in vague:
        like = next((copies for copies in all_copies if copies.stream == stream), None)
        if like is None:
            all_copies.append(like := _StreamCopies(stream))
        like.add(entry, length)
    return all_copies


def _writer_of(entry: Path, length: _Length) -> tuple[int, StreamId | None]:
    """Return which process wrote a replica of this length, or a stream folder (no length), and who
    that says it is; None where its first record is not here."""
    if isinstance(length, SpoolError) or length == 0:
        return UNKNOWN, None
    try:
        if length is not None:
            data = read_replica(entry, min(length, _FIRST_BYTES))[0]
            return origin_of(data), _identity(data)
        with StreamReader(entry) as reader:
            first = b"" if reader.lowest() else reader.read_from(0, CELL_BYTES)
            return reader.origin(), _identity(first)
    except SpoolError:
        return UNKNOWN, None  # its begin was freed, and nobody noted who wrote it; or damaged


def _named(stream: StreamId, writer: StreamId | None) -> StreamId:
    """Return whose records a place holds; where a process replaced another, the later life
    counts."""
    if writer is None or (writer.rank, writer.incarnation) == (stream.rank, stream.incarnation):
        return stream
    # the collector gave it the next life: the name of the file says more than the record here
    is_later = writer.rank == stream.rank and writer.incarnation < stream.incarnation
    return stream if is_later else writer


def _identity(data: Array | bytes) -> StreamId | None:
    first = _first_definition(data)
    if first.get("kind") != "rank" or "rank" not in first:
        return None
    return StreamId(rank=first["rank"], incarnation=first.get("incarnation", 0))


def _told_apart(streams: Sequence[StreamBytes]) -> list[StreamBytes]:
    """Give streams of one rank and life lives of their own, in the order in which they began."""
    lives: dict[int, int] = {}
    renamed = []
    for stream in sorted(streams, key=lambda stream: (stream.stream, _began_ns(stream.data))):
        life = max(stream.stream.incarnation, lives.get(stream.stream.rank, -1) + 1)
        lives[stream.stream.rank] = life
        renamed.append(replace(stream, stream=StreamId(rank=stream.stream.rank, incarnation=life)))
    return sorted(renamed, key=lambda stream: stream.stream)


def _began_ns(data: Array | bytes) -> int:
    began = _first_definition(data).get("wall_ns", 0)
    return began if isinstance(began, int) else 0


def _first_definition(data: Array | bytes) -> Mapping[str, Any]:
    return next(iter(records(first_record(data)).definitions()), {})


def _join(copies: _StreamCopies) -> StreamBytes:
    """Put the copies of one stream together: the longest replica, segments, what lies behind
    holes."""
    best: Path | None = None
    length = 0
    for path, valid in copies.replicas:
        if best is None or valid > length:
            best, length = path, valid
    data: Array = np.empty(0, np.uint8)
    prefix = NOTHING_SETTLED
    notes = list(copies.faults)
    if best is not None and length:
        try:
            data, prefix = read_replica(best, length)
        except SpoolError as error:
            notes.append(str(error))
        length = len(data) + prefix.hidden_bytes  # more where it has grown and was settled since
    notes += _late(prefix.late_records)
    pieces = [data]
    committed: int | None = None
    alive = False
    lowest_of_all = 0
    for folder in copies.segments:
        with StreamReader(folder) as reader:
            try:
                lowest = reader.lowest()
                lowest_of_all = max(lowest_of_all, lowest)
                # only where they meet: behind a hole the offsets are right and the records between
                # are not there
                for chunk in reader.chunks(length) if lowest <= length else ():
                    pieces.append(np.frombuffer(chunk, np.uint8))
                    length += len(chunk)
                # the spool knows how much there was: the difference is what the trace lacks
                committed = max(committed or 0, reader.committed(max(length, lowest)))
            except SpoolError as error:
                notes.append(str(error))
        alive = alive or is_alive(folder)
    if length:
        for begin, until, run in _behind_holes(copies, length):
            if begin > length:
                notes.append(_missing(length, begin))
                committed = max(committed or 0, until)
            pieces.append(run)
            length = until
    elif lowest_of_all:
        notes.append(_missing(0, lowest_of_all))  # whose the records are stood there
    marked = [marker for marker in map(read_end, copies.markers) if marker is not None]
    marker = max(marked, key=lambda marker: marker.committed, default=None)
    if marker is not None:
        committed = max(committed or 0, marker.committed)
    end = marker.end if marker else None
    if end is None and copies.segments:
        end = EndReason.RUNNING if alive else EndReason.LOST
    return StreamBytes(
        stream=copies.stream,
        data=pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
        is_verified=True,
        committed=committed,
        end=end,
        hidden_bytes=prefix.hidden_bytes,
        notes=tuple(notes),
    )


def _missing(begin: int, end: int) -> str:
    return f"bytes {begin}..{end} are missing: add the trace folder or spool that has them"


def _behind_holes(copies: _StreamCopies, length: int) -> Iterator[tuple[int, int, Array]]:
    """Yield (begin, end, bytes) of the whole records behind the first `length` bytes, in order."""
    runs: list[tuple[int, int, Array]] = []
    for path, _ in copies.replicas:
        runs += _runs_in(path, 0, length)
    for folder in copies.segments:
        with StreamReader(folder) as reader, contextlib.suppress(SpoolError):  # named already
            for index in segment_indexes(folder):
                begin = index * reader.segment_bytes
                if begin + reader.segment_bytes > length and reader.is_own(index):
                    runs += _runs_in(segment_path(folder, index), begin, length)
    # copies overlap: in order, and each byte taken once
    for begin, end, run in sorted(runs, key=lambda run: run[:2]):
        if end > length:
            yield max(begin, length), end, run[max(0, length - begin) :]
            length = end


def _runs_in(path: Path, begin: int, length: int) -> Iterator[tuple[int, int, Array]]:
    """Yield the runs of whole records of one file behind `length`; its first byte is `begin`."""
    skipped = max(0, length - begin)
    try:
        with path.open("rb") as file:
            lock_for_reading(file.fileno())
            if os.fstat(file.fileno()).st_size < skipped + CELL_BYTES:
                return
            data: Array = np.memmap(file, np.uint8, "r", skipped)
    except OSError:
        return  # its readable begin is all there is
    for first, last in valid_runs(as_cells(data)):
        bounds = first * CELL_BYTES, last * CELL_BYTES
        start = begin + skipped
        yield start + bounds[0], start + bounds[1], data[slice(*bounds)].view(np.ndarray)


def _late(count: int) -> Iterator[str]:
    if count == 1:
        yield "1 record came after its step was written: it is not in the tree"
    elif count:
        yield f"{count} records came after their step was written: they are not in the tree"


def finish_kept(out: Path, stream: RankStream) -> RankStream:
    """Finish the chunks of a stream whose rank has ended; return the stream with notes on them, and
    without the records of tensors that are not there."""
    folder = chunk_folder(out, stream.stream)
    if not len(stream.tensors) and not folder.is_dir():
        return stream
    try:
        _adopt(folder, stream)
        reports = finish_chunks(folder, stream.stream, stream.tensors, stream.definitions)
    except ChunkError as error:
        return dataclasses.replace(stream, notes=(*stream.notes, str(error)))
    noted = [(r, r.note.replace(f"{out}{os.sep}", "")) for r in reports if r.note]
    lost = {reference for r in reports for reference in r.lost}
    return dataclasses.replace(
        stream,
        tensors=_without(stream, lost) if lost else stream.tensors,
        notes=(*stream.notes, *(text for r, text in noted if r.lost)),
        kept_notes=(*stream.kept_notes, *(text for r, text in noted if not r.lost)),
    )


def with_places(stream: RankStream) -> RankStream:
    """Return a stream whose values say under which key the bytes of each lie, and in which chunk;
    bytes that never arrived are marked as not kept."""
    references, tensors = stream.values["reference"], stream.tensors
    columns: dict[str, Array] = {"chunk": np.zeros(len(references), np.uint32)}
    if references.any():
        keys = standing_references(references, tensors)
        is_lost = (references != 0) & (keys == 0)
        flags = stream.values["flags"]
        # a reference is a promise of bytes: one that was not kept is said, not dropped
        columns["flags"] = np.where(is_lost, flags | np.uint32(ValueFlag.NOT_KEPT), flags)
        columns["reference"] = keys
        order = np.argsort(tensors["reference"], kind="stable")
        at = order[np.searchsorted(tensors["reference"][order], keys[keys != 0])]
        columns["chunk"][keys != 0] = tensors["chunk"][at]
    return dataclasses.replace(stream, values=ValueColumns({**stream.values.columns, **columns}))


def _without(stream: RankStream, lost: Iterable[int]) -> Array:
    """Return the TENSOR records whose bytes are there; other names of lost bytes go with them."""
    rows = stream.tensors
    place = rows["chunk"].astype(np.uint64) << np.uint64(32) | rows["index"]
    gone = place[np.isin(rows["reference"], np.array([*lost], np.uint64))]
    return rows[~np.isin(place, gone)]


def _adopt(folder: Path, records: RankStream) -> None:
    """Write the new life of a replaced node's chunks into headers whose bytes its records name."""
    stream = records.stream
    for number in chunk_numbers(folder):
        path = chunk_path(folder, number)
        try:
            file, header = read_header(path)
        except ChunkError:
            continue  # said when it is finished
        if header is None or header.stream == stream or header.stream.rank != stream.rank:
            continue
        named = recorded_tensors(records.tensors, records.definitions, number)
        contents = {(tensor.reference, tensor.checksum) for tensor in header.tensors}
        # the records name its bytes, by their checksums: else it is the chunk of the node before
        if any((tensor.reference, tensor.checksum) not in contents for tensor in named):
            continue
        text = rebuilt_json(stream, header.number, header.tensors)
        if len(text) > file.start - LENGTH_BYTES:
            continue
        with (
            os_errors_as(ChunkError, f"{path}: cannot be written"),
            path.open("r+b", buffering=0) as written,
        ):
            write_all(written.fileno(), b"\0", LENGTH_BYTES)  # unfinished until all is written
            write_header(written.fileno(), text, file.start - LENGTH_BYTES)


def carry_chunks(
    folders: Iterable[Path], out: Path, lives: Mapping[tuple[int, int], StreamId]
) -> None:
    """Put the chunks of trace and run folders into a new trace folder, each chunk once, as a hard
    link where that can be. `lives`: {(rank, origin): stream} as the records are told apart there.
    OSError: one cannot be read or written."""
    best: dict[Path, Path] = {}
    moved: set[Path] = set()
    for folder in folders:
        origins = origins_in(folder)
        for stream in TensorFiles(folder).streams():
            place = chunk_folder(folder, stream)
            life = lives.get((stream.rank, origins.get(stream, UNKNOWN)), stream)
            for number in chunk_numbers(place):
                path = chunk_path(place, number)
                target = chunk_path(chunk_folder(out, life), number)
                best_path = best.get(target)
                if best_path is None or _worth(path) > _worth(best_path):
                    best[target] = path
                    moved.discard(target)
                    moved.update([target] if life != stream else [])
    for target, path in best.items():
        for folder in (target.parents[1], target.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            (shutil.copy if target in moved else os.link)(path, target)  # headers change
        except OSError:  # another disk, or one without hard links
            shutil.copy(path, target)


def _worth(path: Path) -> tuple[bool, int]:
    """Order copies of one chunk: a finished one before one that is not, then the longer."""
    try:
        is_finished = read_header(path)[1] is not None
    except ChunkError:
        is_finished = False
    return is_finished, path.stat().st_size
