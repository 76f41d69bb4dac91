"""Keys on TCP sockets: both sides prove who they are before one byte of a record goes over.

A collector takes a connection only from who holds the relay key of its file (ZAP), a relay only to
who holds the collector's secret key. Everything is encrypted (CURVE, ZeroMQ RFC 26).
"""

from __future__ import annotations

import time
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from rankscope.errors import KeysError
from rankscope.run.connection import CurveKeys, is_ipv6
from rankscope.run.messages import FewLines, log

_DOMAIN: Final = b"rankscope"
_MOST_LOGGED: Final = 10
_FAILURES: Final[dict[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the collector does not know the relay key of this file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "who listens there has other keys, or none",
    # a forwarder with no collector behind it closes the connection too
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "who listens there has other keys, or none, or closed "
    "the connection",
}
_TRIED_AGAIN_S: Final = 2.0


def new_keys() -> CurveKeys:
    """Return keys that nobody has."""
    collector, relay = zmq.curve_keypair(), zmq.curve_keypair()
    return CurveKeys(
        collector_public=collector[0].decode(),
        collector_secret=collector[1].decode(),
        relay_public=relay[0].decode(),
        relay_secret=relay[1].decode(),
    )


class Admission:
    """Has a collector's socket take connections of this run's relays alone."""

    def __init__(self, socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
        """Set up what the socket is bound to from here on; raise KeysError for no pair of keys."""
        _check_pair(keys.collector_public, keys.collector_secret, "collector")
        self._relay_public = keys.relay_public.encode()
        # ZAP: CURVE alone proves that a peer has some key, and lets every key in
        self._authenticator = ThreadAuthenticator(socket.context)
        self._authenticator.configure_curve_callback(_DOMAIN.decode(), self)
        self._authenticator.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.collector_public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.collector_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # should the one who is asked be gone, everybody is refused: libzmq lets all in otherwise
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket = socket
        self._events = socket.get_monitor_socket(sum(_FAILURES))
        self._refused = FewLines(_MOST_LOGGED)

    @property
    def refused(self) -> int:
        """How many connections were turned away."""
        return self._refused.count

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether a connection with this public key is taken (of pyzmq's protocol)."""
        return key == self._relay_public

    def look(self) -> None:
        """Log the first connections that were turned away since the last look."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            why = "it has other keys, or none"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = "its key is not the relay key of this run"
            self._refused.log(f"turned a connection away: {why}")

    def close(self) -> None:
        """Let nobody in any more; before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(0)
        self._authenticator.stop()


class Handshake:
    """Connects a relay's socket with keys, again and again, and says why that fails: libzmq gives
    up for good where a collector refuses a key, and tries another one thirty times a second."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, keys: CurveKeys) -> None:
        """Connect, which never waits; raise KeysError for no pair of keys."""
        _check_pair(keys.relay_public, keys.relay_secret, "relay")
        socket.setsockopt(zmq.IPV6, is_ipv6(address))
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.collector_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.relay_public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.relay_secret.encode())
        self._socket, self._address = socket, address
        self._events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED + sum(_FAILURES))
        self._due_at = float("inf")
        self.is_done = False
        self.trouble = ""
        socket.connect(address)

    def look(self, now: float) -> None:
        """See how it went; try once more where it failed a while ago."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_done, self.trouble = True, ""
                continue
            self.is_done = False
            trouble = f"{self._address}: {_FAILURES[event]}"
            if trouble != self.trouble:
                log(trouble)
            self.trouble = trouble
            if self._due_at == float("inf"):
                self._socket.disconnect(self._address)
                self._due_at = now + _TRIED_AGAIN_S
        if now >= self._due_at:
            self._due_at = float("inf")
            self._socket.connect(self._address)

    def close(self) -> None:
        """Look no more; before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(0)


def handshake_trouble(address: str, keys: CurveKeys, seconds: float) -> str:
    """Return why a relay with these keys is not taken, "" where it is, or raise KeysError."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    handshake = Handshake(socket, address, keys)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and not (handshake.is_done or handshake.trouble):
            time.sleep(0.01)
            handshake.look(time.monotonic())
        return "" if handshake.is_done else handshake.trouble or f"{address}: no answer"
    finally:
        handshake.close()
        socket.close()
        context.term()


def _check_pair(public: str, secret: str, whose: str) -> None:
    try:
        is_pair = bool(secret) and zmq.curve_public(secret.encode()) == public.encode()
    except (ValueError, zmq.ZMQError):
        is_pair = False
    if not is_pair:
        raise KeysError(
            f"the {whose}'s secret key does not belong to its public one",
            "make new keys: rankscope keys new FILE",
        )
