"""Replicas put on disk: a spool is freed only once what the collector has of it is there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from rankscope.companion.log import log
from rankscope.record.streams import StreamId
from rankscope.run.replacing import sync_by_name


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
        """Wait for the disk; raise OSError: what it refused once it may have forgotten."""
        try:
            os.fdatasync(self.descriptor)
            if self.new is not None:
                for path in (self.new.with_suffix(".origin"), self.new.parent):
                    with contextlib.suppress(FileNotFoundError):
                        sync_by_name(path)
        finally:
            os.close(self.descriptor)


Asker = TypeVar("Asker")


class BackgroundSync(Generic[Asker]):
    """Puts replicas on disk in a thread of its own: whoever takes records does not wait for it."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Unsynced | None] = SimpleQueue()
        self._finished: SimpleQueue[tuple[Unsynced, str]] = SimpleQueue()
        self._askers: dict[StreamId, Asker] = {}
        self._lost: set[StreamId] = set()
        """Replicas of which the disk lost something: no segment of theirs is freed any more."""
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    @property
    def has_lost(self) -> bool:
        """True once a disk said that it lost something; it says that only once."""
        return bool(self._lost)

    def begin(self, place: StreamId, asker: Asker, to_sync: Callable[[StreamId], Unsynced]) -> None:
        """Have a replica put on disk, opened by `to_sync`, where that is not under way or vain."""
        if place in self._lost or place in self._askers:
            return
        with contextlib.suppress(OSError):  # too many open files: it is asked for again
            self._waiting.put(to_sync(place))
            self._askers[place] = asker

    def finished(self) -> Iterator[tuple[Asker, int]]:
        """Yield who asked, and how many bytes of the replica are on disk."""
        with contextlib.suppress(Empty):
            while True:
                unsynced, trouble = self._finished.get_nowait()
                asker = self._askers.pop(unsynced.stream)
                if not trouble:
                    yield asker, unsynced.length
                    continue
                self._lost.add(unsynced.stream)
                name = unsynced.stream.name
                log(f"{name}: cannot be put on disk: {trouble}; its host keeps all of it")

    def close(self) -> None:
        """Finish what was begun; nothing may be begun any more."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (unsynced := self._waiting.get()) is not None:
            try:
                unsynced.put_on_disk()
            except OSError as error:
                self._finished.put((unsynced, str(error.strerror)))
            else:
                self._finished.put((unsynced, ""))
