"""Relays and collectors leave when there is nothing left to wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankscope.run.folders import JOB_OVER_NAME, segment_indexes, stream_folder, streams
from rankscope.run.processes import ExitOutcome, process_name
from tests.companion.jobs import environment


@pytest.fixture
def starter():
    """A process that started the ranks of a host, as `python train.py` or another launcher does."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], env=environment()
    )
    yield process
    process.kill()
    process.wait()


def test_where_every_rank_refused_to_be_traced_both_leave_with_what_started_the_ranks(
    hosts, starter
):
    host = hosts(agent=process_name(starter.pid))
    collector = host.collector(drain_seconds=0.5)
    relay = host.relay()
    with pytest.raises(subprocess.TimeoutExpired):
        relay.wait(timeout=3)
    assert collector.poll() is None
    starter.kill()
    starter.wait()
    assert collector.wait(timeout=60) == ExitOutcome.DONE
    assert relay.wait(timeout=60) == ExitOutcome.DONE
    assert not host.folder.exists()
    assert not (host.out / "trace.json").exists()


def test_a_killed_rank_is_not_waited_for_once_what_would_start_it_again_is_gone(hosts, starter):
    host = hosts(agent=process_name(starter.pid), world_size=1)
    collector, relay = host.collector(drain_seconds=300.0), host.relay()
    rank = host.rank(0, batches=1, hangs=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "written\n"
    rank.kill()
    rank.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        collector.wait(timeout=3)
    starter.kill()
    starter.wait()
    assert (collector.wait(timeout=60), relay.wait(timeout=60)) == (0, 0)
    assert (host.out / "trace.json").exists()


def test_without_a_collector_a_relay_leaves_the_records_where_they_are(hosts, tmp_path):
    host = hosts(
        address=f"ipc://{tmp_path}/none.sock", world_size=1, settings={"finish-seconds": "1"}
    )
    relay = host.relay()
    assert host.rank(0, batches=1).wait(timeout=60) == 0
    with pytest.raises(subprocess.TimeoutExpired):
        relay.wait(timeout=4)  # nobody said that the job is over
    (host.folder / JOB_OVER_NAME).touch()
    assert relay.wait(timeout=30) == ExitOutcome.UNFINISHED
    (stream,) = streams(host.folder)
    assert segment_indexes(stream_folder(host.folder, stream))
