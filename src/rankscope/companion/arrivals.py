"""What arrives over a socket: its parts, and how much memory all of it may take, whoever sends it.

libzmq bounds a part of a message and counts whole messages, but keeps the parts of a message that
has not ended where nobody can see them: a peer that never ends its message fills the memory. So a
thread watches what this process occupies. Where that is more than honest peers can have on their
way, the connections are cut, and libzmq forgets what came over them. Honest peers connect again and
send what was not acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Collection

import zmq

from rankscope.companion.log import log

_LOOK_S = 0.01
_FORGET_S = 2.0
"""How long libzmq may take to let go of what came over connections that were cut."""
_SAY_AGAIN_S = 60.0
_SLACK_BYTES = 64 << 20
_BYTES_A_PEER = 1 << 20
"""What an honest peer has on its way at most: a window."""


def receive_parts(source: zmq.Socket[bytes], most: int) -> list[bytes]:
    """Return at most `most` + 1 parts of the next message; raise zmq.Again where there is none."""
    parts = [source.recv(zmq.DONTWAIT)]
    while source.getsockopt(zmq.RCVMORE):
        part = source.recv(zmq.DONTWAIT)
        if len(parts) <= most:
            parts.append(part)
    return parts


class MemoryBound:
    """Cuts the connections of some addresses while this process grows too large."""

    def __init__(self, addresses: Collection[str], peers: Callable[[], int]) -> None:
        """Watch addresses, as zmq names them, of so many peers; what is occupied now is granted."""
        self._paths = {a.removeprefix("ipc://") for a in addresses if a.startswith("ipc://")}
        self._ports = {int(a.rsplit(":", 1)[1]) for a in addresses if a.startswith("tcp://")}
        self._peers = peers
        self._memory = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._granted = self._occupied_bytes() + _SLACK_BYTES
        self._said_at = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory bound", daemon=True)
        self._thread.start()

    def _cut(self) -> None:
        """Shut down every connection by a descriptor of our own: libzmq may close its own."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.fromfd(int(name), -1, -1, -1) as one:
                    if self._is_connection(one):
                        one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()
        os.close(self._memory)

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self._is_exceeded():
                self._free()

    def _is_exceeded(self) -> bool:
        return self._occupied_bytes() > self._granted + self._peers() * _BYTES_A_PEER

    def _occupied_bytes(self) -> int:
        # through a file that stays open: descriptors may be short
        return int(os.pread(self._memory, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _free(self) -> None:
        """Cut every connection; what is occupied all the same came from elsewhere: grant it."""
        now = time.monotonic()
        if now - self._said_at > _SAY_AGAIN_S:
            self._said_at = now
            occupied = self._occupied_bytes() >> 20
            log(f"{occupied} MiB are occupied, more than relays can have sent: cut off all of them")
        deadline = now + _FORGET_S
        while self._is_exceeded():
            if time.monotonic() > deadline:
                self._granted = self._occupied_bytes() + _SLACK_BYTES
                return
            self._cut()
            if self._stopped.wait(_LOOK_S):
                return
            with contextlib.suppress(AttributeError, OSError):  # not every C library has it
                ctypes.CDLL(None).malloc_trim(0)

    def _is_connection(self, one: socket.socket) -> bool:
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        ends = (one.getsockname(), one.getpeername())
        if one.family == socket.AF_UNIX:
            return any(os.fsdecode(end) in self._paths for end in ends)
        return any(end[1] in self._ports for end in ends)
