"""What the live check wrote into findings.jsonl: as it is; and what is told of a running job, its
findings and that it stands still, as lines for people, each once.

No numpy here: the launcher reads it too, in a thread beside torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope.record.visibletext import visible
from rankscope.run.filenames import FINDINGS_NAME
from rankscope.run.outfolder import typed
from rankscope.run.stallrecords import Stall, stalls_in


def told_in(folder: Path) -> tuple[list[dict[str, Any]], float | None]:
    """Return the findings and notices of the live check, each with its `age_s`, and the seconds
    since it judged a step or told something, None where it did neither; torn lines are left out."""
    told: list[dict[str, Any]] = []
    try:
        lines = (folder / FINDINGS_NAME).read_text(errors="replace").splitlines()
        age_s = max(0.0, time.time() - (folder / FINDINGS_NAME).stat().st_mtime)
    except OSError:
        return told, None
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line)
            told.append({**fields, "age_s": _age_s(fields["found"])})
    return told, age_s


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
        self._out, self._shown, self._say, self._run_folder = out, shown, say, run_folder
        self._size = self._said = 0
        self._said_stalls: set[tuple[int, bool]] = set()

    def look(self) -> None:
        """Say what is new."""
        if self._run_folder is not None:
            for stall in stalls_in(self._run_folder):
                self._say_stall(stall)
        with contextlib.suppress(OSError):
            size = (self._out / FINDINGS_NAME).stat().st_size
            if size == self._size:
                return
            self._size = size
        told, _ = told_in(self._out)
        for found in told[self._said :]:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._say(visible(self._sentence(found)))
        self._said = len(told)

    def _say_stall(self, stall: Stall) -> None:
        """Say that a job stands still, or goes on; the last line is about its end."""
        key = stall.noticed_ns, bool(stall.over_ns)
        if key not in self._said_stalls and not stall.is_by_end:
            asked = "" if stall.over_ns else f"; ask why: {typed('check', self._shown)}"
            self._say(f"{stall.sentence(time.time_ns())}{asked}")
        self._said_stalls.add(key)

    def _sentence(self, found: Mapping[str, Any]) -> str:
        if "notice" in found:
            return str(found["notice"])
        ago = ""
        if found.get("step_ended"):
            ago = f" ({round(_age_s(found['step_ended']))} s ago)"
        return f"{found['text']}{ago}: {typed('check', self._shown)}"
