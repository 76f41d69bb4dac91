"""The last line on a finished trace: what `rankscope check` says of it, in its own words."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.record.visibletext import visible
from rankscope.run.companions import companion_environment
from rankscope.run.findingnotices import told_in
from rankscope.run.outfolder import typed

_MOST_S = 10.0
"""A small trace takes one second, that of a thousand ranks minutes: nobody waits for those."""
_POLL_S = 0.1
_WHERE = "  where: "
_SAID_BEFORE = ("nothing was judged", "no step was traced")
"""Of verdicts; the line on where the trace lies says so, with the step at which the job ended."""


def verdict_line(
    out: Path,
    shown: str,
    most_s: float = _MOST_S,
    is_hurried: Callable[[], bool] = lambda: False,
    tick: Callable[[], object] = lambda: None,
) -> str:
    """Return the verdict, where the first finding is, and what to type; "" where nothing was judged
    or no step traced, which the line before says. It is judged anew, in a process beside this one:
    what was found while the job ran may have another cause in the whole trace.

    `shown` is the folder as it may be typed here; `is_hurried` is true once somebody does not want
    to wait any longer; `tick` is called now and then.
    """
    asked, deadline = typed("check", shown), time.monotonic() + min(most_s, _MOST_S)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankscope", "check", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**companion_environment(), "COLUMNS": "0", "NO_COLOR": "1"},
            cwd=out,
            start_new_session=True,
            text=True,
        )
    except OSError:
        return f"not judged yet: {asked}"
    said = ""
    while process.returncode is None and time.monotonic() < deadline and not is_hurried():
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=_POLL_S)
        tick()
    if process.returncode is None:
        process.kill()
        process.communicate()
    if process.returncode not in (0, 1) or not said:
        first = next((visible(str(each["text"])) for each in told_in(out)[0] if "text" in each), "")
        told = f"; first while it ran: {first}" if first else ""
        return f"not judged yet{told}: {asked}"
    verdict, *rest = said.splitlines()
    if any(words in verdict for words in _SAID_BEFORE):
        return ""
    where = next((line.removeprefix(_WHERE) for line in rest if line.startswith(_WHERE)), "")
    first = " ".join(["; first:", *where.split()]) if where else ""
    return f"{verdict}{first}: {asked}"
