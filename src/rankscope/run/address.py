"""Which addresses may be listened on and connected to: sockets of this host, and TCP with keys."""

from __future__ import annotations

import os
import re

from rankscope.errors import BindError

_LONGEST_IPC_PATH = 107
"""Bytes of a Unix socket's path, its terminating zero left out."""
_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d{1,5}|\*)")


def is_tcp(address: str) -> bool:
    """True for an address that others than this user may reach."""
    return address.startswith("tcp://")


def is_ipv6(address: str) -> bool:
    """True for a literal IPv6 address; of a name the resolver decides, and may name IPv4."""
    return address.startswith("tcp://[")


def check_address(address: str, *, has_keys: bool) -> str:
    """Return the address, `tcp://HOST:PORT` or `ipc:///path`, if it may be used; raise BindError
    where it is malformed, an ipc path is too long, or it is TCP without keys: then any process that
    reaches the port could write into the trace, on this host alone too."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise BindError(f"{address}: write an ipc address with an absolute path")
        if len(os.fsencode(path)) > _LONGEST_IPC_PATH:
            raise BindError(
                f"{address}: a socket path may have {_LONGEST_IPC_PATH} bytes, this one has "
                f"{len(os.fsencode(path))}; choose a shorter folder with --rs-spool"
            )
        return address
    found = _TCP.fullmatch(address)
    if not found or (found[2] != "*" and int(found[2]) > 65535):
        raise BindError(f"{address}: expected ipc:///path or tcp://HOST:PORT")
    if not has_keys:
        raise BindError(
            f"{address}: TCP needs keys, else anybody who reaches the port writes into the trace: "
            f"make them with `rankscope keys new FILE`, give FILE to the collector (--keys) and "
            f"FILE.relay to the job (--rs-keys). Without keys: ipc:///path on one host, or a trace "
            f"folder that every host sees (--rs-collector shared)"
        )
    return address
