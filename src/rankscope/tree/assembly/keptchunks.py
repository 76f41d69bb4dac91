"""The chunks of full tensors when a tree is built: finished, carried along, what was lost noted.

A node that was replaced wrote as the same rank in the same life as the one before it. Its chunks go
where its records went, to a life of its own, and are told so.

Each stream notes its losses: in `kept_notes` what its rank did not keep (a full disk, a chunk that
a kill left unfinished), in `notes` recorded bytes that are not there.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from rankscope.errors import ChunkError
from rankscope.record.ranks import StreamId
from rankscope.record.value import ValueFlag
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
from rankscope.spool.recordformat import UNKNOWN
from rankscope.tree.assembly.rankstreams import Array, RankStream, ValueColumns
from rankscope.tree.assembly.sources import origins_in


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
        if any((tensor.reference, tensor.checksum) not in contents for tensor in named):
            continue
        text = rebuilt_json(stream, header.number, header.tensors)
        if len(text) > file.start - LENGTH_BYTES:
            continue
        try:
            with path.open("r+b", buffering=0) as written:
                write_all(written.fileno(), b"\0", LENGTH_BYTES)  # unfinished until all is written
                write_header(written.fileno(), text, file.start - LENGTH_BYTES)
        except OSError as error:
            raise ChunkError(f"{path}: cannot be written: {error.strerror}") from error


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
