"""What a trace was asked to hold, which is what its rules can rest on.

`--rs-phases`, `--rs-paths`, `--rs-slots` and `--rs-ranks` leave things out. Where a rule needs what
was left out it is silent, and the report says so: less evidence may cost a finding, and must never
make one.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final

from rankscope.diagnosis.evidence.stepview import grouped
from rankscope.globs import glob_matches
from rankscope.record.phases import Phase

__all__ = ["Evidence", "lacking_words", "recorded_evidence"]


class Evidence(enum.Enum):
    """One thing that a trace may lack, with the setting that asks for it."""

    SETUP = "setup", "phases"
    FORWARD = "forward", "phases"
    RECOMPUTE = "recompute", "phases"
    BACKWARD = "backward", "phases"
    GRADS = "grads", "phases"
    PARAMS = "params", "phases"
    COLLECTIVE = "collective", "phases"
    ACCUMULATED = "accumulated", "phases"
    ROOTS = "root modules", "paths"
    SLOTS = "every slot", "slots"
    RANKS = "every rank", "ranks"
    DIGESTS = "digests of root modules on every rank", ""
    """No setting asks for less: a rank was killed, or a value came too late."""

    def __init__(self, word: str, setting: str) -> None:
        self.word = word
        self.setting = setting
        """As in `--rs-phases`; "" for none."""


_DEFAULTS: Final = {"phases": "all", "paths": "*", "slots": "*", "ranks": "all"}


def recorded_evidence(settings: Mapping[str, str]) -> frozenset[Evidence]:
    """Return what a job with these settings (`run.settings` of a trace) records."""
    given = {name: settings.get(name) or default for name, default in _DEFAULTS.items()}
    phases = given["phases"].split(",")
    lacking = {Evidence[p.name] for p in Phase if given["phases"] != "all" and p.word not in phases}
    if not any(glob_matches(glob.strip(), "") for glob in given["paths"].split(",")):
        lacking.add(Evidence.ROOTS)
    if given["slots"] != "*":
        lacking.add(Evidence.SLOTS)
    if given["ranks"] != "all":
        lacking.add(Evidence.RANKS)
    return frozenset(Evidence) - lacking


def lacking_words(lacking: Collection[Evidence]) -> str:
    """Return what is lacking, with its settings: "backward, params (--rs-phases)"."""
    by_setting = grouped((each.setting, each.word) for each in Evidence if each in lacking)
    return "; ".join(
        f"{', '.join(words)}{f' (--rs-{name})' if name else ''}"
        for name, words in by_setting.items()
    )
