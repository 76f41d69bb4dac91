"""Which plain parameters are replicas, inferred from what the ranks held at setup.

Bitwise equal parameters are replicas from then on. Constants (ones, zeros) are equal on shards as
well, so they count only

* on a *line*: ranks of which no plain parameter differs, with one among them that is no constant
  (data-parallel replicas: everything is equal there), or
* where the module that owns them was handed the same on these ranks and got the same gradients of
  its outputs back: then its own gradients are the same by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.layouts import Same
from rankscope.diagnosis.stepview import SlotValues, StepView, is_input, sibling_path
from rankscope.record.call import Phase

__all__ = ["InferredReplicas", "clusters"]

Array = NDArray[Any]
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


def clusters(held: SlotValues) -> tuple[Array, ...]:
    """Return the groups of two ranks or more that hold the same bytes, each sorted."""
    known = np.flatnonzero(held.is_known & (held.counts > 0))
    found = []
    for number in np.unique(held.hashes[known]):
        group = held.ranks[known[held.hashes[known] == number]]
        if len(group) > 1:
            found.append(group.astype(np.int64))
    return tuple(found)


class InferredReplicas:
    """What the setup of one life of a job says about plain parameters."""

    def __init__(self, setup: StepView | None) -> None:
        self._equal: dict[tuple[str, str], tuple[Array, ...]] = {}
        """{(path, name): groups of equal ranks} of plain parameters."""
        self._constant: set[tuple[str, str]] = set()
        self._shared: set[tuple[str, str]] = set()
        """Parameters that differ between some ranks that hold them."""
        self.lines: tuple[Array, ...] = ()
        """Ranks of which every plain parameter is equal."""
        self._proven: dict[tuple[str, str], list[Array]] = {}
        self._families: tuple[StepView | None, dict[tuple[str, str], list[SlotValues]]] = (None, {})
        """Gradients of sibling modules, of the step that was asked about last."""
        if setup is not None:
            self._read(setup)

    def _read(self, setup: StepView) -> None:
        size = 1 + max((int(call.ranks[-1]) for call in setup.calls), default=-1)
        prints, proofs = np.zeros(size, np.uint64), np.zeros(size, np.int64)
        number = np.uint64(1)
        for held in setup.values(Phase.SETUP):
            if not held.slot.startswith("param:") or held.source != "unknown":
                continue
            key = (held.call.path, held.slot[6:])
            self._equal[key] = clusters(held)
            if held.is_constant:
                self._constant.add(key)
                continue
            if held.agree(held.ranks) is False:
                self._shared.add(key)
            with np.errstate(over="ignore"):
                number += _STEP
                mixed = (held.hashes ^ number) * _MIX
                prints[held.ranks] += mixed ^ (mixed >> np.uint64(29))
            proofs[held.ranks] += 1
        ranks = np.flatnonzero(proofs)
        lines = (ranks[prints[ranks] == own] for own in np.unique(prints[ranks]))
        self.lines = tuple(line for line in lines if len(line) > 1)

    def is_sharded(self, path: str) -> bool:
        """True where a plain parameter of the module itself differs between its ranks."""
        return any(owner == path for owner, _ in self._shared)

    @property
    def sharded_paths(self) -> frozenset[str]:
        """Paths of the modules that own such parameters."""
        return frozenset(owner for owner, _ in self._shared)

    def same(self, held: SlotValues, moment: StepView) -> Same | None:
        """Return which ranks' parameter or gradient should be equal; None where nothing is known
        of it."""
        key = (held.call.path, held.slot.partition(":")[2])
        groups = self._equal.get(key)
        if held.source != "unknown" or not groups:
            return None
        if key not in self._constant:
            return Same(groups=groups, source="inferred")
        found = [g for group in groups for g in self._trusted(key, group, held, moment)]
        return Same(groups=tuple(found), source="inferred") if found else None

    def _trusted(
        self, key: tuple[str, str], group: Array, held: SlotValues, moment: StepView
    ) -> Iterator[Array]:
        """Yield the parts of a group of equal constants that are known to be replicas."""
        left = group
        for line in self.lines:
            own = left[np.isin(left, line)]
            if len(own) > 1:
                yield own
                left = left[~np.isin(left, line)]
        if len(left) < 2:
            return
        for proven in self._proven.get(key, ()):
            if len(proven) == len(left) and (proven == left).all():
                yield left
                return
        if is_handed_the_same(moment, key[0], left) or self._siblings_agree(held, moment, left):
            self._proven.setdefault(key, []).append(left)
            yield left

    def _siblings_agree(self, held: SlotValues, moment: StepView, ranks: Array) -> bool:
        """True where the gradient of this parameter, or of a sibling's, agrees on these ranks."""
        if held.call.phase is not Phase.GRADS:
            return False
        if self._families[0] is not moment:
            self._families = (moment, _families(moment))
        family = self._families[1].get((sibling_path(held.call.path), held.slot), ())
        return any(not each.is_constant and each.agree(ranks) is True for each in family)


def _families(moment: StepView) -> dict[tuple[str, str], list[SlotValues]]:
    found: dict[tuple[str, str], list[SlotValues]] = {}
    for held in moment.values(Phase.GRADS):
        found.setdefault((sibling_path(held.call.path), held.slot), []).append(held)
    return found


def is_handed_the_same(moment: StepView, path: str, ranks: Array) -> bool:
    """True where a module got the same inputs, and the same gradients of its outputs, on all of
    these ranks in every call of a step."""
    seen = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for call in moment.named(path):
        if call.phase not in seen:
            continue
        for slot, held in call.held.items():
            if is_input(slot, call.phase) and held.dtype != "python":
                if held.agree(ranks) is not True:
                    return False
                seen[call.phase] += 1
    return all(seen.values())
