"""One write at a time: a lock that no KeyboardInterrupt, fork or dead thread leaves shut."""

from __future__ import annotations

import time
from typing import Final

Token = tuple[int]
"""Identity of the thread; every attempt makes a new tuple, so that attempts differ by identity."""

_PATIENCE_S: Final = 1.0
"""A thread that waits longer for another one's write gives up: that one may wait for it."""


class WriteLock:
    """Whoever has put its token into `holder` writes::

        token = (get_ident(),)
        try:
            if holder.setdefault(0, token) is not token and not lock.wait(token):
                return  # nested in a write of this thread, or another one takes too long
            ...
        finally:
            if 0 in holder and holder[0] is token:
                del holder[0]

    Python runs signal handlers, and raises what another thread puts into this one, only at calls
    and at jumps that are taken. An exception there finds the token either not in `holder`, or in it
    and inside `try`; between the comparison and `del` there is no such place. With
    `threading.Lock` there would be: after `acquire()` returned, and (Python 3.14) after `with` took
    it. That one would also stop a signal handler, or a finalizer, that writes inside a write.
    """

    __slots__ = ("holder",)

    def __init__(self) -> None:
        self.holder: dict[int, Token] = {}

    def wait(self, token: Token) -> bool:
        """Take the lock after somebody else's write; False inside a write of this very thread,
        which a signal handler or a finalizer has interrupted, and where another takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while (owner := self.holder.setdefault(0, token)) is not token:
            if owner[0] == token[0] or time.monotonic() > deadline:
                return False
            time.sleep(0)
        return True
