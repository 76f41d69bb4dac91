"""How much of a trace the rules could judge.

`--rs-phases`, `--rs-paths`, `--rs-slots` and `--rs-ranks` leave things out. A rule that needs what
was left out is silent, and the report says so: less evidence may cost a finding, never make one.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from rankscope.diagnosis.evidence.issuedcollectives import issues_of
from rankscope.diagnosis.evidence.reducedpasses import PassesApart
from rankscope.diagnosis.evidence.replicas import InferredReplicas, Layouts
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped, sibling_path
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.finding import MOST_NAMED
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import counted


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
_ALL: Final[tuple[Evidence, ...]] = (*Phase, *EvidenceScope)
_DEFAULTS: Final = {"phases": "all", "paths": "*", "slots": "*", "ranks": "all"}


def recorded_evidence(settings: Mapping[str, str]) -> frozenset[Evidence]:
    """Return what a job with these settings (`run.settings` of a trace) records."""
    chosen = {name: settings.get(name) or default for name, default in _DEFAULTS.items()}
    phases = chosen["phases"].split(",")
    lacking: set[Evidence] = set()
    if chosen["phases"] != "all":
        lacking.update(phase for phase in Phase if phase.word not in phases)
    if not any(glob_matches(glob.strip(), "") for glob in chosen["paths"].split(",")):
        lacking.add(EvidenceScope.ROOTS)
    if chosen["slots"] != "*":
        lacking.add(EvidenceScope.SLOTS)
    if chosen["ranks"] != "all":
        lacking.add(EvidenceScope.RANKS)
    return frozenset(_ALL) - lacking


def lacking_words(lacking: Collection[Evidence]) -> str:
    """Return what is lacking, with its settings: "backward, params (--rs-phases)"."""
    words_by_setting = grouped(
        ("phases" if isinstance(evidence, Phase) else evidence.setting, evidence.word)
        for evidence in _ALL
        if evidence in lacking
    )
    return "; ".join(
        f"{', '.join(words)}{f' (--rs-{name})' if name else ''}"
        for name, words in words_by_setting.items()
    )


_IN_PARTS: Final = "held in parts: no two recorded ranks have the same one"
_OF_OTHER_PASSES: Final = "of other backward passes on some ranks"
_MOST_UNJUDGED: Final = 8
_MOST_ASKS: Final = 5
_OF_ROWS: Final = Phase.having(lambda facts: facts.is_activation) | {Phase.COLLECTIVE}
"""What a rank makes of its rows, or hands in of its own."""


@dataclass(slots=True)
class Coverage:
    """How many values rules were applied to, and why they were not to others."""

    compared: int = 0
    with_others: int = 0
    """Those of `compared` that were held to what another rank has, or another run of the call."""
    recorded: int = 0
    undeclared: int = 0
    """Those of `compared` that several ranks hold, in a layout that nothing describes, and that
    were held to no others."""
    _undeclared_places: dict[str, str] = field(default_factory=dict)
    """{a place as `layers.*.fc:output`: the first such value}, one more than are named"""
    is_any_inside: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    _not_asked: dict[str, str] = field(default_factory=dict)
    """{what rules ask that the trace cannot tell: the first place where it matters, "" for none}"""
    _not_recorded: set[Evidence] = field(default_factory=set)
    _lacking: defaultdict[tuple[str, str], Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """{(what it is of, the unknown fact): how often on each rank, or of each step}"""
    _seen: set[int] = field(default_factory=set)
    _looked_at: set[int] = field(default_factory=set)

    def applied(self, *compared: SlotValues) -> None:
        """Count values that were compared with others; without finite elements as screened."""
        for values in compared:
            self.screened(values)
            if id(values) not in self._seen and not values.is_all_nonfinite:
                self._seen.add(id(values))
                self.with_others += 1

    def screened(self, values: SlotValues) -> None:
        """Count a value that a rule looked at by itself."""
        if id(values) not in self._looked_at:
            self._looked_at.add(id(values))
            self.compared += 1

    def was_held(self, values: SlotValues) -> bool:
        """True for a value of this step that was held to others."""
        return id(values) in self._seen

    def next_step(self) -> None:
        """Forget which values were counted: they go with their step."""
        self._seen.clear()
        self._looked_at.clear()

    def count(
        self,
        step_view: StepView,
        layouts: Layouts,
        replicas: InferredReplicas,
        lines: Sequence[Array],
        misaligned: PassesApart | None,
    ) -> None:
        """Count the values of a step behind its rules; ranks of one of the lines have rows of their
        own. `misaligned`: what is of other passes on some ranks."""
        if step_view.mode is Mode.UNKNOWN:
            self._lacking["step", "mode"][step_view.step] += 1
        for issue in issues_of(step_view):
            if issue.lacks:
                noun = "message" if issue.is_message else "collective"
                self._lacking[noun, issue.lacks].update(issue.ranks.tolist())
        for call in step_view.calls:
            for values in call.slots.values():
                if values.dtype == "python":
                    continue
                self.recorded += 1
                self.is_any_inside |= bool(call.path)
                if len(values.ranks) < 2 or id(values) in self._seen:
                    continue
                if misaligned is not None and misaligned.parts(
                    call.phase, call.micro_batch, values.ranks
                ):
                    self.skipped[_OF_OTHER_PASSES] += 1
                else:
                    self._count_skipped(values, layouts, replicas, lines)

    def _count_skipped(
        self,
        values: SlotValues,
        layouts: Layouts,
        replicas: InferredReplicas,
        lines: Sequence[Array],
    ) -> None:
        if values.is_all_nonfinite:
            self.skipped["no finite element on any rank"] += 1
            return
        path, slot = values.call.path, values.slot
        is_undeclared = values.source == "unknown" and not layouts.placements(path, slot)
        reason = "layout unknown" if is_undeclared else _IN_PARTS
        if layouts.is_own(values):
            is_undeclared, reason = False, "each rank's own, as declared"
        # no layout could make one tensor of activations of data-parallel ranks, nor of statistics
        is_of_rows = values.call.phase in _OF_ROWS or slot.startswith("buffer:")
        if (
            is_undeclared
            and is_of_rows
            and all(
                any(np.isin(part, line).all() for line in lines)
                for part in replicas.by_part(values.ranks, fewest=1)
            )
        ):
            is_undeclared, reason = False, "these ranks have rows of their own"
        self.skipped[reason if values.is_known.any() else "not digested"] += 1
        if is_undeclared and id(values) in self._looked_at:
            self.undeclared += 1
            if len(self._undeclared_places) <= MOST_NAMED:
                place_of_siblings = f"{sibling_path(path) or '(root)'}:{slot}"
                self._undeclared_places.setdefault(place_of_siblings, values.name)

    @property
    def undeclared_names(self) -> str:
        """The undeclared values as `layers.*.fc:output`, of many the first: "" for none."""
        if len(self._undeclared_places) <= MOST_NAMED:
            return ", ".join(self._undeclared_places)
        return f"first {next(iter(self._undeclared_places.values()))}"

    def not_asked(self, asks: str, lacking: Set[Evidence], example: str) -> None:
        """Keep what was not judged, why, and the first place where it matters."""
        self._not_asked.setdefault(asks, example)
        self._not_recorded |= lacking

    def unjudged(self) -> Iterator[str]:
        """Yield a line for what the trace was not asked to hold, and for every unknown fact."""
        if self._not_asked:
            listed = [f"{asks} ({place})" for asks, place in self._not_asked.items() if place]
            listed += [asks for asks, place in self._not_asked.items() if not place]
            more = f", {len(listed) - _MOST_ASKS} more" if len(listed) > _MOST_ASKS else ""
            asks = ", ".join(listed[:_MOST_ASKS])
            yield f"not judged without {lacking_words(self._not_recorded)}: {asks}{more}"
        for (noun, fact), of in [*self._lacking.items()][:_MOST_UNJUDGED]:
            unjudged = f"order of collectives, messages and hangs of {ranks_named(set(of))}"
            if noun == "step":
                unjudged = "batches that ranks have in common, and how many steps each rank took"
            times = counted(of.total(), noun)
            name = "names" if of.total() == 1 else "name"
            yield f"not judged: {unjudged}, because {times} {name} no {fact}"

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes:
            self.notes.append(text)
