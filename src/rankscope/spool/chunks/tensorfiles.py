"""The full tensors of a trace folder: found by reference, mapped, not copied.

    files = TensorFiles(folder)                      finished chunks are enough
    files = TensorFiles(folder, {stream: (tensors, definitions)})     unfinished ones too
    files.find(rank, incarnation, reference)         dtype, shape, mapped bytes

A chunk is opened when something in it is asked for. One that its rank left unfinished is read by
the records, where there are any, and listed by `problems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from rankscope.errors import ChunkError, TraceError
from rankscope.record.ranks import StreamId
from rankscope.run.folders import TENSOR_FOLDER
from rankscope.spool.chunks.chunkfiles import (
    HeldTensor,
    chunk_folder,
    chunk_numbers,
    chunk_path,
    read_header,
    recorded_tensors,
    stream_of_folder,
)
from rankscope.spool.chunks.safetensors import MappedFile, as_array

TensorRecords = tuple[NDArray[Any], Mapping[int, Mapping[str, Any]]]
"""A stream's TENSOR records (TENSOR_DTYPE) and its definitions by number."""
_xxh3: Final[Any] = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as a rank held it: torch's name of its dtype, its bytes in row-major order, mapped
    from `offset` of the chunk at `path`, and xxh3_64 of them when they were written."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    checksum: int
    path: Path
    offset: int

    @property
    def is_intact(self) -> bool:
        """True if the bytes have their recorded checksum. Reads all of them."""
        return int(_xxh3(self.data)) == self.checksum

    def array(self) -> NDArray[Any]:
        """Return the tensor as a read-only array over the mapped bytes; raises as `as_array`."""
        return as_array(self.data, self.dtype, self.shape)


def _stored(path: Path, file: MappedFile, tensors: Iterable[HeldTensor]) -> _Chunk:
    return {
        tensor.reference: StoredTensor(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data=file.data[tensor.begin : tensor.end],
            checksum=tensor.checksum,
            path=path,
            offset=file.start + tensor.begin,
        )
        for tensor in tensors
        if tensor.reference
    }


_Chunk = dict[int, StoredTensor]


class TensorFiles:
    """The chunks of a trace folder, opened as they are asked for."""

    def __init__(
        self, folder: Path, records: Mapping[StreamId, TensorRecords] | None = None
    ) -> None:
        """Look at a trace folder; `records` of its spools are for unfinished chunks."""
        self._folder = folder
        self._records = records or {}
        self._unopened: dict[StreamId, list[int]] = {}
        self._open_chunks: dict[StreamId, list[_Chunk]] = {}
        self._problems: dict[Path, str] = {}

    def streams(self) -> list[StreamId]:
        """Streams that have a folder of chunks, sorted."""
        top = self._folder / TENSOR_FOLDER
        names = map(stream_of_folder, top.iterdir()) if top.is_dir() else ()
        return sorted(stream for stream in names if stream is not None)

    def find(self, rank: int, incarnation: int, reference: int) -> StoredTensor:
        """Return one tensor. Raises TraceError with the fault of that rank's chunks."""
        stream = StreamId(rank=rank, incarnation=incarnation)
        for chunk in self._chunks(stream):
            if reference in chunk:
                return chunk[reference]
        folder = chunk_folder(self._folder, stream)
        wrong = [text for path, text in self._problems.items() if path.parent == folder]
        reason = "; ".join(wrong) or (
            f"none of the {len(self._open_chunks[stream])} chunks in {folder} has it"
            if folder.is_dir()
            else f"there is no {folder}: copy it from where the trace was made"
        )
        raise TraceError(f"tensor {reference} of rank {rank} is not there: {reason}")

    def tensors(self, stream: StreamId) -> Iterator[tuple[int, StoredTensor]]:
        """Yield (reference, tensor) of everything stored for a stream."""
        for chunk in self._chunks(stream):
            yield from chunk.items()

    def problems(self) -> list[str]:
        """Return a line for each chunk that is unfinished or damaged. Opens all of them."""
        for stream in self.streams():
            for _ in self._chunks(stream):
                pass
        return list(self._problems.values())

    def _chunks(self, stream: StreamId) -> Iterator[_Chunk]:
        folder = chunk_folder(self._folder, stream)
        opened = self._open_chunks.setdefault(stream, [])
        yield from [*opened]
        if stream not in self._unopened:
            try:
                self._unopened[stream] = chunk_numbers(folder)
            except ChunkError as error:
                self._problems[folder / ""] = str(error)
                self._unopened[stream] = []
        numbers = self._unopened[stream]
        while numbers:
            path = chunk_path(folder, numbers[0])
            try:
                chunk = self._open(path, stream, numbers[0])
            except ChunkError as error:
                self._problems[path], chunk = str(error), {}
            del numbers[0]
            opened.append(chunk)
            yield chunk

    def _open(self, path: Path, stream: StreamId, number: int) -> _Chunk:
        file, header = read_header(path, (stream, number))
        if header is not None:
            return _stored(path, file, header.tensors)
        tensors, definitions = self._records.get(stream, (None, {}))
        recorded = [] if tensors is None else recorded_tensors(tensors, definitions, number)
        readable = [tensor for tensor in recorded if tensor.end <= len(file.data)]
        note = (
            f"{path}: is unfinished, its rank was killed or still writes it; {len(readable)} "
            f"tensors are readable"
        )
        behind = len(file.data) - max((tensor.end for tensor in readable), default=0)
        if behind:
            note += f", {behind} bytes behind them never became a whole tensor"
        if len(readable) < len(recorded):
            note += f", {len(recorded) - len(readable)} that were recorded are not in the file"
        if tensors is None:
            note += " without the rank's records; rankscope recover finishes it from its spool"
        self._problems[path] = note
        return _stored(path, file, readable)


def standing_references(
    references: NDArray[np.uint64], tensors: NDArray[Any]
) -> NDArray[np.uint64]:
    """Return under which key the bytes of each value of one stream lie, 0 where they never arrived.

    `references` are those of VALUE records, 0 for none; of several TENSOR records (in the order of
    their commits) that name one place the first is the key.
    """
    standing = np.zeros(len(references), np.uint64)
    if not len(tensors):
        return standing
    place = tensors["chunk"].astype(np.uint64) << np.uint64(32) | tensors["index"]
    # equal bytes are stored once: later records of a place are other references to the first
    _, first, inverse = np.unique(place, return_index=True, return_inverse=True)
    key = tensors["reference"][first][inverse.reshape(-1)]
    order = np.argsort(tensors["reference"], kind="stable")
    references_in_order = tensors["reference"][order]
    at = np.minimum(np.searchsorted(references_in_order, references), len(references_in_order) - 1)
    is_recorded = (references_in_order[at] == references) & (references != 0)
    standing[is_recorded] = key[order][at[is_recorded]]
    return standing
