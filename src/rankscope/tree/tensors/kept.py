"""Which ranks' bytes of a value are in the trace, and in plain words why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rankscope.errors import TraceError
from rankscope.globs import place_matches
from rankscope.layout.plan import Piece, ranks_words
from rankscope.record.ranks import ranks_text
from rankscope.record.value import STORED_TYPES

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
            shape=shape,
            layout=view.layout(rank),
            global_shape=view.global_shape,
            ranges=view.ranges(rank),
        )
        for rank, shape in view.shapes().items()
    }


def references(value: Value) -> dict[int, tuple[int, int]]:
    """Return {rank: (incarnation, reference)} of the ranks whose bytes are in the trace."""
    return {rank: where for view in value.views for rank, where in view.references().items()}


def stored(value: Value, rank: int, where: tuple[int, int]) -> StoredTensor:
    """Return the bytes that a rank kept. Raises TraceError where they are lost, or those of
    something else."""
    found = value.node.trace.tensor_files.find(rank, *where)
    shape = held_shapes(value)[rank]
    dtype = next(view.dtype for view in value.views if rank in view.ranks)
    if (found.dtype, found.shape) != (dtype, shape):
        raise TraceError(
            f"{found.path}: tensor {where[1]} is {found.dtype}{list(found.shape)}, the tree says "
            f"{dtype}{list(shape)} for {value_name(value)} of rank {rank}: the trace is damaged"
        )
    return found


def why_not_kept(value: Value, ranks: Iterable[int]) -> str:
    """Return why the bytes of a value are not there for these ranks, and what to do about it."""
    name, trace = value_name(value), value.node.trace
    wanted = sorted(set(ranks))
    recorded = [rank for rank in wanted if rank in value.ranks]
    if not recorded:
        return (
            f"{name} was not recorded on {ranks_words(wanted)}; ranks {ranks_text(value.ranks)} "
            f"have it"
        )
    if not held_shapes(value).keys() & set(recorded):
        view = next(view for view in value.views if recorded[0] in view.ranks)
        fold = next(fold for fold in view.pieces if recorded[0] in fold.ranks)
        return f"{name} is no tensor on {ranks_words(recorded)}: {fold.note or 'there was none'}"
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
    """Return what the trace knows of the reason: the value's dtype and flags, or its ranks'
    notes."""
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
