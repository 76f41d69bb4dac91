"""What runs in a rank of the pool: one program of a table, traced or proved."""

from __future__ import annotations

import importlib
import warnings

import rankscope
from tests.lab.faults.rows import Row
from tests.lab.faults.setup import Setup


def row_of(table: str, name: str) -> Row | None:
    """Return a program of a table, a module with `BY_NAME`; None for the job that hangs."""
    found: dict[str, Row] = importlib.import_module(table).BY_NAME
    return found.get(name)


def prove(table: str, name: str, setup: Setup) -> str:
    """Train, and return what this rank's oracle says is wrong."""
    warnings.simplefilter("ignore")
    row = row_of(table, name)
    return row.oracle(setup, row.program(setup))


def traced(table: str, name: str, setup: Setup, proves: bool, out: str) -> str:
    """Train, traced; return what this rank's oracle says is wrong, if it is to be asked."""
    warnings.simplefilter("ignore")
    row = row_of(table, name)
    with rankscope.trace(out=out, **setup.traced_with):
        trained = row.program(setup)
    return row.oracle(setup, trained) if proves else ""


def traced_alone(table: str, name: str, setup: Setup, out: str) -> None:
    """Train what a program is held to, traced; on one process."""
    warnings.simplefilter("ignore")
    program = row_of(table, name).reference
    with rankscope.trace(out=out, **setup.traced_with):
        program(setup)
