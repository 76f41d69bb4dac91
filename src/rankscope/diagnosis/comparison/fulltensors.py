"""Exact differences of values whose full tensors both traces kept, in place of estimates.

What `wholevalues.py` composes of digests is composed here of bytes, by the same pieces: so values
are told apart by the same ranks, and pieces whose sketches do not add up (cut by hand, their layout
declared afterwards) and batches without sketches of their samples can be compared as well. Torch is
loaded when the first tensor is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import AlignedValue
from rankscope.diagnosis.comparison.datasamples import Batches, Unit
from rankscope.diagnosis.comparison.difference import Difference, Measured, Totals
from rankscope.diagnosis.comparison.wholevalues import Wholes, WholeValues
from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.errors import LayoutError, SelectionError, TraceError
from rankscope.layout.plan import plan_assemblies
from rankscope.record.phases import Phase
from rankscope.record.texts import counted
from rankscope.tree.tensors.globalvalues import assembled, local_tensor
from rankscope.tree.views import Trace, Value

if TYPE_CHECKING:
    import torch

    from rankscope.tree.tensors.rebuild import ExactDistance

_WITHOUT_SAMPLES: Final = frozenset(
    {
        "gradients of other batches, and no sketches of single samples",
        "neither sketches of samples nor statistics",
        "of another size than the reference's",
        "layout unknown",
    }
)
"""Reasons that full tensors do away with, where they tell which sample is which."""


class _HeldWhole:
    """One whole tensor that ranks of one unit hold; read when it is asked for."""

    def __init__(
        self, composing: WholeValues, values: SlotValues, wholes: Wholes, index: int, unit: Unit
    ) -> None:
        self._composing, self._values = composing, values
        self.members, self.row, self.unit = wholes.members[index], wholes.rows[index], unit

    @cached_property
    def tensor(self) -> torch.Tensor:
        """SelectionError: it was not kept; LayoutError: no whole; TraceError: damaged."""
        first, *_ = ranks = self.members.tolist()
        view = next(view for view in self._values.views if first in view.ranks)
        value = Value((view,), self._values.call.node)
        pieces = self._composing.pieces(view, self._values)
        if pieces is None:
            return local_tensor(value, first, is_checked=True)
        # of several meshes that hold the same, one is read
        plan, *_ = plan_assemblies({rank: pieces[rank] for rank in ranks})
        return assembled(value, plan).tensor


_Pair = tuple["torch.Tensor", "torch.Tensor", Array | None, _HeldWhole]
"""Both tensors, the digest of a reference that is a value of its own, whose the test's is."""


class FullTensors:
    """Reads what both traces kept."""

    def __init__(
        self, traces: tuple[Trace, Trace], composing: tuple[WholeValues, WholeValues]
    ) -> None:
        self._composing = composing
        self._is_matched = False
        self._batches: Batches | None = None
        self._partner: Array | None = None
        """[samples of the test] which sample of the reference each is, by the bytes of the root's
        inputs, where no sketches tell it."""
        self._batch_dims = [trace.batch_dim for trace in traces]
        self._compared = 0
        self._unread: Counter[str] = Counter()
        """Why values could not be read though a part of them was kept."""

    def notes(self) -> Iterator[str]:
        """Yield how many distances are exact by tensors, and why others are not."""
        if self._compared:
            yield f"the distances of {counted(self._compared, 'value')} are exact, by full tensors"
        if self._is_matched:
            yield "samples were told apart by the bytes of the root's inputs, which were kept"
        if self._unread:
            ((reason, _),) = self._unread.most_common(1)
            values = counted(self._unread.total(), "value")
            yield f"the kept tensors of {values} could not be compared: {reason}"

    def exactly(
        self,
        value: AlignedValue,
        sides: tuple[Mapping[int, Wholes], Mapping[int, Wholes]],
        estimated: Difference | str,
        batches: Batches | None,
        allowed: float,
    ) -> Difference | str:
        """Return the difference of a value by its full tensors; what was `estimated` by digests (or
        why nothing was) where these were not kept, or where that is known to the bit. `sides` is
        what digests compose of it, by micro-batch; `allowed` the relative distance that counts as
        none."""
        if isinstance(estimated, str):
            is_final = estimated not in _WITHOUT_SAMPLES or batches is None
        else:
            is_final = bool(estimated.partial) or estimated.is_of_local_batch
            is_final |= estimated.measured == Measured.BYTES
        values = (*value.ref.values(), *value.test.values())
        if is_final or not all(
            view.references() for slot_values in values for view in slot_values.views
        ):
            return estimated
        try:
            difference = self._difference(value, sides, estimated, batches, allowed)
        except (SelectionError, LayoutError, TraceError) as error:
            self._unread[str(error)] += 1
            return estimated
        if difference is None:
            return estimated
        self._compared += 1
        return difference

    def _difference(
        self,
        value: AlignedValue,
        sides: tuple[Mapping[int, Wholes], Mapping[int, Wholes]],
        estimated: Difference | str,
        batches: Batches | None,
        allowed: float,
    ) -> Difference | None:
        ref, test = (
            [
                _HeldWhole(composing, values[micro_batch], wholes, index, (micro_batch, place))
                for micro_batch, wholes in sorted(by_micro_batch.items())
                for index, place in enumerate(wholes.places.tolist())
            ]
            for composing, values, by_micro_batch in zip(
                self._composing, (value.ref, value.test), sides
            )
        )
        if batches is None or not value.key.phase.facts.is_activation:
            first = min(sides[1])  # what all data-parallel ranks have is in every micro-batch
            return _held_to([(ref[0], part) for part in test if part.unit[0] == first])
        if batches is not self._batches:
            self._batches, self._partner = batches, None
        if isinstance(estimated, str) or estimated.measured == Measured.SAMPLES:
            return self._by_sample(value, ref, test, batches)
        units = [{part.unit for part in side} for side in (ref, test)]
        if batches.are_the_same and units[0] == units[1]:
            firsts = _first_of_units(ref)
            return _held_to([(firsts[part.unit], part) for part in test])
        is_gradient = value.key.phase is Phase.BACKWARD
        common = None if is_gradient else _held_to([(ref[0], part) for part in test])
        if common is not None and (common.errors() <= allowed).all():
            return common
        if estimated.measured == Measured.SKETCHES:  # else of the average over units, or their sum
            return common if units[1].issuperset(estimated.units) else None
        return self._by_sample(value, ref, test, batches)

    def _by_sample(
        self, value: AlignedValue, ref: list[_HeldWhole], test: list[_HeldWhole], batches: Batches
    ) -> Difference | None:
        """Compare the samples of the test with the same ones of the reference."""
        from rankscope.tree.tensors.rebuild import joined, row_matches

        refs = _first_of_units(ref)
        if len({part.unit for part in test}) < len(test) and batches.is_by_order:
            return None  # pieces of a batch, in a layout that nobody declared
        tensors = [refs[unit].tensor.movedim(self._batch_dims[0], 0) for unit in sorted(refs)]
        tests = [(part, part.tensor.movedim(self._batch_dims[1], 0)) for part in test]
        rows = {part.unit: len(tensor) for part, tensor in tests}
        shapes = {tensor.shape[1:] for tensor in (*tensors, *(tensor for _, tensor in tests))}
        if len(shapes) > 1 or sum(rows.values()) != sum(map(len, tensors)):
            return None
        batch = joined(tensors)
        if batches.is_by_order:
            if value.is_handed_to_root and self._partner is None:
                by_unit = dict(reversed([(part.unit, tensor) for part, tensor in tests]))
                self._partner = row_matches(batch, joined([by_unit[u] for u in sorted(by_unit)]))
            partner = self._partner
            self._is_matched |= partner is not None
        else:
            is_known = not batches.are_of_other_samples
            partner = batches.partner if is_known else None
        if partner is None or not len(partner) or len(batch) % len(partner):
            return None
        rows_per_sample = len(batch) // len(partner)
        order = (partner[:, None] * rows_per_sample + np.arange(rows_per_sample)).reshape(-1)
        starts, at = {}, 0
        for unit in sorted(rows):
            starts[unit], at = at, at + rows[unit]
        pairs: list[_Pair] = []
        for part, tensor in tests:
            start = starts[part.unit]
            pairs.append((batch[order[start : start + len(tensor)]], tensor, None, part))
        return _measured(pairs, [refs[unit].row for unit in sorted(refs)])


def _held_to(parts: list[tuple[_HeldWhole, _HeldWhole]]) -> Difference | None:
    pairs: list[_Pair] = [(ref.tensor, test.tensor, ref.row, test) for ref, test in parts]
    if any(a.shape != b.shape for a, b, _, _ in pairs):
        return None
    return _measured(pairs, [*{id(ref): ref.row for ref, _ in parts}.values()])


def _first_of_units(parts: Iterable[_HeldWhole]) -> dict[Unit, _HeldWhole]:
    first: dict[Unit, _HeldWhole] = {}
    for part in parts:
        first.setdefault(part.unit, part)
    return first


def _measured(pairs: list[_Pair], ref_rows: list[Array]) -> Difference:
    """Return the difference of pairs of tensors, one for each part; `ref_rows` are the digests of
    all values of the reference."""
    from rankscope.tree.tensors.rebuild import exact_distance

    distances: list[ExactDistance] = [exact_distance(a, b) for a, b, _, _ in pairs]
    parts = [part for *_, part in pairs]
    first = _first_of_units(parts)
    return Difference(
        dots=np.array(
            [
                [distance.cross, distance.first_square, distance.second_square]
                for distance in distances
            ]
        ),
        squares=np.array([math.inf if e.other_nonfinite else e.square for e in distances]),
        norms=np.sqrt([distance.first_square for distance in distances]),
        members=[part.members for part in parts],
        units=[part.unit for part in parts],
        is_exact=np.array([not distance.unequal for distance in distances]),
        measured=Measured.TENSORS,
        ref=Totals.of(np.stack(ref_rows)),
        test=Totals.of(np.stack([first[unit].row for unit in sorted(first)])),
        rows=[None if row is None else (row, part.row) for _, _, row, part in pairs],
        test_rows=[part.row for part in parts],
    )
