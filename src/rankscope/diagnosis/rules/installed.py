"""Rules that other packages add, each an entry point of the group `rankscope.rules` that names a
`StepRule`. What such a rule does wrong costs its own findings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from threading import Thread
from typing import Final

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.coverage import Coverage

_GROUP: Final = "rankscope.rules"
_MOST_S: Final = 10.0
"""So long a rule may take for one step."""


class InstalledRule:
    """A rule of another package, left out from its first trouble on."""

    def __init__(self, entry: EntryPoint, coverage: Coverage) -> None:
        """Load nothing yet: `coverage` is told what goes wrong."""
        self._entry, self._coverage = entry, coverage
        self._is_left_out = False

    def __call__(self, step_view: JudgedStep) -> list[Candidate]:
        """Return what the rule finds in a step; nothing once it raised or took too long."""
        if self._is_left_out:
            return []
        answers: list[list[Candidate]] = []
        trouble = f"took longer than {_MOST_S:g} s for one step"

        def judge() -> None:
            nonlocal trouble
            try:
                answers.append(_checked(self._entry.load()(step_view)))
            except Exception as error:  # noqa: BLE001  # not our code: any exception is a note
                trouble = f"failed with {type(error).__name__}: {error}"

        # A thread that never ends can be left behind: it ends with this process. Python has no
        # other way to leave a function that does not return.
        thread = Thread(target=judge, name=f"rule {self._entry.name}", daemon=True)
        thread.start()
        thread.join(_MOST_S)
        if answers:
            return answers[0]
        self._is_left_out = True
        package = self._entry.dist.name if self._entry.dist else self._entry.module
        self._coverage.note(
            f"the rule {self._entry.name!r} of the package {package} {trouble}; "
            "no step from there on is judged by it"
        )
        return []


def installed_rules(coverage: Coverage) -> Iterator[Callable[[JudgedStep], Iterable[Candidate]]]:
    """Yield the rules of other packages, by name."""
    entries = {(entry.name, entry.value): entry for entry in entry_points(group=_GROUP)}
    for _, entry in sorted(entries.items()):
        yield InstalledRule(entry, coverage)


def _checked(candidates: Iterable[Candidate]) -> list[Candidate]:
    listed = list(candidates)
    for candidate in listed:
        if not isinstance(candidate, Candidate):
            raise TypeError(f"a rule yields candidates, not {type(candidate).__name__}")
    return listed
