"""Functions of ours that stand in the place of torch's for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]


class StandIns:
    """Replaces attributes of classes and operators, and puts the originals back."""

    def __init__(self) -> None:
        self._restores: dict[tuple[int, str], Callable[[], None]] = {}
        self.is_on = False

    def put(self, owner: Any, name: str, around: Callable[[_Function], _Function]) -> None:
        """Put `around(original)` in its place, once, where this torch has such a name."""
        kept = vars(owner).get(name)
        if kept is None or (id(owner), name) in self._restores:
            return
        original = getattr(owner, name)
        ours = functools.update_wrapper(around(original), original)
        setattr(owner, name, ours)

        def restore() -> None:
            if vars(owner).get(name) is ours:
                setattr(owner, name, kept)

        self._restores[id(owner), name] = restore
        self.is_on = True

    def take_off(self) -> None:
        """Put the originals back. Where somebody else has put theirs over ours since, ours is still
        called: each of ours asks whether this is on."""
        self.is_on = False
        restores, self._restores = self._restores, {}
        for restore in restores.values():
            restore()
