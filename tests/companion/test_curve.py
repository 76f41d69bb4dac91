"""CurveKeys on TCP: who has none, or others, gets nothing, sends nothing and frees nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from rankscope.companion.collector import Intake
from rankscope.companion.curve import Admission, Handshake, handshake_trouble, new_keys
from rankscope.companion.links import SocketLink
from rankscope.companion.protocol import PROTOCOL_VERSION, Hello, encode
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import KeysError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.connection import CurveKeys, read_keys, relays_file
from rankscope.run.folders import RunHeader, stream_folder
from rankscope.spool.writer import SpoolWriter
from tests.keyed import key_file
from tests.ports import free_port
from tests.spool.streams import rank_definition
from tests.waiting import wait_until

STREAM = StreamId(rank=0, incarnation=0)
Dealers = Callable[..., "zmq.Socket[bytes]"]


def ours() -> CurveKeys:
    """Both secret keys, as nobody but a test has them."""
    relay = read_keys(relays_file(key_file()), is_collector=False)
    return replace(read_keys(key_file(), is_collector=True), relay_secret=relay.relay_secret)


@pytest.fixture
def intake(tmp_path: Path) -> Iterator[Intake]:
    """A collector that listens on TCP."""
    made = Intake(tmp_path / "out", ["tcp://127.0.0.1:*"], world_size=1, keys=ours())
    yield made
    made.close()


@pytest.fixture
def dealer() -> Iterator[Dealers]:
    """Make a socket with some keys."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(**options: str) -> zmq.Socket[bytes]:
        found = context.socket(zmq.DEALER)
        found.setsockopt(zmq.LINGER, 0)
        for name, key in options.items():
            found.setsockopt(getattr(zmq, f"CURVE_{name.upper()}"), key.encode())
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()
    context.term()


def as_relay(keys: CurveKeys) -> dict[str, str]:
    """Return the options of a relay's socket."""
    return {
        "serverkey": keys.collector_public,
        "publickey": keys.relay_public,
        "secretkey": keys.relay_secret,
    }


def say_hello(who: zmq.Socket[bytes], intake: Intake, seconds: float = 1.0) -> None:
    """Say what a relay of the run says first, over and over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for message in (Hello(PROTOCOL_VERSION, "host", "run"), HostState(job=JobState.OVER)):
            with contextlib.suppress(zmq.Again):
                who.send_multipart(encode(message), zmq.DONTWAIT)
        intake.work(0.02)


def test_a_relay_with_the_keys_is_taken(intake: Intake, dealer: Dealers) -> None:
    friend = dealer(**as_relay(ours()))
    friend.connect(intake.addresses[0])
    assert wait_until(lambda: say_hello(friend, intake, 0.05) or intake.peers())


@pytest.mark.parametrize("who", ["no keys", "own keys", "the collector's keys", "other collector"])
def test_nobody_else_gets_a_word_in(
    intake: Intake, dealer: Dealers, who: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys, other = ours(), new_keys()
    options = {
        "no keys": {},
        # the public keys are no secret
        "own keys": as_relay(replace(other, collector_public=keys.collector_public)),
        # stole the collector's file
        "the collector's keys": {
            "serverkey": keys.collector_public,
            "publickey": keys.collector_public,
            "secretkey": keys.collector_secret,
        },
        # takes this for another collector
        "other collector": as_relay(replace(keys, collector_public=other.collector_public)),
    }[who]
    stranger = dealer(**options)
    stranger.connect(intake.addresses[0])
    say_hello(stranger, intake)
    assert not intake.peers() and not intake.streams()
    assert intake.has_refused_keys
    assert "turned a connection away: " in capfd.readouterr().err


def test_strangers_are_logged_and_not_for_ever(
    intake: Intake, dealer: Dealers, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(14):
        stranger = dealer(**as_relay(replace(new_keys(), collector_public=ours().collector_public)))
        stranger.connect(intake.addresses[0])
    say_hello(stranger, intake, 2.0)
    assert capfd.readouterr().err.count("its key is not the relay key of this run") == 10


def test_what_a_relay_said_once_is_worth_nothing_the_second_time(
    intake: Intake, dealer: Dealers
) -> None:
    """Somebody on the way notes every byte of a relay, and says all of them again."""
    port = int(intake.addresses[0].rpartition(":")[2])
    noted = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry() -> None:
            caller, _ = listener.accept()
            with caller, socket.create_connection(("127.0.0.1", port)) as collector:
                for each in (caller, collector):
                    each.settimeout(0.02)
                end = time.monotonic() + 2.5
                while time.monotonic() < end:
                    for source, target in ((caller, collector), (collector, caller)):
                        with contextlib.suppress(TimeoutError):
                            said = source.recv(1 << 16)
                            target.sendall(said)
                            if source is caller:
                                noted.extend(said)

        carrier = threading.Thread(target=carry)
        carrier.start()
        relay = dealer(**as_relay(ours()))
        relay.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        say_hello(relay, intake, 2.0)
        carrier.join(10)
    while intake.peers()[0].silent_s < 0.5:
        intake.work(0.1)
    assert len(intake.peers()) == 1 and len(noted) > 500
    with socket.create_connection(("127.0.0.1", port)) as again:
        for first in range(0, len(noted), 512):
            with contextlib.suppress(OSError):  # closed at the first wrong word
                again.sendall(noted[first : first + 512])
            intake.work(0.01)
        intake.work(0.3)
    (peer,) = intake.peers()
    assert peer.silent_s > 0.5, "the replayed words would have been heard"


def test_a_false_collector_gets_no_record_and_frees_none(tmp_path: Path) -> None:
    """It listens where the collector should, and has all but its secret key."""
    writer = SpoolWriter(stream_folder(tmp_path, STREAM), limit_bytes=1 << 20)
    writer.define(rank_definition(0, pid=1))
    writer.close(EndReason.EXIT)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.cells")}
    context = zmq.Context()
    false = context.socket(zmq.ROUTER)
    false.setsockopt(zmq.LINGER, 0)
    would_let_in = replace(new_keys(), relay_public=ours().relay_public)
    admission = Admission(false, would_let_in)
    port = false.bind_to_random_port("tcp://127.0.0.1")
    header = RunHeader(
        run_id="run",
        out=tmp_path / "out",
        collector=f"tcp://127.0.0.1:{port}",
        world_size=1,
        settings={"keys": str(relays_file(key_file()))},
    )
    link = SocketLink(header, "here")
    shipments = {STREAM: Shipment(tmp_path, STREAM)}
    try:
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            link.exchange(shipments, time.monotonic(), JobState.OVER)
            assert not false.poll(20)
        assert "has other keys, or none" in link.strangeness
        assert link.heard_at == float("-inf")
        assert before and {path: path.read_bytes() for path in before} == before
    finally:
        link.close()
        for shipment in shipments.values():
            shipment.reader.close()
        admission.close()
        false.close()
        context.term()


def test_a_relay_finds_its_collector_after_a_false_one_and_after_one_that_refused_it(
    tmp_path: Path, dealer: Dealers
) -> None:
    keys, port = ours(), free_port()
    refusing = replace(keys, relay_public=new_keys().relay_public)
    handshake = Handshake(dealer(), f"tcp://127.0.0.1:{port}", keys)

    def is_done() -> bool:
        handshake.look(time.monotonic())
        return handshake.is_done

    try:
        for name, owner, said in (
            ("false", new_keys(), "other keys, or none"),
            ("refusing", refusing, "does not know the relay key"),
            ("own", keys, ""),
        ):
            intake = Intake(tmp_path / name, [f"tcp://127.0.0.1:{port}"], world_size=1, keys=owner)
            assert wait_until(lambda: is_done() or (said and said in handshake.trouble))  # noqa: B023
            assert handshake.is_done == (not said)
            intake.close()
        assert handshake.trouble == ""
    finally:
        handshake.close()


def test_a_pair_that_is_none_is_refused(tmp_path: Path) -> None:
    keys, other = ours(), new_keys()
    with pytest.raises(KeysError, match="does not belong"):
        handshake_trouble(
            "tcp://127.0.0.1:1", replace(keys, relay_public=other.relay_public), seconds=0.1
        )
    with pytest.raises(KeysError, match="does not belong"):
        Intake(
            tmp_path / "out",
            ["tcp://127.0.0.1:*"],
            world_size=1,
            keys=replace(keys, collector_public=other.collector_public),
        )
