"""An hour-long loop in miniature: nothing of ours grows, in memory, in torch or on disk.

Of everything countable, counted between traced steps, all but the first sample are alike.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.tree.reader import open_trace
from tests import forked
from tests.waiting import wait_until

JOB = Path(__file__).with_name("long_run.py")
SPOOL_KIB = 4 << 10
SEGMENTS_LEFT = 8
"""The writer keeps one number for every segment it has left: one in 16 MiB by default."""
WATCHING = 4
"""Entries of the pair of global hooks that watches for a step: torch (2.13) keeps a pre-hook in one
table, and a forward hook that is always called and takes keywords in three.
"""


def long_run(tmp_path: Path, steps: int, every: str, is_traced: bool) -> list[dict[str, Any]]:
    place = {"RANKSCOPE_OUT": str(tmp_path / "trace"), "RANKSCOPE_SPOOL": str(tmp_path / "spools")}
    settings = {"RANKSCOPE_STEPS": every, "RANKSCOPE_SPOOL_BYTES": f"{SPOOL_KIB}k"}
    done = forked.run(
        [sys.executable, str(JOB), str(steps), "6"],
        env={**os.environ, **place, **settings, "RANKSCOPE": str(int(is_traced))},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(samples) == 6
    return samples


def check(samples: list[dict[str, Any]], resident_kib: int) -> None:
    first, *rest = samples[1:]  # caches fill, and lazy imports happen, until the first of them
    for name in ("weak", "descriptors", "threads", "module_hooks", "optimizer_hooks", "own_hooks"):
        assert all(one[name] == first[name] for one in rest), (name, samples)
    assert first["module_hooks"] == WATCHING and not first["own_hooks"]
    assert first["optimizer_hooks"] == 2
    assert first["threads"] == 1
    for one in rest:
        counted = {name: (n, first["ours"].get(name)) for name, n in one["ours"].items()}
        grown = {name: ns for name, ns in counted.items() if ns[0] != ns[1] and name != "Segment"}
        assert not grown, grown
        assert one["ours"]["Segment"] <= SEGMENTS_LEFT + 8
        assert one["objects"] <= first["objects"] + 60, (first, one)
        assert one["entries"] <= first["entries"] + SEGMENTS_LEFT + 4, (first, one)
        assert one["resident_kib"] <= first["resident_kib"] + resident_kib, samples
        assert one["spool_kib"] <= 2 * SPOOL_KIB, "the relay frees what the collector has"


def check_trace(tmp_path: Path, steps: int, every: int) -> None:
    trace = open_trace(tmp_path / "trace")
    assert trace.is_complete
    train = [step.step for step in trace.steps if step.mode.word == "train"]
    assert train == list(range(0, steps, every))
    spools = tmp_path / "spools"
    assert wait_until(lambda: not any(spools.iterdir())), "nothing stays on the spools' disk"


@pytest.mark.parametrize("trigger", ["", "at"])
def test_nothing_grows_over_600_steps(tmp_path: Path, trigger: str) -> None:
    every = "every:20" + (f",at:{tmp_path / 'now'}" if trigger else "")
    check(long_run(tmp_path, 600, every, is_traced=True), resident_kib=2048)
    check_trace(tmp_path, 600, 20)


@pytest.mark.soak
def test_nothing_grows_over_10_000_steps_traced_every_100th(tmp_path: Path) -> None:
    samples = long_run(tmp_path, 10_000, "every:100", is_traced=True)
    print(json.dumps([{k: v for k, v in one.items() if k != "ours"} for one in samples], indent=1))
    check(samples, resident_kib=4096)
    check_trace(tmp_path, 10_000, 100)
