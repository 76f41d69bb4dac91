"""What frameworks say of a value: how it lies along one axis of the job.

Megatron marks a weight that it cut with `tensor_model_parallel` and `partition_dim`. Such a mark
says which dim is cut and not between which ranks, so these are looked for: where the module names
its process group, where a group of the job is described as the axis' own, or among the groups of
the collectives that modules with cut parameters issue. One of the last is believed where its ranks
held different values of most cut parameters when training began (ranks that are data-parallel hold
the same). Where nothing or more than one answer is left, the axis is not known.

transformers' `tp_plan` says of what goes into a module and comes out how it lies, and names the
ranks.

Plain data goes in and comes out; the marks are read in `capture/frameworkmarks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope.layout.placement import PieceKind, Placement

Members = tuple[int, ...]
"""Global ranks in the order of their group."""

AXIS_GROUPS: Final[Mapping[str, str]] = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
}
"""How Megatron describes the process group of an axis."""
FSDP1_AXIS: Final = "fsdp"
LAST_DIM: Final = "Shard(-1)"
"""Stands in a mark for a cut of the last dim, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMark:
    """What a framework says of one parameter or activation of one rank."""

    axis: str
    """Name of the axis it speaks of: "tp", "etp" (tensor parallelism of experts), "fsdp"."""
    placement: Placement
    is_of_last_dim: bool = False
    members: Members | None = None
    """Ranks along the axis, where the framework says that too."""

    @property
    def is_cut(self) -> bool:
        """True where each rank of the axis holds another part."""
        return self.placement.pieces is PieceKind.SLICES

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its definition in a spool."""
        members = None if self.members is None else list(self.members)
        placement = LAST_DIM if self.is_of_last_dim else str(self.placement)
        return {"axis": self.axis, "placement": placement, "members": members}

    def placed(self, dims: int) -> Placement:
        """Return how a value of so many dims lies."""
        if not self.is_of_last_dim:
            return self.placement
        return replace(self.placement, dim=max(dims - 1, 0))


def believed_groups(
    candidates: Mapping[int, Collection[Members]], cut: Iterable[Mapping[int, int]]
) -> dict[int, Members]:
    """Return the group of an axis that each rank belongs to, of those ranks where it is certain.

    Args:
        candidates: {rank: groups it may be}.
        cut: of every cut parameter that is no constant {rank: hash of what it held at setup}.
    """
    every = {group for groups in candidates.values() for group in groups if len(group) > 1}
    cut = list(cut)
    proven = {group for group in every if _holds_parts(group, cut)}
    own = {
        rank: {g for g in groups if g in proven and rank in g}
        for rank, groups in candidates.items()
    }
    found = {rank: groups.pop() for rank, groups in own.items() if len(groups) == 1}
    # a group is one only where all of its ranks take it for theirs
    return {r: g for r, g in found.items() if all(found.get(member) == g for member in g)}


def _holds_parts(group: Members, cut: Iterable[Mapping[int, int]]) -> bool:
    apart = alike = 0
    for hashes in cut:
        held = [hashes[rank] for rank in group if rank in hashes]
        if len(held) > 1:
            is_apart = len(set(held)) == len(held) == len(group)
            apart += is_apart
            alike += not is_apart
    return apart > alike
