"""A tensor of a trace as the debugger of transformers writes it: what one rank held, labelled with
its place in the whole, or the whole. Needs torch, for text and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rankscope.capture.describe import dtype_name
from rankscope.compat.debugger.kept import KeptTensor, tensor_of
from rankscope.compat.debugger.text import (
    Arena,
    Glimpse,
    glimpse_of,
    is_measured,
    meta_text,
    statistics_of,
    tensor_text,
)
from rankscope.errors import LayoutError, SelectionError, TraceError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.layout.placement import LayoutSource
from rankscope.spool.chunks.tensorfiles import StoredTensor
from rankscope.tree.slotview import SlotView
from rankscope.tree.tensors.globalvalues import whole_value
from rankscope.tree.tensors.kept import why_not_kept
from rankscope.tree.tensors.proofs import digests, how_it_lies
from rankscope.tree.tensors.rebuild import bytes_of
from rankscope.tree.views import Node, Trace, Value

_OF_PARAMETER: Final = "Parameter containing:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A tensor, ready to be written: the lines that `print` shows or its bytes in row-major order,
    what values of the same bytes share, and facts: statistics, where it lies, why it is not
    there."""

    shape: tuple[int, ...]
    dtype: str
    lines: tuple[str, ...] | None
    data: NDArray[np.uint8] | None
    origin: object = None
    facts: Mapping[str, Any]


_Find = Callable[[int, int, int], StoredTensor | KeptTensor | None]
"""Returns the tensor of a rank, its incarnation and a reference; None where it was not kept."""


class LocalValues:
    """What one rank held."""

    def __init__(
        self, trace: Trace, rank: int, *, as_text: bool, find: _Find | None = None
    ) -> None:
        """Read nothing yet. `find` gives tensors, by default from the files of the trace."""
        self._find = find or trace.tensor_files.find
        self._arena = Arena() if as_text else None
        self._rank = rank
        self._as_text = as_text
        self._measured: dict[object, tuple[Mapping[str, Any], tuple[str, ...] | None]] = {}
        self.has_layouts = bool(trace.run["meshes"])
        """Tensors of this job are known to lie on meshes: others are marked as unknown."""
        self._on_mesh = self._parameter_on_mesh(trace) if self.has_layouts else None
        self.notes: list[str] = []

    def shown_tensor(
        self, node: Node, views: Sequence[SlotView], form: Mapping[str, Any]
    ) -> Shown | None:
        """Return a tensor, by the entries of its slot and its form; None where nothing was
        recorded."""
        view = next((slot_view for slot_view in views if self._rank in slot_view.ranks), None)
        if view is None:
            return None
        shape = view.shapes().get(self._rank, ())
        labels = self._labels(Value(tuple(views), node), view, shape)
        dtype = view.dtype
        if view.device == "meta":
            lines = tuple(meta_text(shape, dtype).split("\n")) if self._as_text else None
            facts = _meta_facts(dtype) | labels
            return Shown(
                shape=shape, dtype=dtype, lines=_headed(lines, form), data=None, facts=facts
            )
        stored = self._stored(view)
        if stored is None:
            why = why_not_kept(Value((view,), node), [self._rank])
            facts = {"note": why, **labels}
            return Shown(shape=shape, dtype=dtype, lines=None, data=None, facts=facts)
        measured, lines = self._facts(stored, form)
        facts = {**measured, **labels}
        data = None if self._as_text else stored.data  # there is a file for each: it has bytes
        return Shown(
            shape=shape, dtype=dtype, lines=_headed(lines, form), data=data,
            origin=_origin(stored), facts=facts,
        )  # fmt: skip

    def is_changed(self, views: Mapping[str, Sequence[SlotView]]) -> bool:
        """True where hooks of the module made other bytes of what its `forward` returned."""
        origins: dict[str, dict[str, object]] = {"returned": {}, "output": {}}
        for slot, entries in views.items():
            kind, _, tail = slot.partition(".")
            if kind in origins:
                tensors = [self._stored(view) for view in entries if self._rank in view.ranks]
                origins[kind][tail] = [tensor and _origin(tensor) for tensor in tensors]
        return origins["returned"] != origins["output"]

    def _stored(self, view: SlotView) -> StoredTensor | KeptTensor | None:
        key = view.references().get(self._rank)
        return None if key is None else self._find(self._rank, *key)

    def _facts(
        self, stored: StoredTensor | KeptTensor, form: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
        """Return statistics and text; made once for all values that share their bytes."""
        device, stride = str(form.get("device", "cpu")), tuple(form.get("stride", ()))
        key = (_origin(stored), device, stride)
        if key not in self._measured:
            glimpse = stored.glimpse if isinstance(stored, KeptTensor) else None
            if glimpse is None:
                assert stored.data is not None  # else there is a glimpse
                tensor = tensor_of(stored.data, stored.dtype, stored.shape)
                glimpse = glimpse_of(tensor, stride, arena=self._arena)
            self._measured[key] = _facts_of(glimpse, device), _lines(glimpse, device)
        return self._measured[key]

    def _labels(self, value: Value, view: SlotView, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return how a tensor lies: as its DTensor or its mark says, else as far as that is proven;
        of a mesh of several axes along all of them or not at all."""
        global_shape, name = view.global_shape, view.mesh_name
        placements, is_marked = view.placements, view.source is LayoutSource.MARKED
        proven = {"layout": view.source.value} if is_marked else {}
        if not placements:
            mesh = self._on_mesh.layout(self._rank).mesh if self._on_mesh else None
            proofs = how_it_lies(value, mesh, self._tells) if mesh else {}
            if not self._on_mesh or mesh is None or proofs.keys() != {*mesh.axes}:
                return {"layout": "unknown"} if self.has_layouts else {}
            lengths = {proof.placement.dim: proof.length for proof in proofs.values()}
            global_shape = tuple(lengths.get(dim, size) for dim, size in enumerate(shape))
            placements = {axis: proof.placement for axis, proof in proofs.items()}
            reasons = "; ".join(proof.reason for proof in proofs.values())
            name, proven = self._on_mesh.mesh_name, {"layout": f"inferred: {reasons}"}
        return {
            "global_shape": None if global_shape is None else f"torch.Size({list(global_shape)})",
            "mesh": name,
            "placements": {axis: str(placement) for axis, placement in placements.items()},
            **proven,
        }

    def _parameter_on_mesh(self, trace: Trace) -> SlotView | None:
        nodes = (node for step in trace.setup for node in step.passing())
        views = (view for node in nodes for view in node.slots if view.placements)
        rank_views = (view for view in views if self._rank in view.ranks)
        return max(rank_views, key=lambda view: len(view.placements), default=None)

    def _tells(self, views: Sequence[SlotView]) -> Mapping[int, Hashable]:
        """Return what tells the ranks' values apart; this rank's by its bytes where there are no
        digests."""
        rank_view = next((view for view in views if self._rank in view.ranks), None)
        hashes = digests(views)
        tensor = None if hashes or rank_view is None else self._stored(rank_view)
        return {self._rank: _origin(tensor)} if tensor and not _is_constant(tensor) else hashes


class GlobalValues:
    """Global tensors, put together from all ranks."""

    def __init__(self, trace: Trace, layouts: LayoutFile | None, *, as_text: bool) -> None:
        self._layouts = layouts
        self._as_text = as_text
        self._arena = Arena() if as_text else None
        self._said: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """What was inferred, what replicas differ in, what could not be put together."""
        return list(self._said)

    def is_changed(self, views: Mapping[str, Sequence[SlotView]]) -> bool:
        """Return False: hooks that redistribute a tensor make no other global tensor of it."""
        return False

    def shown_tensor(
        self, node: Node, views: Sequence[SlotView], form: Mapping[str, Any]
    ) -> Shown | None:
        """As `LocalValues.shown_tensor`, of the whole tensor."""
        if not views:
            return None
        name = f"{node.path or '(root)'}:{views[0].slot}"
        try:
            combined = whole_value(Value(tuple(views), node), self._layouts)
        except (SelectionError, LayoutError, TraceError) as error:
            self._said[f"{name}: {error}" if name not in str(error) else str(error)] = None
            shape = views[0].global_shape or views[0].folds[0].shape
            facts = {"note": str(error)}
            return Shown(shape=shape, dtype=views[0].dtype, lines=None, data=None, facts=facts)
        for text in combined.remarks:
            self._said[f"{name}: {text}"] = None
        tensor, device = combined.tensor.detach(), str(form.get("device", "cpu"))
        is_one_piece = tuple(tensor.shape) == views[0].folds[0].shape
        stride = tuple(form.get("stride", ())) if is_one_piece else ()
        glimpse = glimpse_of(tensor, stride, arena=self._arena)
        return Shown(
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            lines=_headed(_lines(glimpse, device), form),
            data=None if self._as_text else bytes_of(tensor),
            facts=_facts_of(glimpse, device),
        )


def _headed(lines: tuple[str, ...] | None, form: Mapping[str, Any]) -> tuple[str, ...] | None:
    return (_OF_PARAMETER, *lines) if lines and form.get("parameter") else lines


def _origin(stored: StoredTensor | KeptTensor) -> object:
    return stored.checksum, stored.dtype, stored.shape


def _is_constant(stored: StoredTensor | KeptTensor) -> bool:
    """True where no two elements differ, or that was not looked at."""
    if isinstance(stored, KeptTensor) and stored.glimpse:
        numbers = stored.glimpse.numbers
        return numbers.get("min") == numbers.get("max")
    data = stored.data
    if data is None or not data.size:
        return True
    rows = data.reshape(math.prod(stored.shape), -1)
    return not (rows != rows[:1]).any()


def _lines(glimpse: Glimpse, device: str) -> tuple[str, ...] | None:
    return None if glimpse.items is None else tuple(tensor_text(glimpse, device).split("\n"))


def _facts_of(glimpse: Glimpse, device: str) -> dict[str, Any]:
    return {**statistics_of(glimpse, device), **glimpse.odd}


def _meta_facts(dtype: str) -> dict[str, Any]:
    if not is_measured(getattr(torch, dtype)):
        return {}
    return dict.fromkeys(("mean", "std", "min", "max"), meta_text((), dtype))
