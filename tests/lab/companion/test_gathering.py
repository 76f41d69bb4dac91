"""Whole jobs of real processes: companions that come late, are suspended, refused or cut off."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from rankscope.companion.protocol import Ended, OpenStream
from rankscope.companion.shipping import Shipment
from rankscope.record.ranks import EndReason
from rankscope.run.folders import SHARED, mark_job_over, stream_folder
from rankscope.run.processes import ExitOutcome, companion_command
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.replicas import read_end, replica_path
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.sources import find_streams
from tests import forked
from tests.companion.jobs import environment
from tests.companion.test_gathering import assert_replica_is_whole, has_arrived, stream
from tests.ports import free_port, has_ipv6
from tests.spool.streams import enter, rank_definition
from tests.spool.test_interruption import numbers_in
from tests.waiting import wait_until


def test_a_collector_that_comes_when_the_tree_is_there_leaves_no_trace_of_itself(hosts):
    """As one that a second rank started, which came to run only after the job was over."""
    host = hosts(world_size=1)
    host.out.mkdir()
    (host.out / "trace.json").write_text("{}")
    late, relay = host.collector(), host.relay()
    assert late.wait(120) == 0
    assert {path.name for path in host.out.iterdir()} == {"trace.json"}
    relay.kill()


def test_a_companion_that_comes_when_the_run_folder_is_gone_does_not_make_it_anew(hosts):
    host = hosts(world_size=1)
    host.out.mkdir()
    (host.out / "trace.json").write_text("{}")
    shutil.rmtree(host.folder)
    command = companion_command(host.folder)
    assert forked.run(command, env=environment()).returncode == ExitOutcome.REFUSED
    assert not host.folder.exists()
    assert {path.name for path in host.out.iterdir()} == {"trace.json"}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_job_is_gathered_over_ipv6(hosts):
    host = hosts(address=f"tcp://[::1]:{free_port()}", world_size=1)
    collector, relay = host.collector(), host.relay()
    assert host.rank(0).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    assert_replica_is_whole(host.out, 0, 3)


def test_a_relay_of_another_run_is_turned_away_and_keeps_its_records(hosts):
    """As where a collector was started anew on a port for which an old relay still looks."""
    address = f"tcp://127.0.0.1:{free_port()}"
    host, old = hosts("host", address=address), hosts("old", address=address, run_id="old")
    collector, relay = host.collector(drain_seconds=30.0), host.relay()
    assert host.rank(0).wait(120) == 0
    assert wait_until(lambda: read_end(replica_path(host.out, stream(0))))
    assert old.rank(1).wait(120) == 0
    assert old.relay().wait(120) == ExitOutcome.REJECTED
    assert "this collector gathers another run" in old.log("relay")
    assert "run test" not in old.log("relay"), "a stranger does not learn the id"
    assert "gathers run test, and takes nothing of run old" in host.log("collector")
    assert f"the records of this host stay in {old.folder}" in old.log("relay")
    assert host.log("collector").count("was turned away") == 1
    assert host.rank(1).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    for rank in range(2):
        assert_replica_is_whole(host.out, rank, 3)
    (found,) = find_streams([old.folder])
    assert numbers_in(bytes(found.data))


def test_in_a_shared_folder_that_an_unfinished_run_left_another_run_writes_nothing(hosts):
    first = hosts("first", address=SHARED)
    relay = first.relay()
    assert first.rank(0).wait(120) == 0
    assert wait_until(lambda: read_end(replica_path(first.out, stream(0))))
    before = replica_path(first.out, stream(0)).read_bytes()
    second = hosts("second", address=SHARED, run_id="second")
    assert second.rank(0, batches=5).wait(120) == 0
    assert second.relay().wait(120) == ExitOutcome.REJECTED
    assert replica_path(first.out, stream(0)).read_bytes() == before
    assert second.folder.exists()
    relay.kill()


def test_a_relay_that_was_killed_while_the_tree_was_built_cleans_up_all_the_same(hosts):
    host = hosts()
    collector, relay = host.collector(), host.relay()
    assert wait_until(lambda: "relaying run" in host.log("relay"))
    collector.send_signal(signal.SIGSTOP)  # so that no Done reaches the relay before the copy
    ranks = [host.rank(rank) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    no_sockets = shutil.ignore_patterns("*.sock")
    shutil.copytree(host.folder, host.folder.with_name("copy"), ignore=no_sockets)
    collector.send_signal(signal.SIGCONT)
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    host.folder.with_name("copy").rename(host.folder)
    assert host.relay().wait(120) == 0
    assert not host.folder.exists()


@pytest.mark.soak
def test_relay_and_collector_need_no_more_memory_for_millions_of_records(hosts):
    host = hosts(world_size=1)
    companions = [host.collector(), host.relay()]
    rank = host.rank(0, batches=10_000, pause_ms=1, hangs=True)

    def resident() -> list[int]:
        return [
            int(Path(f"/proc/{one.pid}/statm").read_text().split()[1]) * 4 for one in companions
        ]

    assert wait_until(lambda: host.confirmed(0) > 100_000, 300)
    early = resident()
    assert rank.stdout.readline() == "written\n"
    late = resident()
    assert host.confirmed(0) == 1_000_000  # calls, each with a value
    assert all(end < begin + 4096 for begin, end in zip(early, late)), (early, late)


def test_when_relays_vanish_for_good_the_tree_is_built_from_what_arrived(hosts):
    host = hosts()
    collector, relay = host.collector(drain_seconds=1.0), host.relay()
    rank = host.rank(0, hangs=True)
    assert rank.stdout.readline() == "written\n"
    assert has_arrived(host, 0)
    relay.kill()
    assert collector.wait(120) == 0
    assert (host.out / "trace.json").exists()


def test_a_collector_that_was_suspended_does_not_blame_the_relays_for_its_own_silence(hosts):
    host = hosts()
    collector, relay = host.collector(drain_seconds=1.0), host.relay()
    ranks = [host.rank(rank, batches=30, pause_ms=100) for rank in range(2)]
    assert has_arrived(host, 0)
    assert has_arrived(host, 1)
    collector.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    collector.send_signal(signal.SIGCONT)
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    for rank in range(2):
        assert_replica_is_whole(host.out, rank, 30)


def test_a_second_collector_on_a_folder_and_a_second_relay_are_refused(hosts):
    host = hosts()
    host.collector()
    assert wait_until(host.is_listened_to)
    assert host.collector().wait(120) == 2
    assert "another collector is at work there" in host.log("collector")
    host.relay()
    assert wait_until(lambda: "relaying run" in host.log("relay"))
    assert host.relay().wait(120) == 2
    assert "another companion is at work there" in host.log("relay")


@pytest.fixture
def room_for(tmp_path):
    """Mount a disk at a folder, or change one: `room_for(folder, files)`, the folder included."""
    mounted = []

    def change(folder, files):
        options = f"nr_inodes={files},mode=700{',remount' if folder in mounted else ''}"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("only root may mount a small disk")
        mounted.append(folder)

    yield change
    for folder in set(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("files", [1, 2], ids=["its-lock", "its-folder"])
def test_a_collector_that_cannot_start_because_the_disk_is_full_says_so_by_its_exit_code(
    files, hosts, room_for
):
    host = hosts()
    host.out.mkdir()
    room_for(host.out, 100)
    command = host.collecting()
    room_for(host.out, 1 + files)  # with what says how it is to gather
    assert host.start(command, "collector").wait(120) == ExitOutcome.NO_ROOM
    assert "cannot be made: No space left on device" in host.log("collector")
    room_for(host.out, 100)
    (host.out / "spool").mkdir(exist_ok=True)
    (host.out / "spool").rmdir()
    (host.out / "spool").touch()  # whatever else keeps it from starting has another code
    assert host.collector().wait(120) == ExitOutcome.REFUSED


def test_in_a_shared_folder_an_end_that_the_disk_does_not_take_is_told_once_there_is_room(
    hosts, room_for
):
    host = hosts(address=SHARED, world_size=1)
    host.out.mkdir()
    room_for(host.out, 6)  # itself, spool/, the run, the host's state, a replica and whose it is
    relay = host.relay()
    assert host.rank(0).wait(120) == 0
    assert wait_until(lambda: "rank00000.0.json: cannot be written" in host.log("relay"))
    room_for(host.out, 100)
    assert (host.collector().wait(120), relay.wait(120)) == (0, 0)
    assert_replica_is_whole(host.out, 0, 3)
    assert not host.folder.exists()


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "sockets"])
def test_a_node_that_was_replaced_has_a_life_of_its_own_beside_the_dead_ones(hosts, is_shared):
    """The replacement starts the same rank in the same life, with a spool that knows of no other;
    its segments are freed while it is shipped, and its relay is killed on the way.
    """
    address = SHARED if is_shared else f"tcp://127.0.0.1:{free_port()}"
    head, dead, new = (hosts(name, address=address) for name in ("head", "dead", "new"))
    collector = head.collector(drain_seconds=30.0)
    relays = [head.relay(), dead.relay()]
    assert head.rank(0).wait(120) == 0
    killed = dead.rank(1, batches=7, hangs=True)
    assert killed.stdout.readline() == "written\n"
    place = replica_path(head.out, stream(1))
    assert wait_until(lambda: place.exists() and 700 in numbers_in(place.read_bytes()))
    for process in (relays[1], killed):
        process.kill()
        process.wait()
    before = place.read_bytes()
    relay = new.relay()
    replacement = new.rank(1, batches=40, pause_ms=20, limit_bytes=4 << 20)
    assert wait_until(lambda: replica_path(head.out, stream(1, 1)).exists())
    relay.kill()
    relay.wait()
    relay = new.relay()
    assert replacement.wait(120) == 0
    assert wait_until(lambda: read_end(replica_path(head.out, stream(1, 1))))
    for host in (head, new):
        mark_job_over(host.folder)
    assert dead.relay().wait(120) == 0
    assert [collector.wait(120), relays[0].wait(120), relay.wait(120)] == [0, 0, 0]
    assert_replica_is_whole(head.out, 1, 40, incarnation=1)
    assert place.read_bytes() == before
    lives = json.loads((head.out / "trace.json").read_text())["completeness"]["ranks"]
    assert [(one["rank"], one["incarnation"], one["end"]) for one in lives] == [
        (0, 0, "exit"), (1, 0, "lost"), (1, 1, "exit")
    ]  # fmt: skip
    assert all(one["committed"] == one["received"] for one in lives)
    assert not new.folder.exists()
    assert not dead.folder.exists()


def test_a_rank_that_closed_every_descriptor_is_alive_and_its_own_files_stay_open(hosts):
    """As a program that makes a daemon of itself does: the lock goes with its descriptor."""
    host = hosts(world_size=1)
    collector, relay = host.collector(drain_seconds=0.0), host.relay()
    rank = host.rank(0, batches=20, pause_ms=100, limit_bytes=1 << 20, closes=True)
    assert rank.wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    (state,) = json.loads((host.out / "trace.json").read_text())["completeness"]["ranks"]
    assert (state["end"], state["committed"]) == ("exit", state["received"])
    assert read_end(replica_path(host.out, stream(0))).end is EndReason.EXIT
    assert not host.folder.exists()


def test_a_spool_that_grew_behind_its_end_is_not_removed(tmp_path):
    """Whoever called the rank lost may have been wrong: what nobody else has must stay."""
    writer = SpoolWriter(stream_folder(tmp_path, stream(0)), limit_bytes=1 << 20)
    writer.define(rank_definition())
    writer._lock.release()  # as the kernel does when the process ends
    shipment = Shipment(tmp_path, stream(0))
    assert isinstance(shipment.next_message(0.0, 1 << 20), OpenStream)
    shipment.take_offset(writer.committed_bytes, 0.0)
    assert isinstance(shipment.next_message(0.0, 1 << 20), Ended)
    shipment.take_end_seen()
    assert shipment.is_delivered()
    writer.write(RecordKind.ENTER, enter(1))
    assert not shipment.is_delivered()


@pytest.mark.parametrize("way", ["socket", SHARED])
def test_a_host_that_died_is_not_waited_for_when_the_others_are_through(hosts, way):
    """Its ranks and its relay are gone without a word; the other host's relay goes on beating."""
    address = SHARED if way == SHARED else f"ipc://{tempfile.mkdtemp()}/c"
    well, dead = hosts("well", address=address), hosts("dead", address=address)
    collector = well.collector(drain_seconds=1.0)
    relays = [well.relay(), dead.relay()]
    dying = dead.rank(1, hangs=True)
    assert has_arrived(well, 1)
    assert well.rank(0).wait(120) == 0
    for process in (relays[1], dying):
        process.kill()
        process.wait()
    mark_job_over(well.folder)
    assert (collector.wait(120), relays[0].wait(120)) == (0, 0), well.log("collector")
    ranks = json.loads((well.out / "trace.json").read_text())["completeness"]["ranks"]
    assert [(rank["rank"], rank["end"]) for rank in ranks] == [(0, "exit"), (1, "running")]
    assert dead.folder.exists()


def test_a_relay_that_read_garbage_connects_again(hosts, tmp_path):
    """libzmq lets go of an address for good where what comes from there is no message."""
    folder = Path(tempfile.mkdtemp())
    host = hosts(world_size=1, address=f"ipc://{folder}/c")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"{folder}/c")
        stranger.listen()
        stranger.settimeout(60)
        relay = host.relay()
        connection, _ = stranger.accept()
        connection.sendall(greeting + b"\xff" * 64)
        while connection.recv(4096):  # until it hangs up
            pass
        connection.close()
    os.unlink(f"{folder}/c")
    collector = host.collector()
    assert host.rank(0).wait(120) == 0
    assert (collector.wait(120), relay.wait(120)) == (0, 0)
    assert_replica_is_whole(host.out, 0, 3)
