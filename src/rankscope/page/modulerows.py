"""The modules of a page: a row for each path that a call has, and for the containers around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankscope.record.visibletext import visible

__all__ = ["ModuleRows"]


class ModuleRows:
    """Rows are numbered as modules are first seen; the page draws them as a tree."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._classes: list[str] = []
        self._parents: list[int] = []
        self._turns: dict[int, int] = {}
        """When each was first called in forward: how siblings are ordered."""

    def __len__(self) -> int:
        return len(self._classes)

    def of(self, path: str, class_name: str = "") -> int:
        """Return the row of a path; it is made, with those around it, where there is none."""
        missing = []
        around = path
        while around not in self._numbers:
            missing.append(around)
            if not around or (around.startswith("@") and "." not in around):
                break  # a root
            around = around.rpartition(".")[0]
        parent = self._numbers.get(around, -1)
        for each in reversed(missing):
            self._numbers[each] = len(self._classes)
            self._classes.append("")
            self._parents.append(parent)
            parent = self._numbers[each]
        found = self._numbers[path]
        if class_name and not self._classes[found]:
            self._classes[found] = class_name
        return found

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
        found: set[int] = set()
        for row in rows:
            found.update((row, *self._up(row)))
        beside = {self._parents[row] for row in rows}
        return found | {r for r, parent in enumerate(self._parents) if parent in beside}

    def _up(self, row: int) -> Iterator[int]:
        while row >= 0:
            yield row
            row = self._parents[row]

    def as_json(self) -> dict[str, list[str] | list[int]]:
        """Return paths and classes in words, the row around each (-1 for none), and when each was
        first called; what never was comes last."""
        never = len(self._turns)
        return {
            "paths": [visible(path) for path in self._numbers],
            "classes": [visible(name) for name in self._classes],
            "parents": self._parents,
            "turns": [self._turns.get(row, never) for row in range(len(self))],
        }
