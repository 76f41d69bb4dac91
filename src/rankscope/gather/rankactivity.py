"""What a rank that writes nothing is inside of, read off the last records of its spool.

A rank is quiet for many reasons: its traced steps are over and it trains on untraced, it evaluates,
it saves. Only three things say that a record was to come: a module call that was not left, a
collective that the program waits for and that has not ended, and a train step whose optimizer has
not stepped. The last stands in for what no record shows, such as DDP's own reduction in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode, Phase
from rankscope.spool.cells import (
    ENTER_DTYPE,
    EXIT_DTYPE,
    STEP_DTYPE,
    RecordKind,
    StepEvent,
)
from rankscope.spool.records import Records, records
from rankscope.spool.streamreader import StreamReader

__all__ = ["RankActivity", "posture_of"]

Rows = NDArray[Any]
_OPTIMIZER = sorted(Phase.having(lambda facts: facts.is_event) - {Phase.SETUP})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """Where a rank stood when it wrote its last record."""

    written_ns: int
    """Monotonic time of that record on its host; 0 where there is none with a time."""
    inside: str
    """What it is inside of: `a collective of train step 2`; "" for nothing that is known."""


@dataclass(slots=True)
class _Tail:
    """The records of a stream that were not freed."""

    enters: list[Rows]
    exits: list[Rows]
    steps: list[Rows]
    synchronous: dict[int, bool]
    """{definition: True where its collective is waited for in the call that issued it}."""
    written_ns: int = 0

    def add(self, found: Records) -> None:
        """Take what a piece of the stream says."""
        for kept, kind in (
            (self.enters, RecordKind.ENTER),
            (self.exits, RecordKind.EXIT),
            (self.steps, RecordKind.STEP),
        ):
            _, rows = found.columns(kind)
            if len(rows):
                kept.append(rows.copy())
                self.written_ns = max(self.written_ns, int(rows["time_ns"].max()))
        _, values, _ = found.values()
        if len(values):
            self.written_ns = max(self.written_ns, int(values["time_ns"].max()))
        for entry in found.definitions().found:
            if entry["kind"] == "collective":
                self.synchronous[entry["id"]] = not entry.get("async", False)


def posture_of(reader: StreamReader, *, counts_steps: bool) -> RankActivity:
    """Read where a rank stands.

    Args:
        reader: of its stream.
        counts_steps: a train step before its optimizer counts.

    Raises:
        SpoolError: the stream cannot be read.
    """
    tail = _Tail([], [], [], {})
    is_whole = reader.lowest() == 0
    for chunk in reader.chunks():
        tail.add(records(chunk, is_verified=True))
    enters = _joined(tail.enters, ENTER_DTYPE)
    steps = _joined(tail.steps, STEP_DTYPE)
    is_open = ~np.isin(enters["sequence"], _joined(tail.exits, EXIT_DTYPE)["sequence"])
    is_open &= ~_is_ended(enters, steps)
    inside = _open_call(enters[is_open], tail.synchronous)
    if not inside and counts_steps:
        inside = _open_step(enters, steps, is_whole=is_whole)
    return RankActivity(written_ns=tail.written_ns, inside=inside)


def _joined(pieces: list[Rows], dtype: np.dtype[Any]) -> Rows:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _is_ended(enters: Rows, steps: Rows) -> NDArray[np.bool_]:
    """[n] True for calls of a step that has ended."""
    ended = steps[steps["event"] == int(StepEvent.END)]
    return np.isin(_key(enters), _key(ended))


def _key(rows: Rows) -> NDArray[np.int64]:
    key: NDArray[np.int64] = rows["step"].astype(np.int64) * 2 + rows["mode"]
    return key


def _open_call(enters: Rows, synchronous: dict[int, bool]) -> str:
    """Return what the innermost open call is; asynchronous collectives do not count."""
    for row in enters[::-1]:
        of = f"{Mode(int(row['mode'])).word} step {int(row['step'])}"
        if row["phase"] != int(Phase.COLLECTIVE):
            return f"a call of {of}"
        if synchronous.get(int(row["collective"]), False):
            return f"a collective of {of}"
    return ""


def _open_step(enters: Rows, steps: Rows, *, is_whole: bool) -> str:
    """Return the train step that runs and whose optimizer has not stepped."""
    of_train = steps[steps["mode"] == int(Mode.TRAIN)]
    marks = of_train[of_train["event"] != int(StepEvent.NOTE)]
    calls = enters[enters["mode"] == int(Mode.TRAIN)]
    if len(marks):
        if marks[-1]["event"] != int(StepEvent.BEGIN):
            return ""
        step = int(marks[-1]["step"])
    elif not is_whole and len(calls):  # its begin was shipped and freed: it writes in no other time
        step = int(calls[-1]["step"])
    else:
        return ""
    own = calls[calls["step"] == step]
    if np.isin(own["phase"], _OPTIMIZER).any():
        return ""
    return f"train step {step}, before its optimizer"
