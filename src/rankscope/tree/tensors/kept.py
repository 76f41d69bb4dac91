"""The full tensors that a trace has: whose bytes, why others were not kept, and a list of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankscope.errors import ChunkError, TraceError
from rankscope.globs import place_matches
from rankscope.layout.plan import Piece, ranks_words
from rankscope.record.ranks import StreamId, ranks_text
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

if TYPE_CHECKING:
    from rankscope.spool.chunks.tensorfiles import StoredTensor
    from rankscope.tree.slotview import SlotView
    from rankscope.tree.views import Value


def value_name(value: Value) -> str:
    """Return how a value is asked for: `layers.0:output`."""
    return f"{value.node.path or '(root)'}:{value.views[0].slot}"


def held_shapes(value: Value) -> dict[int, tuple[int, ...]]:
    """Return the local shape of every rank that had a tensor here."""
    return {
        rank: fold.shape
        for view in value.views
        if view.dtype != "python"
        for fold in view.pieces
        if "absent" not in fold.flags
        for rank in fold.ranks
    }


def held_pieces(view: SlotView) -> dict[int, Piece]:
    """Return what each rank holds of a whole, as its layout in the trace says."""
    return {
        rank: Piece(
            shape=piece.shape,
            layout=view.layout(rank),
            global_shape=view.global_shape,
            ranges=view.ranges(rank, piece),
        )
        for piece in view.pieces
        for rank in piece.ranks
    }


def references(value: Value) -> dict[int, tuple[int, int]]:
    """Return {rank: (incarnation, reference)} of the ranks whose bytes are in the trace."""
    return {rank: where for view in value.views for rank, where in view.references().items()}


def stored_tensor(value: Value, rank: int, where: tuple[int, int]) -> StoredTensor:
    """Return the bytes that a rank kept. TraceError: they are lost, or of something else."""
    tensor = value.node.trace.tensor_files.find(rank, *where)
    shape = held_shapes(value)[rank]
    dtype = next(view.dtype for view in value.views if rank in view.ranks)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise TraceError(
            f"{tensor.path}: tensor {where[1]} is {tensor.dtype}{list(tensor.shape)}, the tree "
            f"says {dtype}{list(shape)} for {value_name(value)} of rank {rank}: the trace is "
            "damaged"
        )
    return tensor


def why_not_kept(value: Value, ranks: Iterable[int]) -> str:
    """Return why the bytes of a value are not there for these ranks, and what to do about it."""
    name, trace = value_name(value), value.node.trace
    asked_ranks = sorted(set(ranks))
    recorded = [rank for rank in asked_ranks if rank in value.ranks]
    if not recorded:
        return (
            f"{name} was not recorded on {ranks_words(asked_ranks)}; ranks "
            f"{ranks_text(value.ranks)} have it"
        )
    if not held_shapes(value).keys() & set(recorded):
        view = next(view for view in value.views if recorded[0] in view.ranks)
        fold = next(fold for fold in view.pieces if recorded[0] in fold.ranks)
        return f"{name} is not a tensor on {ranks_words(recorded)}: {fold.note or 'there was none'}"
    asked = str(trace.run["settings"].get("tensors", ""))
    advice = f"trace again with --rs-tensors '{value.node.path}:{value.views[0].slot}'"
    if not asked:
        return f"{name} was not kept: no full tensors were asked for; {advice}"
    path, slot = value.node.path, value.views[0].slot
    if not any(place_matches(glob, path, slot) for glob in asked.split(",")):
        return f"{name} was not kept: --rs-tensors {asked!r} does not take it; {advice}"
    missed = sorted({rank for view in value.views for rank in view.not_kept} & set(recorded))
    reasons = _reasons(value, missed or recorded)
    return f"{name} was asked for and not kept on {ranks_words(missed or recorded)}: {reasons}"


def _reasons(value: Value, ranks: list[int]) -> str:
    """Return the reason as the trace has it: the value's dtype and flags, or its ranks' notes."""
    view = next(view for view in value.views if ranks[0] in view.ranks)
    fold = next(fold for fold in view.pieces if ranks[0] in fold.ranks)
    if fold.note:
        return fold.note
    if view.dtype not in STORED_TYPES:
        return f"safetensors knows no {view.dtype}"
    unread = [flag for flag in fold.flags if flag in ("pending", "unseen", "structure_only")]
    if unread:
        return f"it could not be read ({', '.join(unread)})"
    noted = [
        text
        for rank in value.node.trace.completeness["ranks"]
        if rank["rank"] == ranks[0]
        for text in rank.get("tensors", ())
    ]
    return "; ".join(noted[:3]) or "rankscope verify says what happened to that rank"


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
    counted: set[tuple[int, tuple[int, int]]] = set()
    if nodes is None:
        all_nodes = (node for step in (*trace.setup, *trace.steps) for node in step.passing())
        nodes = ((node, view) for node in all_nodes for view in node.slots)
    for node, view in nodes:
        places = view.references()
        if not places and not view.not_kept:
            continue
        key = (node.path, view.slot, node.phase.word)
        entry = listing.entries.setdefault(key, Kept(*key))
        entry.not_kept.update(view.not_kept)
        entry.dtypes[view.dtype] = None
        item = STORED_TYPES[view.dtype].item_bytes if view.dtype in STORED_TYPES else 0
        shapes = view.shapes()
        for rank, where in places.items():
            size = prod(shapes[rank]) * item
            entry.shapes[view.global_shape or shapes[rank]] = None
            entry.ranks.add(rank)
            entry.values += 1
            entry.nbytes += size
            if (rank, where) not in counted:
                counted.add((rank, where))
                listing.stored += size
    return listing
