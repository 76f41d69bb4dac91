"""What happened in a job that holds its last steps back, where all its ranks and relays see it.

Whoever sees something happen writes one entry: what, and the step at which it was. Entries are
numbered from 1, and an entry is a symbolic link to its text: made in one call, whole or not at all,
on every shared disk, by the first who comes. Relays look from time to time, and a rank that is
about to let go of steps looks whether an entry asks for them.

What an entry asks for, of all ranks of that life, is a `Window`: steps that have to be in the
trace. How far they were copied is marked beside each rank's ring (`mark_copied`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rankscope.record.call import Mode
from rankscope.record.triggers import Trigger
from rankscope.run.filenames import EVENT_FOLDER, HELD_FOLDER, REPLICA_FOLDER
from rankscope.run.folders import RunHeader, streams
from rankscope.run.mounts import mount_of
from rankscope.run.prepare import Collection

ABSENT = -1
_MOST_EVENTS = 256
"""Of one life: what happens after them is not told any more."""
_OF_ENDS = 16
"""Of these, for what ends a job."""
_MOST_CHARACTERS = 500
MOST_AHEAD: Final = 4
"""Steps that ranks of one job may be apart where something happens; held beyond those asked for."""
_COPIED_NAME: Final = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened: the steps before it become a trace."""

    trigger: Trigger
    mode: Mode
    step: int
    text: str

    @classmethod
    def read(cls, entry: str) -> Happening:
        """Return the event that an entry of the board says."""
        word, mode, step, text = entry.split(" ", 3)
        return cls(
            trigger=Trigger[word.upper()], mode=Mode[mode.upper()], step=int(step), text=text
        )

    @property
    def entry(self) -> str:
        """The event as an entry of the board."""
        text = self.text[:_MOST_CHARACTERS]
        return f"{self.trigger.word} {self.mode.word} {self.step} {text}"

    def window(self, steps: int) -> Window:
        """Return what it asks for of a job that holds its last `steps` back."""
        ahead = MOST_AHEAD if self.trigger.value.is_end else 0
        return Window(**asdict(self), first=self.step - steps, last=self.step + ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Happening):
    """Steps that an event asks for, both ends included."""

    first: int
    last: int
    """Beyond `step` where other ranks may be ahead: these steps come along where they are."""

    @property
    def asked(self) -> tuple[int, int]:
        """The steps that have to be in the trace."""
        return max(0, self.first), self.step


class EventBoard:
    """The events of one life of the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[Happening] = []
        """Those read so far: entries never change."""

    def events(self) -> list[Happening]:
        """Return what happened so far, in the order in which it was told."""
        while (entry := agreed(self._folder, str(len(self._events) + 1))) is not None:
            self._events.append(Happening.read(entry))
        return [*self._events]

    def tell(self, event: Happening) -> bool:
        """Write an event, or raise OSError; False where there are too many."""
        most = _MOST_EVENTS - (0 if event.trigger.value.is_end else _OF_ENDS)
        numbers = range(len(self.events()) + 1, most)
        return any(self._agree(str(number), event.entry) == event.entry for number in numbers)

    def was_told(self, trigger: Trigger, text: str) -> bool:
        """True where this was told, or for an end any of its trigger."""
        texts = [one.text for one in self.events() if one.trigger is trigger]
        return bool(texts) if trigger.value.is_end else text[:_MOST_CHARACTERS] in texts

    def first_time(self, time: int) -> int:
        """Return the time of a watched file before any touch that counts, or raise OSError."""
        return int(self._agree("0", str(time)))

    def tell_taken(self, number: int) -> None:
        """Write that a glob of values to watch, by its number, took one, or raise OSError."""
        if not self.has_taken(number):
            self._agree(f"watch.{number}", "taken")

    def has_taken(self, number: int) -> bool:
        """True where a glob took a value on any rank."""
        return agreed(self._folder, f"watch.{number}") is not None

    def _agree(self, name: str, text: str) -> str:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return agree(self._folder, name, text)


def event_folder(run_folder: Path, header: RunHeader, incarnation: int) -> Path:
    """Return where the ranks and relays of one life tell what happened: all of them see it."""
    return seen_by_all(run_folder, header) / f"{EVENT_FOLDER}.{incarnation}"


def seen_by_all(run_folder: Path, header: RunHeader) -> Path:
    """Return the folder that all hosts of a run see, or else this host."""
    return header.out / REPLICA_FOLDER if Collection.of_run(header).is_shared else run_folder


def mark_copied(held: Path, windows: int, offset: int) -> None:
    """Say beside a ring, or raise OSError, that what lies before `offset` is in the copy, as far as
    the first `windows` events of its life ask for it."""
    draft = held / f"{_COPIED_NAME}.new"
    draft.unlink(missing_ok=True)
    os.symlink(f"{windows} {offset}", draft)
    os.rename(draft, held / _COPIED_NAME)


def copied_so_far(held: Path) -> tuple[int, int]:
    """Return what `mark_copied` said last; (0, 0) where it said nothing."""
    try:
        windows, offset = map(int, (agreed(held, _COPIED_NAME) or "0 0").split())
    except ValueError:
        return 0, 0
    return windows, offset


def held_anything(run_folder: Path) -> bool:
    """True where a rank of this host held steps back."""
    held = run_folder / HELD_FOLDER
    return held.is_dir() and bool(streams(held))


def file_time(path: Path) -> Callable[[], int]:
    """Return what tells when a file was touched last, in nanoseconds; `ABSENT` without one."""
    mount, name = mount_of(path), str(path)
    # an NFS client keeps the attributes of a file that is not opened for up to a minute
    has_to_open = mount is not None and mount.revalidates_on_open

    def touched_ns() -> int:
        try:
            if not has_to_open:
                return os.stat(name).st_mtime_ns
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ABSENT
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    return touched_ns


def agree(folder: Path, name: str, text: str) -> str:
    """Return what the first who came said under this name, or raise OSError."""
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
