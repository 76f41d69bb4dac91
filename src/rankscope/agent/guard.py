"""Between rankscope and the user's program: nothing that fails here may leave here."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rankscope.capture.torch_internals import is_compiling

__all__ = ["MAX_FAILURES", "Guard", "say"]

MAX_FAILURES = 20
"""Failures inside hooks after which tracing is switched off on this rank, visibly."""


def say(text: str) -> None:
    """Write one line of rankscope's own to stderr; stdout belongs to the job."""
    if sys.stderr is None:  # print would take it for stdout
        return
    try:
        print(f"rankscope: {text}", file=sys.stderr, flush=True)  # noqa: T201  # to stderr
    except (OSError, ValueError, AttributeError):  # a closed stderr must not hurt the job
        return


class Guard:
    """Turns functions into hooks that never raise and do nothing while a graph is being
    compiled.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self.failures = 0
        self.is_too_deep = False
        """A hook found no room left on Python's stack, and could not even say so."""

    def hook(self, body: Callable[..., None]) -> Callable[..., None]:
        """Return `body` as a hook.

        Dynamo sees `is_compiling()` as a constant, so a guarded hook leaves one graph where an
        unguarded one would split it.
        """

        def guarded(*arguments: object) -> None:
            if is_compiling():
                return
            try:
                body(*arguments)
            except RecursionError:  # one more call, and this would raise as well
                self.is_too_deep = True
            except Exception as error:  # noqa: BLE001  # nothing of ours raises into the program
                self.failed(error)

        # a tensor saved with it loses nothing: torch need not warn
        guarded.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return guarded

    def failed(self, error: Exception) -> None:
        """Count a failure and report it; reporting must not raise either."""
        self.failures += 1
        try:
            self._failed(error)
        except Exception as second:  # noqa: BLE001  # the spool may be what failed: say it once
            if self.failures == 1:
                say(f"cannot record a failure ({second!r} after {error!r}); the job goes on")
