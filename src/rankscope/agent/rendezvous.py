"""How the hosts of a job agree on one trace folder: a value through its store at start, no data."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # lazy

from rankscope.capture.torch_internals.distributed import default_store
from rankscope.errors import SpoolError

_PREFIX = "rankscope"
_KEY = "rendezvous"
_LIFE = "life"
_CONNECT = timedelta(seconds=10)
_WAIT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What the head host tells the others."""

    run_id: str
    out: str
    host: str


def find_store() -> Store | None:
    """Return the job's store: the launching agent's, which every rank finds, else the group's."""
    store = find_agents_store()
    if store is None and dist.is_available() and dist.is_initialized():
        store = default_store()
    return store


def find_agents_store() -> Store | None:
    """Return the store of the launching elastic agents, which outlives the ranks; None without."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address and port.isdecimal():
        try:
            return TCPStore(address, int(port), is_master=False, timeout=_CONNECT)
        except (RuntimeError, ValueError):  # no store there: perhaps there is a process group
            pass
    return None


def agree(store: Store, key: str, value: str) -> str:
    """Return what the first process of the job to ask said under this key.

    Raises:
        SpoolError: the store does not answer.
    """
    return _compared(store, key, "", value) or value


def _compared(store: Store, key: str, expected: str, proposed: str) -> str:
    try:
        found = PrefixStore(_PREFIX, store).compare_set(key, expected, proposed)
    except RuntimeError as error:
        raise SpoolError(f"the job's store does not answer, or cannot compare: {error}") from error
    return bytes(found).decode()


def agree_on_life(store: Store, *, at_least: int, started_at: float) -> int:
    """Return the number of the life that all ranks of this round of the job have.

    Agents count restarts each for itself. But all ranks of a round are started before the first of
    them calls a module, and those of the next round after: a rank that finds a life which began
    before its own process begins the next.

    Args:
        store: outlives the ranks.
        at_least: the first life of this rank that this host has no records of.
        started_at: when this process was started, by the host's clock.

    Raises:
        SpoolError: the store does not answer.
    """
    expected, proposed = "", f"{at_least} {time.time()!r}"
    while True:
        held = _compared(store, _LIFE, expected, proposed)
        life, _, began_at = held.partition(" ")
        if int(life) >= at_least and float(began_at) >= started_at:
            return int(life)
        expected, proposed = held, f"{max(at_least, int(life) + 1)} {time.time()!r}"


def publish(store: Store, rendezvous: Rendezvous, which: str) -> None:
    """Tell every host of the job; `which` of its traces this is about."""
    PrefixStore(_PREFIX, store).set(_KEY + which, json.dumps(asdict(rendezvous)))


def lookup(store: Store, which: str) -> Rendezvous | None:
    """Return what the head host published, None where it does not within half a minute."""
    try:
        prefixed = PrefixStore(_PREFIX, store)
        prefixed.wait([_KEY + which], _WAIT)
        return Rendezvous(**json.loads(prefixed.get(_KEY + which)))
    except (RuntimeError, ValueError, TypeError):  # torch's timeouts are RuntimeErrors
        return None
