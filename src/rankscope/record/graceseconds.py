"""Defaults of how long is waited: see `companion/waitingrule.py`, `companion/relay.py`."""

from __future__ import annotations

DRAIN_SECONDS = 10.0
"""Grace for ranks that vanished without an end record, where nobody says how long."""
FINISH_SECONDS = 60.0
"""How long a job that is over waits for its tree, where nobody says how long."""
STALL_SECONDS = 300.0
"""How long no rank of a host may move inside a traced step before that is noted."""
