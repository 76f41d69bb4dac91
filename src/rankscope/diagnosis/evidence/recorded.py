"""What a trace was asked to hold, which is what its rules can rest on.

`--rs-phases`, `--rs-paths`, `--rs-slots` and `--rs-ranks` leave things out. Where a rule needs what
was left out it is silent, and the report says so: less evidence may cost a finding, and must never
make one.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

from rankscope.diagnosis.evidence.stepview import grouped
from rankscope.globs import glob_matches
from rankscope.record.phases import Phase

__all__ = ["Evidence", "EvidenceScope", "lacking_words", "recorded_evidence"]


class EvidenceScope(enum.Enum):
    """What a trace may lack in every phase, with the setting that asks for it."""

    ROOTS = "root modules", "paths"
    SLOTS = "every slot", "slots"
    RANKS = "every rank", "ranks"
    DIGESTS = "digests of root modules on every rank", ""
    """No setting asks for less: a rank was killed, or a value came too late."""

    def __init__(self, word: str, setting: str) -> None:
        self.word = word
        self.setting = setting
        """As in `--rs-paths`; "" for none."""


Evidence: TypeAlias = Phase | EvidenceScope
"""One thing that a trace may lack."""
_ALL: Final[tuple[Evidence, ...]] = (*Phase, *EvidenceScope)
_DEFAULTS: Final = {"phases": "all", "paths": "*", "slots": "*", "ranks": "all"}


def recorded_evidence(settings: Mapping[str, str]) -> frozenset[Evidence]:
    """Return what a job with these settings (`run.settings` of a trace) records."""
    given = {name: settings.get(name) or default for name, default in _DEFAULTS.items()}
    phases = given["phases"].split(",")
    lacking: set[Evidence] = set()
    if given["phases"] != "all":
        lacking.update(phase for phase in Phase if phase.word not in phases)
    if not any(glob_matches(glob.strip(), "") for glob in given["paths"].split(",")):
        lacking.add(EvidenceScope.ROOTS)
    if given["slots"] != "*":
        lacking.add(EvidenceScope.SLOTS)
    if given["ranks"] != "all":
        lacking.add(EvidenceScope.RANKS)
    return frozenset(_ALL) - lacking


def lacking_words(lacking: Collection[Evidence]) -> str:
    """Return what is lacking, with its settings: "backward, params (--rs-phases)"."""
    words_by_setting = grouped(
        ("phases" if isinstance(each, Phase) else each.setting, each.word)
        for each in _ALL
        if each in lacking
    )
    return "; ".join(
        f"{', '.join(words)}{f' (--rs-{name})' if name else ''}"
        for name, words in words_by_setting.items()
    )
