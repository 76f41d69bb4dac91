"""Whose turn it is to write: a lock no KeyboardInterrupt, fork or dead thread can leave shut.

A turn is taken by putting a token into a dictionary with one atomic `setdefault`, and given back by
deleting it. A token whose owner is no longer inside the code it took it for is stale: an exception
threw the owner out. It is found by looking at the owner's frames, and taken over.
"""

from __future__ import annotations

import enum
import sys
import time
from types import CodeType, FrameType
from typing import Final

__all__ = ["InterruptSafeLock", "Token", "Wait"]

Token = tuple[int]
"""Identity of the thread; every attempt makes a new tuple, so that attempts differ by identity."""

_PATIENCE_S: Final = 1.0
"""How long a thread waits for another one's turn before it looks whether that one still works."""


class Wait(enum.Enum):
    """How waiting for a turn ended."""

    TAKEN = "taken"
    TAKEN_OVER = "taken over"
    """From an owner that left without giving it back: what it worked on needs repair."""
    REFUSED = "refused"
    """This call is nested in the owner's, or the owner takes too long."""


class InterruptSafeLock:
    """Take by `holder.setdefault(0, token) is token`, else `wait`; give back by `del holder[0]`."""

    __slots__ = ("_codes", "_thieves", "holder")

    def __init__(self, codes: frozenset[CodeType]) -> None:
        """Make a free turn.

        Args:
            codes: the functions that hold it while they run.
        """
        self.holder: dict[int, Token] = {}
        self._codes = codes
        self._thieves: dict[int, tuple[Token, Token]] = {}
        """By the identity of a stale token: that token, kept alive, and who took it over."""

    def wait(self, token: Token, depth: int) -> Wait:
        """Get the turn after somebody else had it.

        Args:
            token: what `setdefault` did not take.
            depth: frames from here to the caller of the function that wants the turn.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            owner = self.holder.setdefault(0, token)
            if owner is token:
                return Wait.TAKEN
            is_mine = owner[0] == token[0]
            if is_mine or time.monotonic() > deadline:
                frame = sys._getframe(depth) if is_mine else _frame_of(owner)
                if self._is_at_work(frame):
                    return Wait.REFUSED
                if self._take_over(owner, token):
                    return Wait.TAKEN_OVER
                deadline = time.monotonic() + _PATIENCE_S
            time.sleep(0)

    def _take_over(self, owner: Token, token: Token) -> bool:
        """Replace a stale token; of several threads that try, one does."""
        thief = self._thieves.setdefault(id(owner), (owner, token))[1]
        is_mine = thief[0] == token[0]  # an earlier attempt of this thread was interrupted
        if not is_mine and self._is_at_work(_frame_of(thief)):
            return False
        if self.holder.get(0) is not owner:
            return False
        self.holder[0] = token
        return True

    def _is_at_work(self, frame: FrameType | None) -> bool:
        """True where this frame, or one that called it, is in the code the turn is for."""
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False


def _frame_of(token: Token) -> FrameType | None:
    return sys._current_frames().get(token[0])
