"""Trees of recorded jobs are byte for byte what they were when their sums were committed.

Where the bytes changed on purpose, docs/contributing.md says how to renew the sums.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests.tree.record_golden import FOLDER, JOBS, SUMS, rebuilt, unpacked


@pytest.mark.parametrize("name", JOBS)
def test_the_tree_of_a_recorded_job_does_not_change_by_a_byte(tmp_path: Path, name: str) -> None:
    """A new order of sums, of nodes or of fields is a new format to whoever compares traces."""
    sums = rebuilt(unpacked(name, tmp_path / "in"), tmp_path / "out")
    assert sums == json.loads(SUMS.read_text())[name], (
        f"{tmp_path}/out differs from the tree of before: build it with the commit before, compare "
        "the two, and read 'Changing the format' in docs/contributing.md"
    )


def test_the_recorded_jobs_have_what_a_tree_can_hold(tmp_path: Path) -> None:
    """A sum notices only what the recorded jobs contain."""
    seen = set[str]()
    for name in JOBS:
        unpacked(name, tmp_path / name / "in")
        rebuilt(tmp_path / name / "in", tmp_path / name / "out")
        trace = open_trace(tmp_path / name / "out")
        assert trace.is_complete
        for node in trace.walk():
            seen |= {node.phase.word, node.status, node.key.mode.word, *node.wrappers}
            for slot in node.slots:
                seen |= {slot.source.value, *map(str, slot.placements.values())}
                seen |= {combined.note or "combined" for combined in slot.combined}
                seen |= {"kept"} if slot.references() else set()
    assert seen >= {
        *("setup", "forward", "recompute", "backward", "grads", "params", "collective"),
        *("train", "eval", "returned", "stopped", "DDP", "FSDP2", "kept", "combined"),
        *("dtensor", "declared", "unknown", "Replicate()", "Shard(0)", "Shard(1)", "Partial(sum)"),
    }


def test_the_recorded_jobs_stay_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
