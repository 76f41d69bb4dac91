"""How long a collector and a job wait for what is missing, where nobody says how long; the rule is
that of `gather/waiting.py`.
"""

from __future__ import annotations

__all__ = ["DRAIN_SECONDS", "FINISH_SECONDS"]

DRAIN_SECONDS = 10.0
"""Grace for ranks that vanished without an end record, where nobody says how long."""
FINISH_SECONDS = 60.0
"""How long a job that is over waits for its tree, where nobody says how long."""
