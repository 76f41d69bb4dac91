"""What every test of a rank's life begins with: no optimizer of an earlier file is alive."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_optimizer_of_another_file_is_left() -> None:
    """Free what earlier files left in cycles: a living optimizer decides what a step is."""
    gc.collect()
