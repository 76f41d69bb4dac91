"""What runs in a rank of the pool: one program, traced or proved."""

from __future__ import annotations

import warnings

import rankscope
from tests.faults.rows import BY_NAME
from tests.faults.setup import Setup


def prove(name: str, setup: Setup) -> str:
    """Train, and return what this rank's oracle says is wrong."""
    warnings.simplefilter("ignore")
    row = BY_NAME[name]
    return row.oracle(setup, row.program(setup))


def traced(name: str, setup: Setup, out: str) -> None:
    """Train, traced."""
    warnings.simplefilter("ignore")
    with rankscope.trace(out=out, steps="all"):
        BY_NAME[name].program(setup)
