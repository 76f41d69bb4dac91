"""What a collective is still writing is never waited for and never read; its number comes later.

Tests of `AsyncCollectiveTensor` and of torch's registry of outstanding work pin torch 2.13: without
its private names a value in flight stays `pending` for ever, and only these tests fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.record.ranks import ranks_text
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.distributed import async_collectives_job as job
from tests.distributed.pool import RankPool

ROWS = [[float(column + 4 * row) for column in range(4)] for row in range(4)]
SUM = [2 * x + 1 for row in ROWS for x in row]
GATHERED = [x + rank for rank in (0, 1) for row in ROWS for x in row]
EXPECTED = {
    "all_reduce": [SUM, SUM],
    "all_gather": [GATHERED, GATHERED],
    "reduce_scatter": [SUM[:8], SUM[8:]],
    "redistributed": [SUM, SUM],
    "gathered_shards": [GATHERED, GATHERED],
}
CASES = [
    ("all_reduce", "in"),
    ("redistributed", "trace"),
    ("all_gather", "after"),
    *(pytest.param(name, "in", marks=pytest.mark.lab) for name in EXPECTED if name != "all_reduce"),
    pytest.param("all_reduce", "trace", marks=pytest.mark.lab),
]


def norm(values: list[float]) -> float:
    return sum(x * x for x in values) ** 0.5


def seen(found: Trace, path: str, slot: str) -> tuple[list[float | None], set[str]]:
    """Return the norm on each rank, and the flags on any."""
    (node,) = found.find(path, phase="forward")
    value = node.value(slot)
    assert value is not None
    folds = [fold for view in node.slots if view.slot == slot for fold in view.folds]
    digests = [value.per_rank[rank] for rank in (0, 1)]
    return [d and d.l2 for d in digests], {flag for fold in folds for flag in fold.flags}


def stored(found: Trace, path: str, slot: str) -> list[object]:
    """Return the elements kept of each rank; where none were, whose are kept and not kept."""
    (node,) = found.find(path, phase="forward")
    (view,) = (view for view in node.slots if view.slot == slot)
    keys = view.step["values.reference"][view.rows].tolist()
    if not all(keys):
        return [ranks_text(view.references()), ranks_text(view.not_kept)]
    return [
        found.tensor_files.find(rank, 0, key).array().flatten().tolist()
        for rank, key in enumerate(keys)
    ]


@pytest.mark.parametrize(("name", "waits"), CASES)
def test_tracing_does_not_wait_for_a_collective_and_shows_its_number_once_it_is_known(
    ranks: RankPool, tmp_path: Path, name: str, waits: str
) -> None:
    results = ranks.run(job.run, str(tmp_path), name, waits, world_size=2)
    twice = 2 if waits == "in" else 1
    assert results == [[twice * x for x in of_rank] for of_rank in EXPECTED[name]]
    found = open_trace(tmp_path / "trace")
    assert not [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    assert not [node.errors for node in found.walk() if node.errors]
    norms, flags = seen(found, "starts", "output")
    kept = stored(found, "starts", "output")
    assert kept == (["", "0-1"] if waits == "trace" else EXPECTED[name])
    if waits == "trace":
        assert (norms, flags) == ([None, None], {"pending", "structure_only"})
        return
    assert norms == pytest.approx([norm(of_rank) for of_rank in EXPECTED[name]])
    assert flags == {"after_call"}
    if waits == "in":
        assert seen(found, "uses", "input.0") == (norms, {"after_call"})
        assert seen(found, "uses", "output") == (pytest.approx([2 * n for n in norms]), set())


def test_a_plain_tensor_in_flight_is_shown_once_the_program_has_waited_for_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(job.run_plain_tensor, str(tmp_path), world_size=2)
    assert results == [[2 * x for x in SUM]] * 2
    found = open_trace(tmp_path / "trace")
    assert seen(found, "starts", "output") == (pytest.approx([norm(SUM)] * 2), {"after_call"})
    assert seen(found, "uses", "input.0")[0] == pytest.approx([norm(SUM)] * 2)
    assert seen(found, "uses", "output")[0] == pytest.approx([2 * norm(SUM)] * 2)
