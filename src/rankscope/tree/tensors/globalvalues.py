"""A value's full tensors: what one rank held, or the global tensor put together from all of them.

    whole = whole_value(trace.value("layers.0", "output"))
    whole.tensor, whole.mismatches, whole.notes

How the pieces belong together is taken from DTensors, else from a layout file (the one given now,
else the one that was given when the trace was taken), else inferred (`tree/tensors/proofs.py`,
`tree/tensors/proofs.py`); which of these it was stands in the notes. What none of them says is an
error, never a guess. Torch is loaded when a tensor is made, not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rankscope.errors import LayoutError, SelectionError, TensorWarning, TraceError
from rankscope.layout.infer import WHOLE
from rankscope.layout.layoutfile import LayoutFile, declared_pieces, layout_of_run
from rankscope.layout.placement import Layout, LayoutSource, Mesh, Placement
from rankscope.layout.plan import (
    AssemblyPlan,
    Piece,
    join_batches,
    join_replicas,
    plan_assemblies,
    plan_assembly,
    ranks_words,
)
from rankscope.tree.tensors.kept import (
    held_pieces,
    held_shapes,
    references,
    stored_tensor,
    value_name,
    why_not_kept,
)
from rankscope.tree.tensors.proofs import Peers, find_peers, how_it_lies, prints_of

if TYPE_CHECKING:
    import torch

    from rankscope.tree.tensors.rebuild import Whole
    from rankscope.tree.views import Trace, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """Which ranks' bytes make up a value; notes on what was inferred and is not compared."""

    plan: AssemblyPlan
    dtype: str
    notes: tuple[str, ...]


def local_tensor(value: Value, rank: int, *, is_checked: bool = False) -> torch.Tensor:
    """Return what one rank held, mapped; where `is_checked`, all of it is read and held to its
    checksum. SelectionError: the rank has no value here, or it was not kept; says why; TraceError:
    its bytes cannot be found, or are not those that were written."""
    places = references(value)
    if rank not in places:
        raise SelectionError(why_not_kept(value, [rank]))
    from rankscope.tree.tensors.rebuild import tensor_of

    tensor = stored_tensor(value, rank, places[rank])
    if is_checked and not tensor.is_intact:
        raise TraceError(
            f"{tensor.path}: the bytes of {value_name(value)} on rank {rank} are not those that "
            f"were written: the file is damaged"
        )
    return tensor_of(tensor)


def full_tensor(value: Value, layouts: LayoutFile | None = None) -> torch.Tensor:
    """Return `whole_value(value, layouts).tensor`, and warn of what stands beside it."""
    result = whole_value(value, layouts)
    for text in result.remarks:
        warnings.warn(f"{value_name(value)}: {text}", TensorWarning, stacklevel=3)
    return result.tensor


def whole_value(value: Value, layouts: LayoutFile | None = None) -> Whole:
    """Return the global tensor of a value. SelectionError: bytes that are needed were not kept;
    says why; LayoutError: nothing says how the pieces belong together, or they contradict it;
    TraceError: bytes cannot be found, or are not those that were written."""
    planned = plan_whole(value, layouts)
    return replace(assembled(value, planned.plan), notes=planned.notes)


def assembled(value: Value, plan: AssemblyPlan) -> Whole:
    """Return what a plan makes of a value's bytes, each piece checked against its checksum."""
    from rankscope.tree.tensors.rebuild import assemble

    return assemble(plan, lambda rank: local_tensor(value, rank, is_checked=True))


def plan_whole(value: Value, layouts: LayoutFile | None = None) -> WholePlan:
    """Return whose bytes make up the global tensor, without reading one. SelectionError,
    LayoutError, TraceError: as of `whole_value`."""
    shapes = held_shapes(value)
    places = references(value)
    if not places:
        raise SelectionError(why_not_kept(value, value.ranks))
    dtypes = {view.dtype: view.ranks for view in value.views if shapes.keys() & {*view.ranks}}
    if len(dtypes) > 1:
        listed = "; ".join(f"{ranks_words(ranks)} {dtype}" for dtype, ranks in dtypes.items())
        raise LayoutError(f"{value_name(value)} has not one dtype: {listed}; take one with --rank")
    plan, notes = _Planning(value, shapes, layouts).whole()
    plan, missing = _from_kept(value, plan, places)
    for rank in {*plan.reads}:
        stored_tensor(value, rank, places[rank])
    if missing:
        notes.append(f"not kept on {ranks_words(missing)}, so not compared there")
    if plan.missing:
        notes.append(f"nothing was recorded on {ranks_words(plan.missing)}, so not compared there")
    return WholePlan(plan=plan, dtype=next(iter(dtypes)), notes=tuple(notes))


class _Planning:
    """Finds how the pieces of one value belong together."""

    def __init__(
        self, value: Value, shapes: Mapping[int, tuple[int, ...]], layouts: LayoutFile | None
    ) -> None:
        self._value, self._shapes = value, shapes
        self._trace: Trace = value.node.trace
        self._given = _GivenLayouts(self._trace.run, layouts)
        self._is_placed = False
        """True where a DTensor or a layout file says how the pieces lie."""
        self._notes: list[str] = []

    def whole(self) -> tuple[AssemblyPlan, list[str]]:
        pieces = self._pieces()
        is_unknown = len(pieces) > 1 and not any(piece.layout.mesh for piece in pieces.values())
        why_not = ""
        try:
            plans = () if is_unknown else plan_assemblies(pieces)
            if len(plans) == 1:
                if not self._is_placed and len(self._shapes) == 1:
                    self._say_if_ranks_lack("taken as whole")
                return plans[0], self._notes
            peers = find_peers(self._value.node, self._shapes, declared=self._given.mesh)
            if peers.why_not:
                why_not = f"; data axes cannot be inferred: {peers.why_not}"
            return self._of_peers(None if is_unknown else plans, peers), self._notes
        except LayoutError as error:
            raise self._error(f"{error}{why_not}") from None

    def _pieces(self) -> dict[int, Piece]:
        described = {
            rank: piece
            for view in self._value.views
            for rank, piece in held_pieces(view).items()
            if rank in self._shapes
        }
        self._is_placed = any(p.layout.source is LayoutSource.DTENSOR for p in described.values())
        if self._is_placed:
            return described
        placements, notes = self._given.of(self._value)
        self._notes.extend(notes)
        if self._given.mesh is not None and placements:
            self._is_placed = True
            return declared_pieces(self._given.mesh, placements, self._shapes)
        unknown = Layout(source=LayoutSource.UNKNOWN)
        return {rank: Piece(shape=shape, layout=unknown) for rank, shape in self._shapes.items()}

    def _of_peers(self, described: Sequence[AssemblyPlan] | None, peers: Peers) -> AssemblyPlan:
        """Return the plan of what peers hold, each by its own plan; `described` is None where
        nothing says how the values of ranks belong together."""
        is_parameter = self._value.views[0].slot.startswith(("param:", "grad:"))
        axes = peers.replicas if is_parameter else peers.data
        proven = how_it_lies(self._value, peers.mesh)
        placements = {axis: proof.placement for axis, proof in proven.items() if axis not in axes}
        if described is None:
            cuts = (
                (axis, proven[axis]) for axis, placement in placements.items() if placement != WHOLE
            )
            self._notes += [f"inferred: {axis}={cut.placement}, {cut.reason}" for axis, cut in cuts]
        try:
            candidates = self._by_proof(peers.mesh, placements) if described is None else described
            plans = self._by_place(candidates, peers, axes, placements)
        except LayoutError:
            if described is not None:
                raise
            ranks = ranks_words(self._shapes)
            text = f"nothing says how the values of {ranks} belong together"
            raise LayoutError(text) from None
        if WHOLE in placements.values() and (described is None or len(plans) < len(candidates)):
            where = "" if len(plans) == 1 else f" of each place along {', '.join(axes)}"
            self._notes.append(f"inferred: whole, as every rank{where} holds the same")
        if len(plans) == 1:
            return plans[0]
        if is_parameter:
            self._notes.append(f"inferred: replicas along {', '.join(axes)}, equal at setup")
            return join_replicas(plans)
        if self._is_common(peers):
            self._notes.append(
                "inferred: not batched, every rank holds the same and it has not the size of their "
                "batches"
            )
            return join_replicas(plans)
        dim = self._trace.batch_dim
        joined = join_batches(peers.mesh, axes, plans, dim)
        self._say_if_ranks_lack("all batches there are")
        self._notes.append(
            f"inferred: batches joined along dim {dim} in rank order, as {peers.reason}"
        )
        return joined

    def _by_proof(self, mesh: Mesh, placements: Mapping[str, Placement]) -> Sequence[AssemblyPlan]:
        """Return a plan for each place along the axes without a proof."""
        if placements:
            source = LayoutSource.INFERRED
            return plan_assemblies(declared_pieces(mesh, placements, self._shapes, source))
        unknown = Layout(source=LayoutSource.UNKNOWN)
        return [plan_assembly((), unknown, {r: shape}) for r, shape in self._shapes.items()]

    def _by_place(
        self,
        candidates: Sequence[AssemblyPlan],
        peers: Peers,
        axes: Sequence[str],
        proven: Mapping[str, Placement],
    ) -> list[AssemblyPlan]:
        """Return one plan for each place along the axes: what all plans there hold alike."""
        places: dict[tuple[int, ...], list[AssemblyPlan]] = {}
        for plan in candidates:
            at = dict(zip(peers.mesh.axes, peers.mesh.coordinate(plan.ranks[0]) or ()))
            places.setdefault(tuple(at[axis] for axis in axes if at), []).append(plan)
        joined = []
        for plans in places.values():
            at_axes = zip(*(peers.mesh.coordinate(plan.ranks[0]) or () for plan in plans))
            split_axes = {axis for axis, at in zip(peers.mesh.axes, at_axes) if len({*at}) > 1}
            is_whole = split_axes and all(proven.get(axis) == WHOLE for axis in split_axes)
            if len(plans) > 1 and not is_whole:
                names = " and ".join(ranks_words(plan.ranks) for plan in plans)
                raise LayoutError(
                    f"{names} hold values of their own, and nothing says how they belong together"
                )
            joined.append(plans[0] if len(plans) == 1 else join_replicas(plans))
        return joined

    def _is_common(self, peers: Peers) -> bool:
        """True for what does not depend on the batch, such as a table of positions."""
        prints = prints_of(self._value.views)
        if len({*prints.values()}) != 1 or not prints.keys() >= self._shapes.keys():
            return False
        dim = self._trace.batch_dim
        return not all(
            len(shape) > dim and peers.samples.get(rank) and shape[dim] % peers.samples[rank] == 0
            for rank, shape in self._shapes.items()
        )

    def _say_if_ranks_lack(self, claim: str) -> None:
        traced = {int(rank["rank"]) for rank in self._trace.run["ranks"]}
        world = int(self._trace.run["world_size"])
        if len(traced) < world:
            self._notes.append(
                f"{claim}, but only {ranks_words(traced)} of {world} are in the trace"
            )

    def _error(self, text: str) -> LayoutError:
        rank = min(self._shapes)
        more = f". {self._given.unused}" if self._given.unused else ""
        return LayoutError(
            f"{value_name(self._value)}: {text}. Take one rank's with --rank {rank}, or declare "
            f"how it lies with --layout FILE{more}"
        )


class _GivenLayouts:
    """Placements by the layout file that is given now, else by the trace's own."""

    def __init__(self, run: Mapping[str, Any], layouts: LayoutFile | None) -> None:
        self.mesh: Mesh | None = None
        self.unused = ""
        self._layouts = layouts
        self._who = ""
        recorded = layout_of_run(run)
        if layouts is None or (isinstance(recorded, tuple) and recorded[0].text == layouts.text):
            if isinstance(recorded, tuple):
                self._layouts, self.mesh = recorded
                self._who = f"{self._layouts.name}, given at trace time,"
            self.unused = recorded if isinstance(recorded, str) else ""
            return
        world = int(run["world_size"])
        self.mesh = layouts.mesh(world) if world > 1 else None
        self._who = f"{layouts.name}, given afterwards,"
        if "layout" in run:
            before = f"{run['layout']['file']}, which was given at trace time"
            self._who = f"{layouts.name}, given afterwards in place of {before},"

    def of(self, value: Value) -> tuple[dict[str, Placement], Sequence[str]]:
        """Return {axis: placement} by the file, {} where it has nothing, and notes on it."""
        if self._layouts is None or self.mesh is None:
            return {}, [self.unused] if self.unused else []
        placements = self._layouts.placements(value.node.path, value.views[0].slot)
        if placements:
            listed = ", ".join(f"{axis}={place}" for axis, place in placements.items())
            return placements, [f"placed as {self._who} declares it: {listed}"]
        if any(view.source is LayoutSource.DECLARED for view in value.views):
            return {}, [f"{self._who} says nothing of it"]
        return {}, []


def _from_kept(
    value: Value, plan: AssemblyPlan, ranks_kept: Iterable[int]
) -> tuple[AssemblyPlan, list[int]]:
    """Return the plan that reads kept bytes alone, and the ranks of replicas that it leaves out;
    raises SelectionError for a part that was not kept anywhere."""
    readable = frozenset(ranks_kept)
    boxes = []
    for box in plan.boxes:
        summands = [tuple(rank for rank in ranks if rank in readable) for ranks in box.summands]
        if () in summands:
            raise SelectionError(why_not_kept(value, box.summands[summands.index(())]))
        boxes.append(replace(box, summands=tuple(summands)))
    ranks = tuple(rank for rank in plan.ranks if rank in readable)
    return replace(plan, boxes=tuple(boxes), ranks=ranks), sorted({*plan.reads} - readable)
