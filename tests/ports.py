"""Ports of the loopback for processes that bind them later."""

from __future__ import annotations

import random
import socket

LOWEST_EPHEMERAL = 32768
"""From here up Linux gives ports to whoever asks for any: meanwhile to another test."""


def free_port() -> str:
    """Return a port that nobody listens on and that no socket is given unasked."""
    for _ in range(100):
        port = random.SystemRandom().randrange(15_000, LOWEST_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise RuntimeError("no free port below the ephemeral ones in 100 tries")


def has_ipv6() -> bool:
    """True where the loopback has an IPv6 address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
