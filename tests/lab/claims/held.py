"""The full tensors of a trace, by place, and what is computed of them."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.ranks import parse_ranks
from rankscope.tree.views import Node, Trace

_TINY = 1e-30
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a report says that a value is."""

    path: str
    slot: str
    phase: str
    mode: str
    step: int
    micro_batch: int | None

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> Place:
        """Return the place of a finding."""
        return cls(**{name: finding[name] for name in cls.__slots__})

    def at(self, path: str, slot: str, **other: Any) -> Place:
        """Return another place of the same step."""
        return replace(self, path=path, slot=slot, **other)

    def named(self, name: str, **other: Any) -> Place:
        """Return the place that `layers.0:output` names in this step."""
        path, _, slot = name.partition(":")
        return self.at("" if path == "(root)" else path, slot, **other)


ByRank = dict[int, Tensor]


class Held:
    """A trace that kept every value whole."""

    def __init__(self, trace: Trace, layouts: LayoutFile | None = None) -> None:
        self.trace, self._layouts = trace, layouts
        self._nodes: dict[tuple[str, str, int, str], list[Node]] = defaultdict(list)
        self.order: list[Node] = []
        """All nodes of steps, as they were called."""
        for step in (*trace.setup, *trace.steps):
            for node in step.walk():
                when = ("", 0) if step.is_setup else (step.mode.word, step.step)
                self._nodes[(node.phase.word, *when, node.path)].append(node)
                self.order.append(node)

    def nodes(self, place: Place) -> list[Node]:
        """Return the calls at a place, of every incarnation and ordinal."""
        when = ("", 0) if place.phase == "setup" else (place.mode, place.step)
        nodes = self._nodes.get((place.phase, *when, place.path), [])
        return [
            node
            for node in nodes
            if place.micro_batch is None or node.micro_batch in (None, place.micro_batch)
        ]

    def slots(self, place: Place) -> list[str]:
        """Return the slots of the calls at a place's path, in its phase."""
        slots = (view.slot for node in self.nodes(place) for view in node.slots)
        return list(dict.fromkeys(slots))

    def all_of(self, place: Place) -> list[ByRank]:
        """Return what the ranks held there, of every call of the path that has the slot."""
        found = (tensors(node, place.slot) for node in self.nodes(place))
        return [by_rank for by_rank in found if by_rank]

    def one(self, place: Place) -> ByRank:
        """Return what the ranks held there in the last call; {} where nothing was kept."""
        found = self.all_of(place)
        return found[-1] if found else {}

    def fulls(self, place: Place) -> list[Tensor]:
        """Return the whole tensors that layouts make of the pieces there; [] where none tells."""
        found = []
        for value in (node.value(place.slot) for node in self.nodes(place)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found += [value.full(self._layouts)] if value is not None else []
                except RankscopeError:
                    continue
        return found

    def before(self, place: Place) -> ByRank:
        """Return the parameter or buffer as the ranks held it before this step."""
        held: ByRank = {}
        steps = [*self.trace.setup, *(s for s in self.trace.steps if s.mode.word == place.mode)]
        for step in steps:
            if not step.is_setup and step.step >= place.step:
                break
            phase = "setup" if step.is_setup else "params"
            for by_rank in self.all_of(replace(place, phase=phase, step=step.step)):
                held = held | by_rank
        return held

    def owned(self, place: Place, begin: str) -> Iterator[Place]:
        """Yield the places of this phase and step whose slot begins so."""
        when = ("", 0) if place.phase == "setup" else (place.mode, place.step)
        for (phase, mode, step, path), nodes in self._nodes.items():
            if (phase, mode, step) == (place.phase, *when):
                slots = {view.slot for node in nodes for view in node.slots}
                for slot in sorted(slots):
                    if slot.startswith(begin):
                        yield place.at(path, slot)


def tensors(node: Node, slot: str) -> ByRank:
    """Return what each rank held in a slot of a call, as far as it was kept."""
    value, held = node.value(slot), {}
    for rank in value.ranks if value is not None else ():
        try:
            held[rank] = value.local(rank)
        except RankscopeError:
            continue
    return held


# ---- arithmetic ----------------------------------------------------------------------------------


def ranks_in(text: str) -> list[int]:
    """Return the ranks of `0,2-3`."""
    return list(parse_ranks(text, _MOST_RANKS))


def same_bytes(*held: Tensor) -> bool:
    """True where all are equal bit by bit, and of one shape and dtype; -0 is 0, each NaN the
    other, as docs/trace-format.md says."""
    first = held[0]
    kinds = {(tuple(t.shape), t.dtype) for t in held}
    return len(kinds) == 1 and all(_bytes(t) == _bytes(first) for t in held[1:])


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_floating_point():
        flat = torch.where(torch.isnan(flat), torch.nan, flat + 0.0)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def agree(held: ByRank, ranks: Sequence[int]) -> bool | None:
    """True where these ranks hold the same bytes; None where one was not kept, or is alone."""
    if len(ranks) < 2 or any(rank not in held for rank in ranks):
        return None
    return same_bytes(*(held[rank] for rank in ranks))


def numbers(tensor: Tensor) -> dict[str, float]:
    """Return the statistics that reports print, of the finite elements."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = flat.to(torch.float64)
    finite = flat[torch.isfinite(flat)]
    nonfinite = {
        "nan": int(torch.isnan(flat).sum()),
        "posinf": int((flat == math.inf).sum()),
        "neginf": int((flat == -math.inf).sum()),
    }
    if not finite.numel():
        return nonfinite
    mean = float(finite.mean())
    return {
        "mean": mean,
        "std": float(finite.std()) if finite.numel() > 1 else math.nan,
        "l2": float(finite.square().sum().sqrt()),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "rms": float(finite.square().mean().sqrt()),
        **nonfinite,
    }


def distance(tensor: Tensor, ref: Tensor, scale: float = 0.0) -> float:
    """Return the relative L2 distance from a reference, over its norm or a larger scale."""
    a, b = tensor.detach().to(torch.float64), ref.detach().to(torch.float64)
    off = float(torch.linalg.vector_norm(a - b))
    return 0.0 if off == 0 else off / max(float(torch.linalg.vector_norm(b)), scale, _TINY)


def best_factor(tensor: Tensor, ref: Tensor) -> tuple[float, float]:
    """Return the factor of the reference that is nearest, and the relative rest it leaves."""
    a, b = (t.detach().to(torch.float64).reshape(-1) for t in (tensor, ref))
    square = float(b @ b)
    if not square:
        return math.nan, math.inf
    factor = float(a @ b) / square
    return factor, distance(a, factor * b)


def wholes(held: ByRank, shape: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Return every whole of this shape that the ranks' pieces may make, and how: as one rank holds
    it, put one behind the other along a dim, along two dims, or added up."""
    pieces = [held[rank] for rank in sorted(held)]
    distinct = [t for n, t in enumerate(pieces) if not any(same_bytes(t, o) for o in pieces[:n])]
    found = [(f"rank {rank}", held[rank]) for rank in sorted(held)]
    for parts in (pieces, distinct):
        found += [(f"along {dim}", whole) for dim, whole in _joined(parts)]
        for rows in range(2, len(parts)):
            if len(parts) % rows:
                continue
            columns = len(parts) // rows
            for grid in (
                [parts[n * columns : (n + 1) * columns] for n in range(rows)],
                [parts[n::rows] for n in range(rows)],
            ):
                lines = [list(_joined(line)) for line in grid]
                for joined in zip(*lines):
                    inner = [whole for _, whole in joined]
                    found += [(f"grid {dim}", whole) for dim, whole in _joined(inner)]
        if len(parts) > 1 and len({tuple(t.shape) for t in parts}) == 1:
            total = torch.stack([t.detach().to(torch.float64) for t in parts]).sum(0)
            found += [("sum", total), ("average", total / len(parts))]
    return [(how, whole) for how, whole in found if tuple(whole.shape) == tuple(shape)]


def _joined(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    if len(parts) < 2 or len({t.dim() for t in parts}) != 1:
        return
    for dim in range(parts[0].dim()):
        others = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in parts}
        if len(others) == 1:
            yield dim, torch.cat(list(parts), dim)


def pairs(held: ByRank, ref: ByRank) -> list[tuple[str, Tensor, Tensor]]:
    """Return what of a run may stand beside what of its reference: wholes of one shape, and the
    rows of each rank beside those rows of the reference."""
    found = [
        (how, whole, tensor) for tensor in ref.values() for how, whole in wholes(held, tensor.shape)
    ]
    for tensor, (rank, piece) in itertools.product(ref.values(), sorted(held.items())):
        is_part = piece.numel() and piece.dim() == tensor.dim() and piece.shape != tensor.shape
        if (
            is_part
            and piece.shape[1:] == tensor.shape[1:]
            and tensor.shape[0] % piece.shape[0] == 0
        ):
            for begin in range(0, tensor.shape[0], piece.shape[0]):
                rows = tensor[begin : begin + piece.shape[0]]
                found.append((f"rank {rank}, rows from {begin}", piece, rows))
    return found
