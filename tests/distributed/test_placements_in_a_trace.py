"""Whole tensors in a trace, put together from shards no rank ever gathered, against the gathered
ones.

Four real ranks hand out DTensors of every placement on 1-D and 2-D meshes, strided, uneven and
empty shards included, beside the whole values: `full_tensor()`, or what was distributed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rankscope.layout.placement import PlacementKind
from rankscope.record.statistics import Combined
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace, Value
from tests.distributed import placements_job
from tests.distributed.pool import RankPool

COUNTS = ("count", "nan", "posinf", "neginf", "zero")


@pytest.fixture(scope="module")
def trace(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("placements") / "trace"
    ranks.run(placements_job.run, str(out))
    return open_trace(out)


def pairs(trace: Trace) -> Iterator[tuple[Value, Combined]]:
    """Yield every DTensor value and the digest of its whole."""
    (node,) = trace.find("", phase="forward")
    slots = [view.slot for view in node.slots if view.slot.startswith("output.part.")]
    assert len(slots) > 60
    for slot in dict.fromkeys(slots):
        part, whole = node.value(slot), node.value(slot.replace("part", "whole"))
        assert part is not None
        assert whole is not None
        digest = whole.per_rank[0]
        assert digest is not None
        yield part, digest  # type: ignore[misc]  # the fields compared are the same


def kinds(value: Value) -> set[PlacementKind]:
    return {placement.kind for placement in value.layout.placements}


def test_statistics_of_shards_and_replicas_are_those_of_the_whole(trace: Trace) -> None:
    checked = 0
    for value, whole in pairs(trace):
        if kinds(value) & {PlacementKind.PARTIAL, PlacementKind.OTHER}:
            continue
        combined = value.combined
        assert combined is not None
        assert combined.mean is not None, combined.note
        assert [getattr(combined, n) for n in COUNTS] == [getattr(whole, n) for n in COUNTS]
        assert (combined.min, combined.max) == (whole.min, whole.max)
        for name in ("mean", "std", "l2"):
            expected = pytest.approx(getattr(whole, name), rel=1e-6, nan_ok=True)
            assert getattr(combined, name) == expected
        checked += 1
    assert checked > 40


def test_sketches_of_all_that_composes_are_those_of_the_whole(trace: Trace) -> None:
    checked = 0
    for value, whole in pairs(trace):
        if not all(placement.is_composable for placement in value.layout.placements):
            continue
        combined = value.combined
        assert combined is not None
        assert combined.sketch is not None, combined.note
        error = np.abs(np.subtract(combined.sketch, whole.sketch)).max()
        assert error <= 1e-5 * whole.l2
        checked += 1
    assert checked > 50


def test_partial_sums_and_averages_have_the_mean_of_the_whole_and_no_more(trace: Trace) -> None:
    checked = 0
    for value, whole in pairs(trace):
        if PlacementKind.PARTIAL not in kinds(value) or PlacementKind.OTHER in kinds(value):
            continue
        combined = value.combined
        if all(placement.is_composable for placement in value.layout.placements):
            assert combined is not None
            assert combined.mean == pytest.approx(whole.mean, rel=1e-5, abs=1e-6)
            assert combined.std is None
            assert combined.max is None
            checked += 1
        else:
            assert combined is None or (combined.sketch is None and combined.note)
    assert checked > 4


def test_partials_of_torchs_own_kind_are_marked_and_not_guessed(trace: Trace) -> None:
    marked = [value for value, _ in pairs(trace) if PlacementKind.OTHER in kinds(value)]
    assert marked
    for value in marked:
        assert value.combined is None or value.combined.note
