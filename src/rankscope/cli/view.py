"""What `rankscope show` is asked for: which steps of a trace, and which of their calls, slots and
numbers; and how a trace and a step are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankscope.cli.terminal import Paint
from rankscope.errors import SelectionError
from rankscope.globs import glob_matches, slot_matches
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.texts import ended_words, endings, extent, said_by_ranks, visible
from rankscope.record.value import is_form
from rankscope.tree.crashes import crashes
from rankscope.tree.selection import nothing_matched
from rankscope.tree.views import Node, Step, Trace, steps_named

COLUMNS = (*COUNTS, *NUMBERS, "hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of a trace to show."""

    depth: int | None = None
    path: str = "*"
    steps: tuple[range, ...] | None = None
    """None for the first step of the mode, () for all."""
    mode: Mode | None = None
    """None for train, or eval where there is no train step."""
    phases: frozenset[Phase] = frozenset(Phase) - {Phase.SETUP}
    rank: int | None = None
    columns: tuple[str, ...] | None = None
    """None for those that say something of a value's dtype."""
    slots: str = "*"

    def has_rank(self, ranks: Sequence[int]) -> bool:
        """True for ranks among which is the one that is asked for."""
        return self.rank is None or self.rank in ranks

    def takes_call(self, node: Node) -> bool:
        """True for calls that are asked for, at whatever depth."""
        return (
            self.has_rank(node.ranks)
            and node.phase in (self.phases | {Phase.SETUP})
            and glob_matches(self.path, node.path)
        )

    def takes_slot(self, slot: str) -> bool:
        """True for slots that are asked for; forms only by their name (`form:*`)."""
        if is_form(slot) and not self.slots.startswith("form:"):
            return False
        return self.slots != "none" and slot_matches(self.slots, slot)

    def groups(self, trace: Trace) -> list[Step]:
        """Return setup and steps that are asked for; SelectionError: the trace holds none."""
        setup = list(trace.setup) if Phase.SETUP in self.phases or not trace.steps else []
        if self.phases == {Phase.SETUP}:
            return setup
        mode = trace.default_mode if self.mode is None else self.mode
        spans = self.steps or ()
        steps = [step for step in trace.steps if step.mode is mode]
        if self.steps is None:
            steps = steps[:1]
        elif spans:
            steps = [step for step in steps if any(step.step in span for span in spans)]
        if trace.steps and not steps:
            asked = f"{mode.word} step {', '.join(str(r.start) for r in spans)}".rstrip()
            raise SelectionError(f"the trace holds no {asked}; it holds {steps_named(trace.steps)}")
        return [*setup, *steps]

    def matched_groups(self, trace: Trace) -> list[Step]:
        """Return the same; SelectionError lists what there is where nothing of them is asked
        for."""
        groups = self.groups(trace)
        numbers = [rank["rank"] for rank in trace.run["ranks"]]
        if not self.has_rank(numbers):
            raise SelectionError(f"--rank {self.rank}: the trace holds ranks {ranks_text(numbers)}")
        paths = {node.path for group in groups for node in group.walk()}
        if not any(glob_matches(self.path, path) for path in paths):
            raise nothing_matched("--path", self.path, paths)
        if self.slots not in ("none", "*"):
            slots = {slot.slot for group in groups for node in group.walk() for slot in node.slots}
            if not any(map(self.takes_slot, slots)):
                raise nothing_matched("--slots", self.slots, slots)
        return groups


def parse_columns(text: str) -> tuple[str, ...] | None:
    """Return the columns that --stats names; None for those of a value's dtype. SelectionError:
    no column has that name."""
    words = tuple(c.strip() for c in text.split(",") if c.strip() and c.strip() != "none")
    for column in words:
        if column not in COLUMNS:
            raise SelectionError(
                f"--stats: no column {column!r}; choose from {', '.join(COLUMNS)}, or none"
            )
    return words if text else None


def group_name(trace: Trace, group: Step) -> str:
    """Return how a step or a setup is called, with its life where ranks had several."""
    name = group.head.words
    lives = len({rank["incarnation"] for rank in trace.run["ranks"]})
    return f"{name} (life {group.incarnation} of the ranks)" if lives > 1 else name


def header_lines(trace: Trace, paint: Paint) -> Iterator[str]:
    """Yield the job, how complete its trace is, and the first exception that ended a rank."""
    ended = not ended_words(trace.run) and endings(trace.completeness)
    is_fine = trace.is_complete and not ended and trace.steps
    state = paint("green" if is_fine else "red", trace.state)
    yield f"{paint('bold', visible(str(trace.path)))}  {visible(extent(trace.run))}, {state}"
    for first in crashes(trace)[:1]:
        yield paint("red", visible(f"first: {first} ({ranks_named([first.rank])})"))


def complaint_lines(trace: Trace, paint: Paint) -> Iterator[str]:
    """Yield what ranks could not do as they were asked, and that belongs to no call."""
    ranks = trace.completeness["ranks"]
    for line in said_by_ranks((rank["rank"], text) for rank in ranks for text in rank["errors"]):
        yield paint("yellow", visible(line))
