"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], seconds: float = 300.0) -> bool:
    """Poll until something holds; False where it never did."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_true():
            return True
        time.sleep(0.02)
    return False
