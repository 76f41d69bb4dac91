"""What a full spool leaves unwritten: definitions that wait for room, and counts of what was lost.

Definitions are never dropped, because later records name them. Of everything else a GAP record per
mode remains: which steps, how many records and bytes. A first GAP is written as soon as dropping
begins, for a rank that is killed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rankscope.spool.recordformat import GAP, PAYLOAD_BYTES, TO_ITS_END, RecordKind

_MOST_BYTES: Final = 64 << 20
"""Definitions kept in memory while the spool is full; beyond it the write is refused."""

_Gap = list[int]
"""first step, last step, records, bytes: mutable because it grows while steps are dropped."""


class Backlog:
    """What one stream has left unwritten. The writer's lock guards all of it but `outside`."""

    __slots__ = (
        "_bytes",
        "_gaps",
        "_has_begun",
        "definitions",
        "dropped",
        "mode",
        "outside",
        "step",
    )

    def __init__(self) -> None:
        self.step, self.mode = 0, 0
        self.definitions: list[bytes] = []
        self._bytes = 0
        self._gaps: dict[int, _Gap] = {}
        self._has_begun = False
        """The stream says that records are dropped, and not yet how many were."""
        self.dropped = 0
        self.outside: list[int] = []
        """Bytes of records dropped without the lock: nested in a write, or waited too long."""

    @property
    def cells(self) -> int:
        """What the definitions take, at most."""
        return sum(-(-len(payload) // PAYLOAD_BYTES) + 1 for payload in self.definitions)

    def keep(self, definition: bytes) -> bool:
        """Keep a definition until there is room; False where too many wait."""
        if self._bytes + len(definition) > _MOST_BYTES:
            return False
        self.definitions.append(definition)
        self._bytes += len(definition)
        return True

    def count(self, size: int) -> None:
        """Count one record as dropped."""
        self.dropped += 1
        gap = self._gaps.setdefault(self.mode, [self.step, self.step, 0, 0])
        gap[0] = min(gap[0], self.step)
        gap[1] = max(gap[1], self.step)
        gap[2] += 1
        gap[3] += size

    def begin(self, write: Callable[[RecordKind, bytes], bool]) -> None:
        """Write once until `settle` that records are dropped from here on; `write` as there."""
        if not self._has_begun:
            packed = GAP.pack(time.monotonic_ns(), 0, 0, self.step, TO_ITS_END, self.mode)
            self._has_begun = write(RecordKind.GAP, packed)

    def settle(self, write: Callable[[RecordKind, bytes], bool]) -> bool:
        """Write what waits, definitions first; False where a definition found no room. `write`
        commits a record and returns True, or returns False where there is no room."""
        while self.definitions and write(RecordKind.DEFINITION, self.definitions[0]):
            self._bytes -= len(self.definitions.pop(0))
        while self.outside:
            self.count(self.outside.pop())
        if self._has_begun and not self._gaps:  # only definitions had to wait
            self._gaps[self.mode] = [self.step, self.step, 0, 0]
        for mode in list(self._gaps):
            first, last, records, lost = self._gaps[mode]
            packed = GAP.pack(time.monotonic_ns(), records, lost, first, last, mode)
            if not write(RecordKind.GAP, packed):
                break
            del self._gaps[mode]
            self._has_begun = False
        return not self.definitions
