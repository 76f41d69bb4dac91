"""One stream, followed where its replica grows.

At first the end of the stream is read, and its begin, where most definitions stand. From then on
what is new is read once. Where more has come than may be read at a time, the follower goes on at
the end and says so. Where the begin of the replica is settled (`spool.settledprefix`), also behind
what was read so far, it takes what is kept of that and goes on there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from rankscope.errors import SpoolError
from rankscope.live.streamtail import StreamTail
from rankscope.record.streams import StreamId
from rankscope.run.filepieces import piece_of
from rankscope.spool.definitions import Decoded
from rankscope.spool.recordcolumns import Records, records, records_at
from rankscope.spool.recordformat import CELL_BYTES, FIRST, RecordKind, StepEvent
from rankscope.spool.replication import replica_path
from rankscope.spool.settledprefix import read_settled, settled_to
from rankscope.spool.validprefix import as_cells

__all__ = ["StreamFollower"]


class StreamFollower:
    """The state of one stream, brought up to date with each look."""

    def __init__(
        self,
        out: Path,
        stream: StreamId,
        *,
        skips: bool = True,
        has_values: bool = True,
        decoded: Decoded | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            out: the trace folder.
            stream: which one.
            skips: go on at the end where more has come than may be read; else go on where the last
                look ended.
            has_values: as of `StreamTail`.
            decoded: shared by all streams of a job, as of `read_stream`.
        """
        self.stream = stream
        self.tail = StreamTail(has_values=has_values, decoded=decoded)
        self.has_skipped = False
        """True where the state does not rest on every record."""
        self.replica_bytes = self.taken_bytes = 0
        self.knows_a_step = False
        """The definitions were read of a whole step of what was passed over: later steps add
        few."""
        self._replica = replica_path(out, stream)
        self._skips = skips
        self._next = 0
        self._known_to = 0
        """Definitions were read up to here from the begin on."""
        self._unread_to = 0
        """From `_known_to` to here nothing was read."""

    @property
    def read_bytes(self) -> int:
        """Offset up to which the stream was read."""
        return self._next

    def look(self, most_bytes: int) -> None:
        """Read what is new, at most about so many bytes.

        Raises:
            SpoolError: the stream cannot be read.
        """
        try:
            self.replica_bytes = self._replica.stat().st_size
        except FileNotFoundError:
            self.replica_bytes = 0
        except OSError as error:
            raise SpoolError(f"{self._replica}: cannot be read: {error.strerror}") from error
        self._pass_settled()
        if self._skips and self.replica_bytes - self._next > most_bytes:
            self._skip(most_bytes)
        left = most_bytes
        while left > 0:
            found = self._records(self._next, left)
            size = found.committed_bytes
            if not size:
                break
            self.tail.take(found)
            self._next += size
            self.taken_bytes += size
            left -= size

    def define(self, most_bytes: int) -> None:
        """Go on reading definitions of what was passed over."""
        while most_bytes > 0 and self._known_to < self._unread_to:
            wanted = min(most_bytes, self._unread_to - self._known_to)
            found = self._records(self._known_to, wanted)
            if not found.committed_bytes:  # it was settled meanwhile, which the next look sees
                break
            self.tail.define(found)
            _, steps = found.columns(RecordKind.STEP)
            self.knows_a_step |= bool((steps["event"] == int(StepEvent.END)).any())
            self._known_to += found.committed_bytes
            most_bytes -= found.committed_bytes

    def _pass_settled(self) -> None:
        """Take what is kept of what was settled and not read yet.

        Raises:
            SpoolError: what is kept cannot be read.
        """
        unknown = self._known_to if self._known_to < self._unread_to else self._next
        if settled_to(self._replica) <= min(unknown, self._next):
            return
        prefix = read_settled(self._replica)
        kept = records(prefix.kept)
        if prefix.settled_to > self._next:
            self._next = prefix.settled_to
            self.has_skipped = True
            self.tail.resume(kept)
        else:
            self.tail.define(kept)
        self.taken_bytes += kept.committed_bytes
        self._known_to = min(max(self._known_to, prefix.settled_to), self._unread_to)
        self.knows_a_step = True

    def _skip(self, most_bytes: int) -> None:
        """Go on so many bytes before the replica's end, at the begin of a record."""
        at = (self.replica_bytes - most_bytes) // CELL_BYTES * CELL_BYTES
        try:
            cells = as_cells(piece_of(self._replica, at, most_bytes))
        except OSError:
            return
        begins = np.flatnonzero((cells[:, 5] == FIRST) & (cells[:, 4] != 0))
        if not len(begins):
            return
        if self._known_to >= self._unread_to:
            self._known_to = self._next
        self._next = self._unread_to = at + int(begins[0]) * CELL_BYTES
        self.has_skipped = True
        self.tail.forget()
        self.define(most_bytes)  # what comes next is read with these names

    def _records(self, offset: int, size: int) -> Records:
        """Return the whole records that begin in about so many bytes from an offset on."""
        with contextlib.suppress(OSError):
            return records_at(self._replica, offset, size)
        return records(b"")
