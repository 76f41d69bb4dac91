"""One training as a callback sees it: traced from where it begins to where it ends, then judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankscope.agent.activation import attach, close, current_session
from rankscope.agent.guard import attempt, say, text_of
from rankscope.diagnosis.check import check
from rankscope.record.ranks import EndReason
from rankscope.words.reports import answer_lines, verdict_line


class TracedTraining:
    """Begins a trace, marks its steps, ends it and says the verdict.

    Where this process is traced already (`rankscope run`, `RANKSCOPE=1`, a block around the
    training) it does nothing: who began the trace ends it and knows the steps. Whatever fails in
    here is said on stderr and never raised into the training.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Begin nothing yet; `settings`: any setting by its keyword (`steps="0-2"`,
        `out="trace"`)."""
        self.path: Path | None = None
        """The trace folder, once the training has ended, on the rank that speaks for the job (the
        lowest that is traced); None on all others, and where somebody else traces."""
        self._settings = dict(settings)
        self._is_running = False

    def begin(self, *, has_steps: bool = True) -> None:
        """Trace from here on. Every rank calls it. With `has_steps`, `step` is going to be called
        at the end of every train step; without, optimizers end steps."""
        global _running
        if self._is_running:  # the framework begins again after a failure: the trace goes on
            return
        if _running is not None:
            say("the training before did not come to its end: its trace ends here")
            _running.end()
        if current_session() is not None:
            return
        attach(self._settings)
        self._is_running = current_session() is not None
        _running = self if self._is_running else None
        if has_steps:
            self.step()  # so that no optimizer ends the first step either

    def step(self) -> None:
        """Close the current train step here, and from now on nowhere else."""
        session = current_session() if self._is_running else None
        if session is not None:
            session.step()

    def end(self) -> None:
        """End the trace; the rank that speaks for the job waits for the tree and says the verdict.
        Safe to call again."""
        global _running
        if not self._is_running:
            return
        self._is_running, _running = False, None
        self.path = close(EndReason.CLOSED)
        if self.path is None:
            return
        if (error := attempt(_say_verdict, self.path)) is not None:
            say(f"{self.path}: no verdict: {text_of(error)}")


_running: TracedTraining | None = None
"""What traces now in this process; still there where a training was broken off, as in a notebook
whose cell was interrupted."""


def _say_verdict(path: Path) -> None:
    report = check(path)
    for line in (verdict_line(report), *answer_lines(report, "first", "where")):
        say(line)
