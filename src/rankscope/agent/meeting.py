"""How the hosts of a job agree on one trace folder: one value through the job's own store, at start, never data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # lazy

from rankscope.capture.torch_internals import default_store

__all__ = ["Meeting", "find_store", "lookup", "publish"]

_PREFIX = "rankscope"
_KEY = "meeting"
_CONNECT = timedelta(seconds=10)
_WAIT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the head host tells the others."""

    run_id: str
    out: str
    """Absolute path of the trace folder on the head host."""
    host: str
    address: str
    """Where the collector listens; reachable from the same machine only."""


def find_store(environ: Mapping[str, str] = os.environ) -> Store | None:
    """Return the job's store: the process group's, or the launching agent's before there is a group."""
    if dist.is_available() and dist.is_initialized():
        return default_store()
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        return None
    try:
        return TCPStore(address, int(port), is_master=False, timeout=_CONNECT)
    except (RuntimeError, ValueError):  # no store there: the hosts do not meet, and say so
        return None


def publish(store: Store, meeting: Meeting) -> None:
    """Tell every host of the job."""
    PrefixStore(_PREFIX, store).set(_KEY, json.dumps(asdict(meeting)))


def lookup(store: Store) -> Meeting | None:
    """Return what the head host published, None where it does not within half a minute."""
    try:
        prefixed = PrefixStore(_PREFIX, store)
        prefixed.wait([_KEY], _WAIT)
        return Meeting(**json.loads(prefixed.get(_KEY)))
    except (RuntimeError, ValueError, TypeError):  # torch's timeouts are RuntimeErrors
        return None
