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
        self.read_bytes = 0
        """Offset up to which the stream was read."""
        self._known_to = 0
        """Definitions were read up to here from the begin on."""
        self._unread_to = 0
        """From `_known_to` to here nothing was read."""

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
        if self._skips and self.replica_bytes - self.read_bytes > most_bytes:
            self._skip(most_bytes)
        found = self._records(self.read_bytes, most_bytes)
        if len(found):
            self.tail.take(found)
            self.read_bytes += found.committed_bytes
            self.taken_bytes += found.committed_bytes

    def define(self, most_bytes: int) -> None:
        """Go on reading definitions of what was passed over; where it was settled meanwhile, the
        next look takes them."""
        if self._known_to >= self._unread_to:
            return
        found = self._records(self._known_to, min(most_bytes, self._unread_to - self._known_to))
        self.tail.define(found)
        _, steps = found.columns(RecordKind.STEP)
        self.knows_a_step |= bool((steps["event"] == int(StepEvent.END)).any())
        self._known_to += found.committed_bytes

    def _pass_settled(self) -> None:
        """Take what is kept of what was settled and not read yet.

        Raises:
            SpoolError: what is kept cannot be read.
        """
        unknown = self._known_to if self._known_to < self._unread_to else self.read_bytes
        if settled_to(self._replica) <= min(unknown, self.read_bytes):
            return
        prefix = read_settled(self._replica)
        kept = records(prefix.kept)
        if prefix.settled_to > self.read_bytes:
            self.read_bytes = prefix.settled_to
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
            self._known_to = self.read_bytes
        self.read_bytes = self._unread_to = at + int(begins[0]) * CELL_BYTES
        self.has_skipped = True
        self.tail.forget()
        self.define(most_bytes)  # what comes next is read with these names

    def _records(self, offset: int, size: int) -> Records:
        """Return the whole records that begin in about so many bytes from an offset on."""
        with contextlib.suppress(OSError):
            return records_at(self._replica, offset, size)
        return records(b"")
