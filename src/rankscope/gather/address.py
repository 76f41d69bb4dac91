"""Which addresses may be listened on and connected to: this host only, until there are keys."""

from __future__ import annotations

import ipaddress
import os
import re

from rankscope.errors import BindError
from rankscope.run.companions import LONGEST_IPC_PATH

__all__ = ["check_address"]

_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/]+):(\d{1,5}|\*)")


def check_address(address: str) -> str:
    """Return the address if it stays on this host.

    Raises:
        BindError: it is malformed, an ipc path is too long, or it is reachable from elsewhere.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise BindError(f"{address}: write an ipc address with an absolute path")
        if len(os.fsencode(path)) > LONGEST_IPC_PATH:
            raise BindError(
                f"{address}: a socket path may have {LONGEST_IPC_PATH} bytes, this one has "
                f"{len(os.fsencode(path))}; choose a shorter folder with --rs-spool"
            )
        return address
    found = _TCP.fullmatch(address)
    if not found or (found[2] != "*" and int(found[2]) > 65535):
        raise BindError(f"{address}: expected ipc:///path or tcp://127.0.0.1:PORT")
    if not _is_loopback(found[1].strip("[]")):
        raise BindError(
            f"{address}: would let anybody on the network write into the trace. Two ways across "
            f"hosts: keys (--rs-keys, not built yet), or a trace folder every host sees, "
            f"where each relay writes its ranks itself (--rs-collector shared)"
        )
    return address


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
