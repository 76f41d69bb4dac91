"""What stands between a relay and its collector, and does to the bytes what networks do."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from pathlib import Path

from tests.ports import free_port

__all__ = ["Proxy", "addresses"]

_CHUNK = 16384
_TIMEOUT_S = 0.1


def addresses(folder: Path, transport: str) -> tuple[str, str]:
    """Return where a proxy listens, and where the collector behind it does: `proxied` on Unix
    sockets, `keyed` on TCP, which has keys."""
    if transport == "keyed":
        return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    return f"ipc://{folder / 'front.sock'}", f"ipc://{folder / 'back.sock'}"


def _family_and_place(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.AF_INET, (host, int(port))
    return socket.AF_UNIX, address.removeprefix("ipc://")


class Proxy:
    """Passes on what both sides send, and spoils it while told to."""

    def __init__(self, front: str, back: str, seed: int) -> None:
        self._back = _family_and_place(back)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_closed = False
        self.spoils: set[str] = set()
        """What is being done: `refuse`, `stall`, `truncate`, `duplicate`, `flip`."""
        self.spoiled = 0
        """How often bytes were changed, cut or sent twice."""
        family, place = _family_and_place(front)
        self._listener = socket.socket(family)
        self._listener.bind(place)
        self._listener.listen(16)
        self._listener.settimeout(_TIMEOUT_S)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection, as a router that forgot them does."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for one in (one for pair in pairs for one in pair):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            family, place = self._back
            server = socket.socket(family)
            try:
                if "refuse" in self.spoils:
                    raise OSError("refused")
                server.connect(place)
            except OSError:
                client.close()
                server.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            for one, other in ((client, server), (server, client)):
                one.settimeout(_TIMEOUT_S)
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._is_closed:
                if "stall" in self.spoils:
                    time.sleep(0.01)
                    continue
                try:
                    data = one.recv(_CHUNK)
                except TimeoutError:
                    continue
                if not data or not self._deliver(other, data):
                    break
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _deliver(self, other: socket.socket, data: bytes) -> bool:
        """Send a chunk, spoiled or not; False where the connection ends with it."""
        ways = self.spoils & {"truncate", "duplicate", "flip"}
        way = ""
        with self._lock:
            if ways and self._random.random() < 0.2:
                way = self._random.choice(sorted(ways))
                at = self._random.randrange(len(data))
                bit = 1 << self._random.randrange(8)
                self.spoiled += 1
        if way == "truncate":
            _send(other, data[:at])
            return False
        if way == "flip":
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        _send(other, data * 2 if way == "duplicate" else data)
        return True


def _send(other: socket.socket, data: bytes) -> None:
    """Send all of it; a reader that does not read may take as long as it likes."""
    view = memoryview(data)
    while view:
        with contextlib.suppress(TimeoutError):
            view = view[other.send(view) :]
