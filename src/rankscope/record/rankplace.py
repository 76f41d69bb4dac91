"""Where a rank is, or was last, in words: the page and `rankscope top` say it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named
from rankscope.record.streams import EndReason

NOTHING: Final = "-"
STATES: Final = {
    EndReason.EXIT.value: "ended",
    EndReason.CLOSED.value: "closed by the program",
    EndReason.RAISED.value: "raised",
    EndReason.LOST.value: "lost",
    EndReason.SWITCHED_OFF.value: "rankscope switched off",
    EndReason.RUNNING.value: "running",
}


def step_label(mode: Mode, step: int, incarnation: int, *, is_setup: bool) -> str:
    """Return a step in words: `train step 3`, `setup`, `eval step 0 (life 1)`."""
    name = "setup" if is_setup else f"{mode.word} step {step}"
    return f"{name} (life {incarnation})" if incarnation else name


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank is: in the innermost open call, else behind the call that began last."""

    end: str
    """An `EndReason`'s value."""
    step: str = ""
    """As `step_label` makes it; "" where no call is known."""
    phase: Phase | None = None
    path: str = ""
    op: str = ""
    members: tuple[int, ...] = ()

    @property
    def state(self) -> str:
        """Whether it runs, or how it ended."""
        return STATES.get(self.end, self.end)

    @property
    def where(self) -> str:
        """Phase and module."""
        if self.phase is None:
            return NOTHING
        return f"{self.phase.word} of {self.path or '(root)'}"

    @property
    def waits_in(self) -> str:
        """The collective in which it stands, and its ranks."""
        return f"{self.op} of {ranks_named(self.members)}" if self.op else NOTHING


def alike_places(places: Mapping[int, RankPlace]) -> list[tuple[RankPlace, tuple[int, ...]]]:
    """Return each place with its ranks, in order of the lowest rank."""
    alike: dict[RankPlace, list[int]] = {}
    for rank, place in sorted(places.items()):
        alike.setdefault(place, []).append(rank)
    return [(place, tuple(ranks)) for place, ranks in alike.items()]
