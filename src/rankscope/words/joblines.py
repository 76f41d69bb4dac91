"""Lines that are said beside a job: what the live check wrote into findings.jsonl, that the job
stands still, and at its end the verdict.

No numpy here: the launcher says them, in a thread beside torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rankscope.record.texts import NO_STEP, visible
from rankscope.run.folders import FINDINGS_NAME
from rankscope.run.jobstatus import stalls_in
from rankscope.run.prepare import command_text
from rankscope.run.processes import companion_environment
from rankscope.words.reports import report_of, verdict_line, where_line

_MOST_S: Final = 10.0
"""A small trace takes one second, that of a thousand ranks minutes: nobody waits for those."""
_POLL_S: Final = 0.1


def told_in(folder: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return the findings and notices of the live check, each with its `age_s`, and the seconds
    since it judged a step or told something, None where it did neither; torn lines are left out."""
    entries: list[dict[str, Any]] = []
    try:
        lines = (folder / FINDINGS_NAME).read_text(errors="replace").splitlines()
        age_s = max(0.0, time.time() - (folder / FINDINGS_NAME).stat().st_mtime)
    except OSError:
        return entries, None
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line)
            entries.append({**fields, "age_s": _age_s(fields["found"])})
    return entries, age_s


def _age_s(moment: str) -> float:
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(moment)
    return max(0.0, age.total_seconds())


class JobNotices:
    """Follows findings.jsonl of one trace folder, and the stalls that a companion notes."""

    def __init__(
        self, out: Path, shown: str, say: Callable[[str], object], run_folder: Path | None = None
    ) -> None:
        """`say` takes each line; `shown`: the trace folder as it may be typed here; `run_folder`:
        where the companion of this host notes stalls, None where they are not said."""
        self._out, self._say, self._run_folder = out, say, run_folder
        self._asked = command_text("check", shown)
        self._size = self._said = 0
        self._said_stalls: set[tuple[int, bool]] = set()

    def look(self) -> None:
        """Say what is new."""
        if self._run_folder is not None:
            for stall in stalls_in(self._run_folder):
                key = stall.noticed_ns, bool(stall.over_ns)
                if key not in self._said_stalls and not stall.is_by_end:  # that has its own line
                    asked = "" if stall.over_ns else f"; ask why: {self._asked}"
                    self._say(f"{stall.sentence(time.time_ns())}{asked}")
                self._said_stalls.add(key)
        with contextlib.suppress(OSError):
            size = (self._out / FINDINGS_NAME).stat().st_size
            if size == self._size:
                return
            self._size = size
        entries, _ = told_in(self._out)
        for entry in entries[self._said :]:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._say(visible(self._sentence(entry)))
        self._said = len(entries)

    def _sentence(self, entry: Mapping[str, Any]) -> str:
        if "notice" in entry:
            return str(entry["notice"])
        ended = entry.get("step_ended")
        ago = f" ({round(_age_s(ended))} s ago)" if ended else ""
        return f"{entry['text']}{ago}: {self._asked}"


def job_verdict(
    out: Path,
    shown: str,
    most_s: float = _MOST_S,
    is_hurried: Callable[[], bool] = lambda: False,
    tick: Callable[[], object] = lambda: None,
) -> str:
    """Return the verdict, where the first finding is, and what to type; "" where nothing was judged
    or no step traced, which the line before says. It is judged once more, in a process beside this
    one: what was found while the job ran may have another cause in the whole trace.

    `shown` is the folder as it may be typed here; `is_hurried` is true once somebody does not want
    to wait any longer; `tick` is called now and then.
    """
    asked, deadline = command_text("check", shown), time.monotonic() + min(most_s, _MOST_S)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankscope", "check", str(out), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=companion_environment(),
            cwd=out,
            start_new_session=True,
            text=True,
        )
    except OSError:
        return f"not judged yet: {asked}"
    answer = ""
    while process.returncode is None and time.monotonic() < deadline and not is_hurried():
        with contextlib.suppress(subprocess.TimeoutExpired):
            answer, _ = process.communicate(timeout=_POLL_S)
        tick()
    if process.returncode is None:
        process.kill()
        process.communicate()
    try:
        data = json.loads(answer)
        report = report_of(data["command"], data["result"])
    except (KeyError, TypeError, ValueError):  # no answer, or an error
        first = next(
            (visible(str(entry["text"])) for entry in told_in(out)[0] if "text" in entry), ""
        )
        text = f"; first while it ran: {first}" if first else ""
        return f"not judged yet{text}: {asked}"
    if report.lacks and (not report.judged or report.lacks.startswith(NO_STEP)):
        return ""
    first = "".join(f"; first: {' '.join(where_line(f).split())}" for f in report.origins[:1])
    return f"{visible(f'{verdict_line(report)}{first}')}: {asked}"
