"""What a right program may do raises no alarm in `diff`, and one cause is one finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.comparison.test_diff import compared, of_row
from tests.distributed.pool import RankPool


@pytest.mark.parametrize("name", ["ddp", "pipeline"])
def test_shards_that_no_layout_describes_are_skipped_beside_half_batches_of_their_size(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ref = of_row(ranks, name, "float32", tmp_path / "ref")
    report = compared(ref, of_row(ranks, "tp-dtensor", "float32", tmp_path / "test"))
    assert [f.message for f in report.findings] == []
    assert "layout unknown" in [skipped.reason for skipped in report.skipped]
    assert report.compared >= 200
