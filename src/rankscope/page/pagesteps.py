"""The steps of a page, and the names by which its links call them."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.record.call import Mode
from rankscope.record.finding import Finding
from rankscope.record.phases import Phase
from rankscope.record.rankplace import step_label

__all__ = ["PageStep", "PageSteps"]


@dataclass(frozen=True, slots=True)
class PageStep:
    """One step of one mode in one life of the ranks, or a setup."""

    mode: Mode
    number: int
    incarnation: int
    is_setup: bool

    @property
    def key(self) -> str:
        """Name in links: `3` of train steps, `eval-3`, `setup`; `life1-3` in a later life."""
        name = "setup" if self.is_setup else str(self.number)
        if not self.is_setup and self.mode is not Mode.TRAIN:
            name = f"{self.mode.word}-{name}"
        return f"life{self.incarnation}-{name}" if self.incarnation else name

    @property
    def label(self) -> str:
        """The step in words."""
        return step_label(self.mode, self.number, self.incarnation, is_setup=self.is_setup)


class PageSteps:
    """The steps in the order they were handed out."""

    def __init__(self) -> None:
        self.all: list[PageStep] = []

    def add(self, step: PageStep) -> int:
        """Add a step; return its number."""
        self.all.append(step)
        return len(self.all) - 1

    def of_finding(self, finding: Finding) -> int | None:
        """Return the number of the step a finding is in, None where the page has none."""
        life = int(finding.evidence.get("incarnation", 0) or 0)
        is_setup = finding.phase is Phase.SETUP
        for number, step in enumerate(self.all):
            if step.incarnation != life or step.is_setup != is_setup:
                continue
            if is_setup or (step.mode is finding.mode and step.number == finding.step):
                return number
        return None

    def as_json(self) -> list[dict[str, str]]:
        """Return what the page needs of each."""
        return [{"key": step.key, "label": step.label} for step in self.all]
