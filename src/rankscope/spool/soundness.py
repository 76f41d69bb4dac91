"""Which records make sense: bounds on the numbers of records whose cells are valid.

A valid crc says that the bytes are those which were written, not that a rank wrote them. What all
later code counts on is checked here, once, where records become columns: times that can be added,
known phases and modes, counts that fit each other. Other records are set aside, and counted with
the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.statistics import COUNTS, NONFINITE
from rankscope.spool.recordformat import LATEST_NS, RecordKind

Rows = Any
"""Records by column: a structured array, or `ValueRows`."""
Mask = NDArray[np.bool_]

_MOST: Final = 1 << 48
"""Bytes, records or elements; more of them no rank has."""
_NUMBERS: Final = np.arange(256)
KNOWN_PHASES: Final[Mask] = np.isin(_NUMBERS, [int(phase) for phase in Phase])
KNOWN_MODES: Final[Mask] = np.isin(_NUMBERS, [int(mode) for mode in Mode])
"""By number: a newer rankscope may have added more."""


def _few(*names: str) -> Callable[[Rows], Mask]:
    return lambda rows: np.logical_and.reduce([rows[name] < _MOST for name in names])


_TIME: Final = (
    "time out of range",
    lambda rows: (rows["time_ns"] >= 0) & (rows["time_ns"] < LATEST_NS),
)
_MODE: Final = ("unknown mode", lambda rows: KNOWN_MODES[rows["mode"]])
_PHASE: Final = ("unknown phase", lambda rows: KNOWN_PHASES[rows["phase"]])
_RULES: Final[Mapping[RecordKind, tuple[tuple[str, Callable[[Rows], Mask]], ...]]] = {
    RecordKind.ENTER: (_TIME, _MODE, _PHASE),
    RecordKind.EXIT: (_TIME,),
    RecordKind.VALUE: (_TIME, _PHASE, ("element count out of range", _few("count"))),
    RecordKind.STEP: (_TIME, _MODE),
    RecordKind.ERROR: (_TIME,),
    RecordKind.TENSOR: (("place out of range", _few("offset", "nbytes")),),
    RecordKind.GAP: (
        _TIME,
        _MODE,
        ("counts out of range", _few("records", "bytes")),
        ("steps in the wrong order", lambda rows: rows["first_step"] <= rows["last_step"]),
    ),
    RecordKind.END: (_TIME, ("counts out of range", _few("records", "dropped"))),
}


def judged(kind: RecordKind, rows: Rows) -> tuple[Mask | None, Counter[str]]:
    """Return which rows of a kind of record make sense, [rows], None where all of them do, and how
    many break which rule, each counted for the first it breaks. Not for definitions and samples."""
    is_sound: Mask | None = None
    found: Counter[str] = Counter()
    for reason, rule in _RULES.get(kind, ()):
        holds = rule(rows)
        if holds.all():
            continue
        left = np.ones(len(rows), bool) if is_sound is None else is_sound
        broken = int((left & ~holds).sum())
        if broken:
            found[f"{kind.name} with {reason}"] = broken
        is_sound = left & holds
    return is_sound, found


def sound_rows(kind: RecordKind, rows: Rows) -> tuple[Rows, Counter[str]]:
    """Return the rows that make sense, the same array where all do, and what was set aside
    (`judged`)."""
    is_sound, found = judged(kind, rows)
    return (rows if is_sound is None else rows[is_sound]), found


def sound_digests(rows: Rows) -> Mask:
    """Return [rows] which digests, whole records of values, have counts that fit each other."""
    left = rows["count"]
    fits = np.ones(len(rows), bool)
    for name in NONFINITE:
        fits &= rows[name] <= left
        left = left - np.where(fits, rows[name], 0)
    for name in set(COUNTS) - {"count", *NONFINITE}:
        fits &= rows[name] <= left
    return fits
