"""`is_causal` in a model's config for the length of one call.

Masks are built from the config, so a call that gives `is_causal` has to change it for a while. A
config is shared: by submodels, by models, by threads. What stands in it is therefore counted, and
whichever call ends last puts back what was there before the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_ABSENT = object()


@dataclass(slots=True)
class _Override:
    config: Any
    original: Any
    calls: list[tuple[int, bool]] = field(default_factory=list)
    """Thread and value of every call that goes on, in order of their begin."""


_overrides: dict[int, _Override] = {}
"""By `id` of the config, which the entry keeps alive."""
_lock = threading.Lock()


def configured_causality(config: Any) -> Any:
    """Return what a config says to this thread: what another thread put there is not read."""
    if isinstance(config, dict):
        return config.get("is_causal")
    is_traced = torch.compiler.is_dynamo_compiling()
    override = None if is_traced else _overrides.get(id(config))
    if override is None:
        return getattr(config, "is_causal", None)
    mine = [value for thread, value in override.calls if thread == threading.get_ident()]
    if mine:
        return mine[-1]
    return None if override.original is _ABSENT else override.original


@contextlib.contextmanager
def in_config(config: Any, is_causal: bool) -> Iterator[None]:
    """Have a config say `is_causal` while the block runs. Two threads that ask one config for
    different values at the same time both see the later one; each still gets its own by keyword."""
    if torch.compiler.is_dynamo_compiling():  # which follows neither locks nor threads
        is_said, before = hasattr(config, "is_causal"), getattr(config, "is_causal", None)
        config.is_causal = is_causal
        try:
            yield
        finally:
            config.is_causal = before
            if not is_said:
                del config.is_causal
        return
    call = (threading.get_ident(), is_causal)
    with _lock:
        override = _overrides.get(id(config))
        if override is None:
            original = getattr(config, "is_causal", _ABSENT)
            override = _overrides[id(config)] = _Override(config, original)
        override.calls.append(call)
        config.is_causal = is_causal
    try:
        yield
    finally:
        with _lock:
            override.calls.remove(call)
            _settle(override)


def _settle(override: _Override) -> None:
    if override.calls:
        override.config.is_causal = override.calls[-1][1]
        return
    del _overrides[id(override.config)]
    if override.original is _ABSENT:
        del override.config.is_causal
    else:
        override.config.is_causal = override.original
