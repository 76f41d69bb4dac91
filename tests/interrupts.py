"""Ctrl-C at random moments, for what has to stand it."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupting(
    chosen: random.Random, least_s: float, most_s: float
) -> Iterator[Callable[[Callable[[], None]], bool]]:
    """Give a function that runs something, raises KeyboardInterrupt in it after a random time, and
    returns whether that came before its end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def is_interrupted(turn: Callable[[], None]) -> bool:
        has_come = False
        try:
            signal.setitimer(signal.ITIMER_REAL, chosen.uniform(least_s, most_s))
            turn()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            has_come = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        return has_come

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield is_interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
