"""Whole jobs of real processes, killed at random: replicas are the streams, byte for byte."""

import json
import random
import signal
import sys
import time

import pytest

from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import SHARED, mark_job_over
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.replicas import read_end, replica_path, valid_prefix
from rankscope.tree.assembly.sources import find_streams
from tests import forked
from tests.companion.jobs import environment
from tests.ports import free_port
from tests.spool.streams import open_replica
from tests.spool.test_interruption import numbers_in
from tests.waiting import wait_until


def soak(seed):
    return pytest.param(seed, marks=pytest.mark.soak)


def verify(trace):
    """What `rankscope verify` prints."""
    command = [sys.executable, "-m", "rankscope", "verify", str(trace)]
    return forked.run(command, env=environment(), capture_output=True, text=True).stdout


def stream(rank, incarnation=0):
    return StreamId(rank=rank, incarnation=incarnation)


def assert_replica_is_whole(out, rank, batches, incarnation=0):
    """Every record once and in order, the end marker agreeing with the bytes."""
    path = replica_path(out, stream(rank, incarnation))
    size = path.stat().st_size
    assert valid_prefix(path) == size
    found = open_replica(path)
    _, values = found.values()
    assert values["sequence"].tolist() == list(range(1, batches * 100 + 1))
    assert found.definitions()[0]["rank"] == rank
    end = read_end(replica_path(out, stream(rank, incarnation)))
    assert end is not None
    assert (end.committed, end.end) == (size, EndReason.EXIT)


def has_arrived(host, rank):
    """Wait for the first records of a rank: its replica is made before, empty."""
    path = replica_path(host.out, stream(rank))
    return wait_until(lambda: path.exists() and path.stat().st_size)


def test_a_job_ends_with_its_tree_in_place_and_an_empty_spool(hosts):
    host = hosts()
    collector, relay = host.collector(), host.relay()
    ranks = [host.rank(rank) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert (collector.wait(120), relay.wait(120)) == (0, 0), host.log("collector")
    assert (host.out / "trace.json").exists()
    for rank in range(2):
        assert_replica_is_whole(host.out, rank, 3)
    assert not host.folder.exists()
    assert host.out.stat().st_mode & 0o777 == 0o700


def test_companions_started_after_the_ranks_ended_find_everything(hosts):
    host = hosts()
    ranks = [host.rank(rank) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    relay, collector = host.relay(), host.collector()
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    for rank in range(2):
        assert_replica_is_whole(host.out, rank, 3)


@pytest.mark.parametrize("seed", [0, *(soak(seed) for seed in range(1, 20))])
def test_rank_relay_and_collector_killed_at_random_lose_and_double_nothing(hosts, seed):
    chosen = random.Random(seed)
    host = hosts()
    companions = {
        "collector": host.collector(drain_seconds=30.0),
        "relay": host.relay(),
    }
    well = host.rank(0, batches=30, pause_ms=40)
    killed = host.rank(1, batches=900, pause_ms=3, hangs=True)  # it lives until it is killed
    assert has_arrived(host, 1)
    deaths = ["rank", *chosen.choices(["collector", "relay"], k=5)]
    chosen.shuffle(deaths)
    for name in deaths:
        time.sleep(chosen.uniform(0.01, 0.3))
        if name == "rank":
            killed.kill()
            killed.wait()
        elif companions[name].poll() is None and well.poll() is None:
            companions[name].kill()
            companions[name].wait()
            companions[name] = getattr(host, name)(
                **({"drain_seconds": 30.0} if name == "collector" else {})
            )
    assert well.wait(120) == 0
    mark_job_over(host.folder)
    assert companions["collector"].wait(120) == 0, host.log("collector")
    assert companions["relay"].wait(120) == 0, host.log("relay")
    assert_replica_is_whole(host.out, 0, 30)
    path = replica_path(host.out, stream(1))
    _, values = open_replica(path).values()
    assert values["sequence"].tolist() == [*range(1, len(values) + 1)]
    assert len(values) >= host.confirmed(1) > 0
    ranks = json.loads((host.out / "trace.json").read_text())["completeness"]["ranks"]
    assert [(rank["rank"], rank["end"]) for rank in ranks] == [(0, "exit"), (1, "lost")]
    assert all(rank["committed"] == rank["received"] for rank in ranks)
    assert ranks[1]["received"] == path.stat().st_size
    assert not host.folder.exists()


def test_a_stream_that_was_refused_stays_in_its_spool(hosts):
    host = hosts()
    collector, relay = host.collector(), host.relay()
    assert host.rank(2).wait(120) == 0
    assert wait_until(lambda: "rank 2 in a world of 2" in host.log("relay"))
    assert [rank.wait(120) for rank in (host.rank(0), host.rank(1))] == [0, 0]
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    (found,) = [one for one in find_streams([host.folder]) if one.stream == stream(2)]
    assert numbers_in(bytes(found.data))


def test_steps_that_a_full_spool_dropped_are_counted_and_named(hosts):
    host = hosts(world_size=1)
    assert host.rank(0, batches=50, limit_bytes=512 << 10).wait(120) == 0
    collector, relay = host.collector(), host.relay()
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    completeness = json.loads((host.out / "trace.json").read_text())["completeness"]
    (rank,) = completeness["ranks"]
    assert completeness["complete"] is False
    assert (rank["end"], rank["committed"]) == ("exit", rank["received"])
    assert rank["dropped"] == sum(gap["records"] for gap in rank["gaps"]) > 0
    assert rank["gaps"][-1]["last_step"] == 49
    said = verify(host.out)
    assert "spool full: train steps" in said
    assert "incomplete" in said


def test_a_killed_rank_keeps_what_it_committed_and_is_called_lost(hosts):
    host = hosts()
    collector, relay = host.collector(drain_seconds=30.0), host.relay()
    well, killed = host.rank(0), host.rank(1, hangs=True)
    assert killed.stdout.readline() == "written\n"
    killed.kill()
    assert well.wait(120) == 0
    assert wait_until(lambda: read_end(replica_path(host.out, stream(1))))
    assert collector.poll() is None  # a further incarnation may come
    mark_job_over(host.folder)
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    end = read_end(replica_path(host.out, stream(1)))
    path = replica_path(host.out, stream(1))
    assert (end.end, end.committed) == (EndReason.LOST, path.stat().st_size)
    numbers = numbers_in(path.read_bytes())
    assert sorted(set(numbers)) == list(range(1, 301))
    document = json.loads((host.out / "trace.json").read_text())
    assert json.dumps(document).count("lost")


def test_a_rank_that_comes_back_in_its_next_incarnation_completes_the_run(hosts):
    host = hosts()
    collector, relay = host.collector(drain_seconds=30.0), host.relay()
    first = host.rank(1, hangs=True)
    assert first.stdout.readline() == "written\n"
    first.kill()
    assert host.rank(0).wait(120) == 0
    assert wait_until(lambda: read_end(replica_path(host.out, stream(1))))
    assert host.rank(1, incarnation=1).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    assert_replica_is_whole(host.out, 1, 3, incarnation=1)
    assert read_end(replica_path(host.out, stream(1))).end is EndReason.LOST


def test_ranks_that_never_came_are_waited_for_no_longer_than_the_drain_time(hosts):
    host = hosts(world_size=3)
    collector, relay = host.collector(drain_seconds=1.0), host.relay()
    assert host.rank(0).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    assert (host.out / "trace.json").exists()


def test_a_collector_asked_to_stop_finishes_with_what_is_there(hosts):
    host = hosts()
    collector, relay = host.collector(), host.relay()
    rank = host.rank(0, hangs=True)
    assert rank.stdout.readline() == "written\n"
    assert has_arrived(host, 0)
    collector.send_signal(signal.SIGINT)  # the terminal's Ctrl-C is for the ranks
    time.sleep(0.2)
    assert collector.poll() is None
    collector.send_signal(signal.SIGTERM)
    assert collector.wait(120) == 0
    assert (host.out / "trace.json").exists()
    assert relay.wait(120) == 0
    assert host.folder.exists()  # the rank still writes: its spool stays


def test_a_spool_smaller_than_the_run_is_freed_while_it_is_shipped(hosts):
    host = hosts(world_size=1)
    collector, relay = host.collector(), host.relay()
    assert host.rank(0, batches=100, pause_ms=20, limit_bytes=2 << 20).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    path = replica_path(host.out, stream(0))
    assert path.stat().st_size > 3 << 20
    found = open_replica(path)
    assert found.committed_bytes == path.stat().st_size
    if not len(found.columns(RecordKind.GAP)[1]):
        assert_replica_is_whole(host.out, 0, 100)


def test_two_hosts_ship_over_loopback_to_one_collector(hosts):
    address = f"tcp://127.0.0.1:{free_port()}"
    head, other = hosts("head", address=address), hosts("other", address=address)
    collector = head.collector()
    relays = [head.relay(), other.relay()]
    ranks = [head.rank(0), other.rank(1)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [collector.wait(120), *(relay.wait(120) for relay in relays)] == [0, 0, 0]
    for rank in range(2):
        assert_replica_is_whole(head.out, rank, 3)


def test_in_a_shared_folder_each_relay_writes_and_the_collector_only_finishes(hosts):
    head, other = hosts("head", address=SHARED), hosts("other", address=SHARED)
    collector = head.collector()
    relays = [head.relay(), other.relay()]
    ranks = [head.rank(0, batches=20, pause_ms=20), other.rank(1, batches=20, pause_ms=20)]
    assert has_arrived(other, 1)
    relays[1].kill()
    relays[1].wait()
    relays[1] = other.relay()
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [collector.wait(120), *(relay.wait(120) for relay in relays)] == [0, 0, 0]
    for rank in range(2):
        assert_replica_is_whole(head.out, rank, 20)


def test_tcp_without_keys_is_refused_with_the_ways_out(hosts):
    host = hosts()
    assert host.collector(address=f"tcp://127.0.0.1:{free_port()}").wait(120) == 2
    log = host.log("collector")
    assert "--rs-keys" in log
    assert "--rs-collector shared" in log
