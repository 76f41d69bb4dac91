"""What happened in a job that holds its last steps back, where all its ranks and relays see it.

Whoever sees something happen writes one entry: what, and the step at which it was. Entries are
numbered from 1, and an entry is a symbolic link to its text: made in one call, whole or not at all,
on every shared disk, by the first who comes. Nobody waits for anybody: relays look from time to
time, and ranks hold more than is asked for meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.call import Mode
from rankscope.run.filenames import EVENT_FOLDER, HELD_FOLDER, REPLICA_FOLDER
from rankscope.run.folders import RunHeader, streams
from rankscope.run.mounts import mount_of
from rankscope.run.prepare import Collection

__all__ = [
    "ABSENT",
    "EventBoard",
    "Happening",
    "agree",
    "agreed",
    "event_folder",
    "file_time",
    "held_anything",
]

ABSENT = -1
"""Time of a file that does not exist."""
_MOST_EVENTS = 256
"""Of one life: what happens after them is not told any more."""
_MOST_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened: the steps before it become a trace."""

    kind: str
    """"ended", "stalled", "nonfinite", "spike", "watched", "touched" or "ordered"."""
    mode: Mode
    step: int
    """The step that ran where it happened."""
    text: str
    """What happened, in words."""


class EventBoard:
    """The events of one life of the ranks."""

    def __init__(self, folder: Path) -> None:
        """Look at `folder`, which the first entry makes."""
        self._folder = folder

    def events(self) -> list[Happening]:
        """Return what happened so far, in the order in which it was told."""
        found: list[Happening] = []
        while (text := agreed(self._folder, str(len(found) + 1))) is not None:
            found.append(_event(text))
        return found

    def tell(self, event: Happening) -> bool:
        """Write an event; False where there are too many.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = " ".join(
            (event.kind, event.mode.word, str(event.step), event.text[:_MOST_CHARACTERS])
        )
        for number in range(len(self.events()) + 1, _MOST_EVENTS):
            if agree(self._folder, str(number), entry) == entry:
                return True
        return False

    def tell_once(self, event: Happening) -> bool:
        """The same, unless one of its kind was told; True where this call told it.

        Raises:
            OSError: it cannot be written.
        """
        return all(one.kind != event.kind for one in self.events()) and self.tell(event)

    def first_time(self, time: int) -> int:
        """Return the time that a watched file had before any touch counted: as whoever asked first
        says.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return int(agree(self._folder, "0", str(time)))

    def tell_taken(self, number: int) -> None:
        """Write that a glob of values to watch took one.

        Args:
            number: of the glob, as all ranks count them.

        Raises:
            OSError: it cannot be written.
        """
        if not self.has_taken(number):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            agree(self._folder, f"watch.{number}", "taken")

    def has_taken(self, number: int) -> bool:
        """True where such a glob took a value on any rank."""
        return agreed(self._folder, f"watch.{number}") is not None


def _event(text: str) -> Happening:
    kind, mode, step, words = text.split(" ", 3)
    return Happening(kind=kind, mode=Mode[mode.upper()], step=int(step), text=words)


def event_folder(run_folder: Path, header: RunHeader, incarnation: int) -> Path:
    """Return where the ranks and relays of one life tell what happened: all of them see it."""
    is_shared = Collection.of_run(run_folder, header).is_shared
    seen_by_all = header.out / REPLICA_FOLDER if is_shared else run_folder
    return seen_by_all / f"{EVENT_FOLDER}.{incarnation}"


def held_anything(run_folder: Path) -> bool:
    """True where a rank of this host held steps back."""
    held = run_folder / HELD_FOLDER
    return held.is_dir() and bool(streams(held))


def file_time(path: Path) -> Callable[[], int]:
    """Return what tells when a file was touched last, in nanoseconds; `ABSENT` without one."""
    mount, name = mount_of(path), str(path)

    def glance() -> int:
        try:
            return os.stat(name).st_mtime_ns
        except OSError:
            return ABSENT

    def open_and_look() -> int:
        """Look past the attributes an NFS client keeps for up to a minute."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ABSENT
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    return open_and_look if mount is not None and mount.revalidates_on_open else glance


def agree(folder: Path, name: str, text: str) -> str:
    """Return what the first who came said under this name.

    Raises:
        OSError: nothing can be written there.
    """
    entry = folder / name
    try:
        os.symlink(text, entry)
    except FileExistsError:
        return os.readlink(entry)
    return text


def agreed(folder: Path, name: str) -> str | None:
    """Return what was said under this name, None where nothing was."""
    try:
        return os.readlink(folder / name)
    except OSError:
        return None
