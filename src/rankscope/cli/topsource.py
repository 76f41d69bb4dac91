"""What `rankscope top` shows: ranks of a running job or of a finished trace, and the verdict."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.diagnosis.check import check
from rankscope.diagnosis.finalreport import report_json
from rankscope.errors import RankscopeError, TraceError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.live.jobsummary import job_summary
from rankscope.live.jobwatch import JobWatch, RankStatus
from rankscope.page.rankplaces import places_in
from rankscope.run.filenames import REPLICA_FOLDER, TRACE_NAME
from rankscope.run.findingnotices import told_in
from rankscope.run.stallrecords import stalls_in
from rankscope.settings import settings_from
from rankscope.tree.damage import UNREADABLE
from rankscope.tree.reader import open_trace
from rankscope.tree.unfinished import is_at_work

__all__ = ["TopSource"]

_BETWEEN_S: Final = 1.0
"""Between the two looks of one answer, whose difference is what comes in."""
_VERDICT_S: Final = 600.0
_MOST_JUDGED_BYTES: Final = 256 << 20
"""Records that one answer judges. Of more the live check tells."""
_NICE: Final = 10
_NO_VERDICT: Final[dict[str, Any]] = {"verdict": None, "age_s": None, "trouble": "", "findings": []}
_FINDING: Final = {"kind", "message", "mode", "step", "ranks", "phase", "path", "slot"}
"""Fields that are shown of one."""


class TopSource:
    """One trace folder, and what of it is shown."""

    def __init__(self, folder: Path, *, layout: Path | None = None, judges: bool = True) -> None:
        """Look at it for the first time; `layout` is for the verdict, which `judges` asks for.

        Raises:
            LayoutError: the layouts cannot be read.
            TraceError: there is nothing in the folder, and nobody at work on it.
        """
        self.sort = "rank"
        self._ranks: tuple[int, ...] | None = None
        self._folder, self._judges = folder, judges
        self._layouts = None if layout is None else LayoutFile.load(layout)
        self._watch = JobWatch(folder)
        self._ended: tuple[list[RankStatus], dict[str, Any]] | None = None
        if not self._is_ended():
            self._watch.look()
            if not self._watch.ranks() and not is_at_work(folder, self._watch.run):
                raise TraceError(
                    f"{folder}: holds neither {TRACE_NAME} nor records in {REPLICA_FOLDER}/, and "
                    "nobody is at work on it; give the trace folder of a running job"
                )

    def choose(self, ranks: str) -> None:
        """Show these ranks alone: `0-3,8` or `all`.

        Raises:
            SettingError: this is no list of ranks.
        """
        self._ranks = settings_from({"ranks": ranks.strip() or "all"}, {}).ranks

    def one(self) -> dict[str, Any]:
        """Return what there is to say, the verdict included; takes as long as that takes."""
        if self._is_ended():
            return self.now()
        time.sleep(_BETWEEN_S)
        return self.now(self._judged() if self._judges else None)

    def now(self, check: dict[str, Any] | None = None) -> dict[str, Any]:
        """Look again; return what there is to say, by default with what the live check told."""
        if self._is_ended():
            if self._ended is None:
                self._ended = self._finished()
            statuses, found = self._ended
            return self._summary(statuses, state="ended", **found)
        self._watch.look()
        run = self._watch.run
        return self._summary(
            self._watch.ranks(),
            state="running" if is_at_work(self._folder, run) else "deserted",
            run_id=run["id"],
            world_size=self._watch.world_size,
            watch=self._watch,
            check=check or self._told(),
        )

    def close(self) -> None:
        """Close what is open."""
        self._watch.close()

    def _summary(
        self, statuses: Sequence[RankStatus], *, check: dict[str, Any], **known: Any
    ) -> dict[str, Any]:
        chosen = [s for s in statuses if self._ranks is None or s.rank in self._ranks]
        now_ns = time.time_ns()
        stalls = [s.sentence(now_ns) for s in stalls_in(self._folder) if not s.over_ns]
        return {
            **job_summary(self._folder, chosen, sort=self.sort, **known),
            "stalls": stalls if known["state"] == "running" else [],
            "check": check,
        }

    def _judged(self) -> dict[str, Any]:
        """Judge all that has come, once, as `rankscope check` does."""
        size = self._watch.totals().received_bytes
        if size > _MOST_JUDGED_BYTES:
            gb = f"{size / 1e9:.1f} GB of records"
            return self._told(f"not judged as a whole: {gb}; rankscope check judges them")
        if not size:
            return _NO_VERDICT
        began = time.monotonic()

        def go_on(what: str, part: float) -> None:
            if time.monotonic() - began > _VERDICT_S:
                raise TraceError(f"not judged in {_VERDICT_S:.0f} s: {what}, {part:.0%} done")

        with contextlib.suppress(OSError):
            os.nice(_NICE)
        try:
            report = check(open_trace(self._folder, progress=go_on), self._layouts, progress=go_on)
        except (RankscopeError, OSError, MemoryError, RecursionError, *UNREADABLE) as error:
            return {**_NO_VERDICT, "trouble": f"{type(error).__name__}: {error}"}
        return {**_NO_VERDICT, **report_json(report), "age_s": time.monotonic() - began}

    def _told(self, *said: str) -> dict[str, Any]:
        """Return what the live check told so far; `said` tells why nothing else was asked."""
        if not self._judges:
            return {**_NO_VERDICT, "trouble": "off"}
        told, age_s = told_in(self._folder)
        is_off = self._watch.run["settings"].get("live-check") == "0"
        if is_off or age_s is None:
            what = "is off for this job" if is_off else "has judged no step"
            said += (f"the live check {what}; rankscope check judges what has come",)
        said += tuple(str(each["notice"]) for each in told[::-1] if "notice" in each)
        findings = [{**each, "origin": True} for each in told if each.keys() >= _FINDING]
        verdict = "fault" if findings else None if said else "incomplete"
        trouble = "; ".join(said)
        return {"verdict": verdict, "age_s": age_s, "trouble": trouble, "findings": findings}

    def _is_ended(self) -> bool:
        return (self._folder / TRACE_NAME).exists()

    def _finished(self) -> tuple[list[RankStatus], dict[str, Any]]:
        """Return how the ranks of a finished trace ended, and what else is said of it."""
        trace = open_trace(self._folder)
        report = check(trace, self._layouts)
        places, _ = places_in(trace)
        hosts = {int(each["rank"]): str(each["host"]) for each in trace.run["ranks"]}
        statuses = [
            RankStatus(rank=rank, host=hosts.get(rank, ""), place=place)
            for rank, place in sorted(places.items())
        ]
        answer = {**_NO_VERDICT, **report_json(report), "age_s": 0.0}
        return statuses, {
            "run_id": str(trace.run["id"]),
            "world_size": int(trace.run["world_size"]),
            "check": answer,
        }
