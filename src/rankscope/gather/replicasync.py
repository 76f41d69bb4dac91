"""Replicas put on disk: a spool is freed only once what the collector has of it is there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from rankscope.record.streams import StreamId
from rankscope.run.replacing import sync_by_name

__all__ = ["BackgroundSync", "Unsynced"]


@dataclass(frozen=True, slots=True)
class Unsynced:
    """Bytes of a replica that may be in the memory of this host only."""

    stream: StreamId
    length: int
    descriptor: int
    """One of its own, which is closed afterwards."""
    new: Path | None
    """The replica's path where its name has to be put on disk too."""

    def put_on_disk(self) -> None:
        """Wait until the bytes outlast a loss of power.

        Raises:
            OSError: they do not. What the disk refused once it may have forgotten.
        """
        try:
            os.fdatasync(self.descriptor)
            if self.new is not None:
                for path in (self.new.with_suffix(".origin"), self.new.parent):
                    with contextlib.suppress(FileNotFoundError):
                        sync_by_name(path)
        finally:
            os.close(self.descriptor)


class BackgroundSync:
    """Puts replicas on disk in a thread of its own: intake does not wait for the disk."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Unsynced | None] = SimpleQueue()
        self._finished: SimpleQueue[tuple[StreamId, int, str]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    def add(self, unsynced: Unsynced) -> None:
        """Have this put on disk."""
        self._waiting.put(unsynced)

    def finished(self) -> Iterator[tuple[StreamId, int, str]]:
        """Yield streams, how many bytes of each are on disk, and why none are, mostly empty."""
        with contextlib.suppress(Empty):
            while True:
                yield self._finished.get_nowait()

    def close(self) -> None:
        """Finish what was begun; nothing may be added any more."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (unsynced := self._waiting.get()) is not None:
            try:
                unsynced.put_on_disk()
            except OSError as error:
                self._finished.put((unsynced.stream, 0, str(error.strerror)))
            else:
                self._finished.put((unsynced.stream, unsynced.length, ""))
