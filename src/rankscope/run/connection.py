"""How relays reach a collector: addresses that may be used, and the keys by which both sides know
each other over TCP.

A key file holds two pairs of CURVE keys, as Z85 text: its side's own secret key and the other's
public one. Whoever steals the relays' file cannot pose as the collector, nor the other way round.
No zmq here: a rank looks at the file before it has a relay started.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope.errors import BindError, KeysError
from rankscope.run.files import new_file

_LONGEST_IPC_PATH = 107
"""Most bytes of a Unix socket's path, without its terminating zero."""
_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d{1,5}|\*)")


def is_tcp(address: str) -> bool:
    """True for an address that others than this user may reach."""
    return address.startswith("tcp://")


def is_ipv6(address: str) -> bool:
    """True for a literal IPv6 address; of a name the resolver decides, and may name IPv4."""
    return address.startswith("tcp://[")


def check_address(address: str, *, has_keys: bool) -> str:
    """Return the address, `tcp://HOST:PORT` or `ipc:///path`, if it may be used. Raises BindError
    if it is malformed, an ipc path is too long, or it is TCP without keys: then any process that
    reaches the port, even on this host, could write into the trace."""
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
    match = _TCP.fullmatch(address)
    if not match or (match[2] != "*" and int(match[2]) > 65535):
        raise BindError(f"{address}: expected ipc:///path or tcp://HOST:PORT")
    if not has_keys:
        raise BindError(
            f"{address}: TCP needs keys, else anybody who reaches the port writes into the trace: "
            f"make them with `rankscope keys new FILE`, give FILE to the collector (--keys) and "
            f"FILE.relay to the job (--rs-keys). Without keys: ipc:///path on one host, or a trace "
            f"folder that every host sees (--rs-collector shared)"
        )
    return address


KEYS_FORMAT: Final = "rankscope.keys/1"
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes as Z85 (ZeroMQ RFC 32)."""
_MOST_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The keys of one file."""

    collector_public: str
    collector_secret: str = field(default="", repr=False)
    """The collector's secret key; "" in the relays' file."""
    relay_public: str
    relay_secret: str = field(default="", repr=False)
    """The relays' secret key; "" in the collector's file."""


def relays_file(path: Path) -> Path:
    """Return the name of the relays' file beside that of the collector."""
    return path.with_name(f"{path.name}.relay")


def write_keys(path: Path, keys: CurveKeys) -> None:
    """Write the collector's file and the relays' beside it, new and 0600, or raise KeysError."""
    collector: dict[str, str] = {"public": keys.collector_public}
    relay: dict[str, str] = {"public": keys.relay_public}
    of_collector = {"collector": {**collector, "secret": keys.collector_secret}, "relay": relay}
    of_relays = {"collector": collector, "relay": {**relay, "secret": keys.relay_secret}}
    new_files: list[Path] = []
    try:
        for place, pairs in ((path, of_collector), (relays_file(path), of_relays)):
            with new_file(place) as file:
                new_files.append(place)
                text = json.dumps({"format": KEYS_FORMAT, **pairs}, indent=1)
                file.write(f"{text}\n".encode())
    except (OSError, ValueError) as error:
        for new in new_files:  # no half of a pair
            new.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise KeysError(
                f"{error.filename}: exists already", "choose another name, or remove it"
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise KeysError(f"{path}: cannot be written: {reason}", "choose another name") from error


def read_keys(path: Path, *, is_collector: bool) -> CurveKeys:
    """Return the keys of a file, with the secret one of the collector or the relays. Raises
    KeysError if it cannot be read, others may read it, or it is no key file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            text = file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KeysError(
            f"{path}: the keys cannot be read: {reason}", "make them: rankscope keys new FILE"
        ) from error
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeysError(
            f"{path}: others may read these keys, or own them (mode {status.st_mode & 0o777:o}, "
            f"user {status.st_uid})",
            f"chmod 600 {path}, and make new ones if anybody else uses this machine",
        )
    try:
        fields = json.loads(text)
        if fields["format"] != KEYS_FORMAT:
            raise ValueError(f"format {fields['format']!r:.60}")
        collector, relay = fields["collector"], fields["relay"]
        keys = CurveKeys(
            collector_public=_key(collector, "public"),
            collector_secret=_key(collector, "secret") if "secret" in collector else "",
            relay_public=_key(relay, "public"),
            relay_secret=_key(relay, "secret") if "secret" in relay else "",
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise KeysError(
            f"{path}: is not a key file of format {KEYS_FORMAT}",
            "make one: rankscope keys new FILE",
        ) from error
    if not (keys.collector_secret if is_collector else keys.relay_secret):
        whose, owner = ("collector", "relays") if is_collector else ("relays", "collector")
        raise KeysError(
            f"{path}: has the keys of the {owner}, and not the secret key of the {whose}",
            "`rankscope keys new FILE` makes FILE for the collector, FILE.relay for the job",
        )
    return keys


def _key(fields: Mapping[str, Any], name: str) -> str:
    if not _KEY.fullmatch(fields[name]):
        raise ValueError(name)
    return str(fields[name])
