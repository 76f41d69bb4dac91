"""The full tensors of a trace as a list: what is there, of which ranks, and how large it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from rankscope.errors import ChunkError
from rankscope.record.ranks import StreamId
from rankscope.record.value import STORED_TYPES
from rankscope.spool.chunks.chunkfiles import (
    chunk_folder,
    chunk_numbers,
    chunk_path,
    damaged_references,
)
from rankscope.spool.chunks.tensorfiles import TensorFiles
from rankscope.tree.slotview import SlotView
from rankscope.tree.views import Node, Trace


def tensor_faults(trace: Path) -> Iterator[str]:
    """Read every chunk of a trace folder; yield a line for each that is not as it was written."""
    for stream in TensorFiles(trace).streams():
        for number in chunk_numbers(chunk_folder(trace, stream)):
            name = chunk_path(chunk_folder(Path(), stream), number)
            try:
                lost = len(damaged_references(trace / name, (stream, number)))
            except ChunkError as error:
                yield str(error)
                continue
            if lost:
                are = "tensor is" if lost == 1 else "tensors are"
                yield f"{name}: {lost} {are} not what the rank wrote: the file was damaged"


def missing_chunks(trace: Trace) -> Iterator[str]:
    """Yield a line for each chunk that values of a finished trace lie in and that is not there."""
    named: set[tuple[int, int, int]] = set()
    for step in (*trace.setup, *trace.steps):
        columns = step.columns()
        rows = np.stack([columns["values.rank"], columns["values.chunk"]], axis=1)
        for rank, number in np.unique(rows[rows[:, 1] > 0], axis=0).tolist():
            named.add((rank, step.incarnation, number))
    for rank, incarnation, number in sorted(named):
        stream = StreamId(rank=rank, incarnation=incarnation)
        name = chunk_path(chunk_folder(trace.path, stream), number)
        if not name.is_file():
            yield f"{name.relative_to(trace.path)}: is not there, and tensors were kept in it"


@dataclass(slots=True)
class Kept:
    """One slot of one path in one phase, over steps, calls and ranks."""

    path: str
    slot: str
    phase: str
    dtypes: dict[str, None] = field(default_factory=dict)
    shapes: dict[tuple[int, ...], None] = field(default_factory=dict)
    """Of the whole tensor where its layout is known, else of what ranks hold."""
    ranks: set[int] = field(default_factory=set)
    not_kept: set[int] = field(default_factory=set)
    values: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Listing:
    """All full tensors of a trace."""

    entries: dict[tuple[str, str, str], Kept] = field(default_factory=dict)
    stored: int = 0
    """Bytes in the trace folder: equal tensors of one rank are stored once."""

    @property
    def values(self) -> int:
        """How many tensors there are to ask for."""
        return sum(entry.values for entry in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, as if each were stored for itself."""
        return sum(entry.nbytes for entry in self.entries.values())


def list_tensors(trace: Trace, nodes: Iterable[tuple[Node, SlotView]] | None = None) -> Listing:
    """Return what was kept, in some entries or in all of the trace."""
    listing = Listing()
    seen: set[tuple[int, tuple[int, int]]] = set()
    if nodes is None:
        every = (node for step in (*trace.setup, *trace.steps) for node in step.passing())
        nodes = ((node, view) for node in every for view in node.slots)
    for node, view in nodes:
        known = view.references()
        if not known and not view.not_kept:
            continue
        key = (node.path, view.slot, node.phase.word)
        entry = listing.entries.setdefault(key, Kept(*key))
        entry.not_kept.update(view.not_kept)
        entry.dtypes[view.dtype] = None
        item = STORED_TYPES[view.dtype].item_bytes if view.dtype in STORED_TYPES else 0
        shapes = view.shapes()
        for rank, where in known.items():
            size = prod(shapes[rank]) * item
            entry.shapes[view.global_shape or shapes[rank]] = None
            entry.ranks.add(rank)
            entry.values += 1
            entry.nbytes += size
            if (rank, where) not in seen:
                seen.add((rank, where))
                listing.stored += size
    return listing
