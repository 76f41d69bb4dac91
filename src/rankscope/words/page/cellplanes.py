"""The map of a page while it is made: modules as rows, the steps, and planes of bytes: for every
step, phase and kind of slot one class for each module and rank.

Most cells say the same, so a plane is deflated to next to nothing; the browser inflates it when it
is first looked at.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode
from rankscope.record.finding import Finding
from rankscope.record.phases import Phase
from rankscope.record.texts import visible
from rankscope.tree.step import StepHead

Array = NDArray[Any]
CALL_KIND: Final = "call"
"""Kind of cells about the call itself: it raised, it is missing."""
PlaneKey = tuple[int, Phase, str]
"""Step, phase, kind of slot."""


class MapClass(enum.IntEnum):
    """A class of cells, and the word by which the page says it."""

    word: str

    def __new__(cls, value: int, word: str) -> MapClass:
        """Make a member of its number and its word."""
        member = int.__new__(cls, value)
        member._value_, member.word = value, word
        return member


class CellClass(MapClass):
    """What is to be said of a cell of `check`; where several values share a cell, the greatest."""

    NOTHING = 0, "no call"
    NOT_JUDGED = 1, "not judged"
    ALIKE = 2, "as the others"
    DIFFERS = 3, "differs"
    NOT_FINITE = 4, "not finite"
    MISSING = 5, "missing"
    NOT_LEFT = 6, "not left"
    RAISED = 7, "raised"


class DistanceClass(MapClass):
    """How far a value of `diff` is from the reference's, in units of what rounding explains."""

    NOTHING = 0, "no call"
    NOT_COMPARED = 1, "not judged by itself"
    SAME = 2, "the same"
    FAR_BELOW = 3, "to 0.1 of noise"
    BELOW = 4, "within noise"
    ABOVE = 5, "to 10 x noise"
    FAR_ABOVE = 6, "to 100 x noise"
    BEYOND = 7, "beyond"
    MISSING = 8, "in one run alone"


def slot_kind(slot: str) -> str:
    """Return the kind of a slot: `input` of `input.0`, `param` of `param:weight`."""
    return slot.replace(":", ".").split(".")[0]


class ModuleRows:
    """The rows of a page, numbered at first sight: a module each, and the containers around."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._classes: list[str] = []
        self._parents: list[int] = []
        self._turns: dict[int, int] = {}
        """When each was first called in forward: how siblings are ordered."""

    def __len__(self) -> int:
        return len(self._classes)

    def of(self, path: str, class_name: str = "") -> int:
        """Return the row of a path; adds it and the rows around it on first sight."""
        missing = []
        around = path
        while around not in self._numbers:
            missing.append(around)
            if not around or (around.startswith("@") and "." not in around):
                break  # a root
            around = around.rpartition(".")[0]
        parent = self._numbers.get(around, -1)
        for name in reversed(missing):
            self._numbers[name] = len(self._classes)
            self._classes.append("")
            self._parents.append(parent)
            parent = self._numbers[name]
        row = self._numbers[path]
        if class_name and not self._classes[row]:
            self._classes[row] = class_name
        return row

    def called(self, row: int) -> None:
        """Note that forward called a module: siblings stand in the order of their calls."""
        while row >= 0 and row not in self._turns:
            self._turns[row] = len(self._turns)
            row = self._parents[row]

    def known(self, path: str) -> int | None:
        """Return the row of a path, None where no call has it."""
        return self._numbers.get(path)

    @property
    def paths(self) -> list[str]:
        """Path by row."""
        return list(self._numbers)

    def around(self, rows: Iterable[int]) -> set[int]:
        """Return rows with all rows around them and beside them: ancestors and siblings."""
        near: set[int] = set()
        for row in rows:
            while row >= 0:
                near.add(row)
                row = self._parents[row]
        parents = {self._parents[row] for row in rows}
        return near | {r for r, parent in enumerate(self._parents) if parent in parents}

    def as_json(self) -> dict[str, list[str] | list[int]]:
        """Return paths, classes, parents (-1 for none) and turns of first calls; uncalled rows are
        last."""
        never = len(self._turns)
        return {
            "paths": [visible(path) for path in self._numbers],
            "classes": [visible(name) for name in self._classes],
            "parents": self._parents,
            "turns": [self._turns.get(row, never) for row in range(len(self))],
        }


class PageSteps:
    """The steps in the order they were handed out."""

    def __init__(self) -> None:
        self.all: list[StepHead] = []

    def add(self, step: StepHead) -> int:
        """Add a step; return its number."""
        self.all.append(step)
        return len(self.all) - 1

    def of_finding(self, finding: Finding) -> int | None:
        """Return the number of the step a finding is in, None where the page has none."""
        life = int(finding.evidence.get("incarnation", 0) or 0)
        is_setup = finding.phase is Phase.SETUP
        for number, step in enumerate(self.all):
            if step.incarnation != life or step.is_setup != is_setup:
                continue
            if is_setup or (step.mode is finding.mode and step.step == finding.step):
                return number
        return None

    def key(self, number: int) -> str:
        """Name in links: `3` of train steps, `eval-3`, `setup`; `life1-3` in a later life."""
        step = self.all[number]
        name = "setup" if step.is_setup else str(step.step)
        if not step.is_setup and step.mode is not Mode.TRAIN:
            name = f"{step.mode.word}-{name}"
        return f"life{step.incarnation}-{name}" if step.incarnation else name

    def as_json(self) -> list[dict[str, str]]:
        """Return what the page needs of each."""
        numbers = range(len(self.all))
        return [{"key": self.key(number), "label": self.all[number].label} for number in numbers]


class CellPlanes:
    """The planes of a page while they are made: those of one step open, the others deflated."""

    def __init__(self, rows: ModuleRows, world: int) -> None:
        self._rows, self.world = rows, world
        self._open: dict[PlaneKey, Array] = {}
        self._closed: dict[PlaneKey, bytes] = {}

    def made(self) -> list[PlaneKey]:
        """Return which planes there are, by step, phase and kind."""
        return sorted({*self._open, *self._closed})

    def plane(self, step: int, phase: Phase, kind: str) -> Array:
        """Return the plane [modules or more, ranks] u8 to write into."""
        key = (step, phase, kind)
        plane = self._open.get(key)
        if plane is None or len(plane) < len(self._rows):
            plane = self._open[key] = self._whole(key, max(len(self._rows) * 5 // 4, 16))
        return plane

    def raise_to(
        self, step: int, phase: Phase, kind: str, row: int, ranks: Any, cell: int | Array
    ) -> None:
        """Raise the class of cells of some ranks (list, slice or array), never lower it."""
        line = self.plane(step, phase, kind)[row]
        line[ranks] = np.maximum(line[ranks], np.asarray(cell, np.uint8))

    def close(self) -> None:
        """Deflate what was written: a step is done."""
        for key, plane in self._open.items():
            self._closed[key] = zlib.compress(plane[: len(self._rows)].tobytes(), 6)
        self._open.clear()

    def merged(self, step: int, phase: Phase) -> Array:
        """Return [modules, ranks] the greatest class over the kinds of slots."""
        greatest = np.zeros((len(self._rows), self.world), np.uint8)
        for key in self.made():
            if key[:2] == (step, phase):
                np.maximum(greatest, self._whole(key), out=greatest)
        return greatest

    def deflated(self) -> dict[PlaneKey, bytes]:
        """Return every plane, [modules, ranks] row by row, deflated (zlib)."""
        self.close()
        return {key: zlib.compress(self._whole(key).tobytes(), 9) for key in self.made()}

    def alike_ranks(self) -> list[list[int]]:
        """Return ranks in groups of equal classes everywhere, the lowest rank first."""
        labels = np.zeros(self.world, np.int64)
        for key in self.made():
            lines = np.ascontiguousarray(self._whole(key).T)
            if not lines.size:
                continue
            as_one = lines.view(np.dtype((np.void, lines.shape[1]))).ravel()
            _, patterns = np.unique(as_one, return_inverse=True)
            # renumbered after every plane, so that products of labels never overflow
            _, labels = np.unique(labels * (patterns.max() + 1) + patterns, return_inverse=True)
        groups: dict[int, list[int]] = {}
        for rank, label in enumerate(labels.tolist()):
            groups.setdefault(label, []).append(rank)
        return sorted(groups.values())

    def _whole(self, key: PlaneKey, room: int = 0) -> Array:
        """Return a copy of a plane with a row for each module, and up to `room` rows."""
        rows = max(room, len(self._rows))
        grown = np.zeros((rows, self.world), np.uint8)
        stored = self._open.get(key)
        if stored is None and key in self._closed:
            packed = zlib.decompress(self._closed[key])
            stored = np.frombuffer(packed, np.uint8).reshape(-1, self.world)
        if stored is not None:
            grown[: len(stored)] = stored[:rows]
        return grown
