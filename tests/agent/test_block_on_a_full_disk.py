"""A block whose trace folder takes nothing for a while: what it takes later is no mixture."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import torch

import rankscope
from rankscope.tree.reader import open_trace


def test_segments_a_full_disk_refused_are_taken_whole_when_it_has_room_again(tmp_path: Path):
    """A part of a segment that got through before must not stay in front of the next try."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            rankscope.step()

    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with rankscope.trace(model, out=tmp_path / "t", spool=tmp_path, spool_bytes=256 << 10):
        train(10)
        begun = (tmp_path / "t/spool/rank00000.0.cells").stat().st_size
        assert begun > 32 << 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (begun + 1000, limits[1]))
        try:
            train(10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        train(10)
    trace = open_trace(tmp_path / "t")
    (rank,) = trace.completeness["ranks"]
    assert rank["committed"] == rank["received"]
    assert (rank["notes"], rank["end"]) == ([], "closed")
    assert [step.step for step in trace.steps][-1] == 29
