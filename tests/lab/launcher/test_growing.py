"""No kill of a companion costs a step of a tree that grows."""

from __future__ import annotations

import collections
import threading

import pytest

from rankscope.run.files import bytes_on_disk
from rankscope.tree.growingtree import grown_steps
from rankscope.tree.reader import open_trace
from tests.launcher.launches import Launch, Start, kill
from tests.launcher.test_growing import SCRIPT as SCRIPT
from tests.launcher.test_growing import parts
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("growing"),
    installed,
]


def records_on_disk(job: Launch) -> int:
    return sum(bytes_on_disk(path.stat()) for path in (job.out / "spool").glob("*.cells"))


def records_written(job: Launch) -> int:
    return sum(path.stat().st_size for path in (job.out / "spool").glob("*.cells"))


def test_kills_cost_no_step_and_readers_see_whole_steps(launch: Start):
    job = launch(["a", "b"], "--rs-steps", "all", "--rs-live-check", 0)
    job.trained()
    gaps: list[object] = []
    is_over = threading.Event()

    def read() -> None:
        most = 0
        while not is_over.wait(0.5):
            if not any((job.out / "spool").glob("*.cells")):
                continue
            numbers = [step.step for step in open_trace(job.out).steps]
            if numbers != list(range(len(numbers))) or len(numbers) < most:
                counted = collections.Counter(numbers)
                wrong = [n for n in range(max(numbers)) if counted[n] != 1]
                gaps.append((len(numbers), most, wrong))
            most = len(numbers)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert wait_until(lambda: parts(job) >= 2, 60.0), job.logs
        for victim in (job.beside(), job.companion()):
            before = parts(job)
            kill(victim)
            assert wait_until(lambda n=before: parts(job) > n, 60.0), job.logs
        assert wait_until(
            lambda: records_written(job) > 160 << 20 > 100 << 20 > records_on_disk(job), 90.0
        ), job.logs
        (job.meeting / "leave").touch()
        assert job.wait() == 0, job.logs
    finally:
        is_over.set()
        reader.join(60)
    assert not gaps
    assert grown_steps(job.out)
    assert not (job.out / "spool").exists() and not (job.out / "steps/index.jsonl").exists()
    trace = open_trace(job.out)
    assert trace.is_complete, trace.completeness
    assert [step.step for step in trace.steps] == list(range(len(trace.steps)))
    kinds = {len([*step.passing()]) for step in trace.steps[1:-1]}
    assert len(kinds) == 1
