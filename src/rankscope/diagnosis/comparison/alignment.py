"""Which value of the test is which of the reference: by canonical path, phase, call and slot.

Micro-batches are not told apart here: a batch may be cut into other ones. What has no partner is
listed, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, is_input
from rankscope.errors import SettingError
from rankscope.record.phases import Phase
from rankscope.record.value import is_whole_number

COMPARED: Final = frozenset({Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.GRADS, Phase.PARAMS})
"""What checkpointing runs again and the collectives belong to one topology alone."""
FORWARDS: Final = frozenset({Phase.FORWARD})


class SlotKey(NamedTuple):
    """What makes a value of one trace that of another: the reference's words."""

    phase: Phase
    path: str
    ordinal: int
    slot: str

    @property
    def parameter(self) -> tuple[str, str]:
        """Of a parameter, its gradient or its update: the module's path and the own name."""
        return self.path, self.slot.partition(":")[2]


class PathMap:
    """Rewrites the paths of the test into those of the reference: each of the rules
    `regex=replacement` is applied once to every path, in order. SettingError where one is none."""

    @classmethod
    def of(cls, rules: PathMap | Iterable[str]) -> PathMap:
        """Return rules that were read already as they are."""
        return rules if isinstance(rules, PathMap) else cls([*rules])

    def __init__(self, rules: Sequence[str] = ()) -> None:
        self._rules = [(rule, *self._read(rule)) for rule in rules]
        self._used: set[str] = set()
        self._known: dict[str, str] = {}
        self._origins: dict[str, str] = {}

    @classmethod
    def load(cls, file: Path, rules: Sequence[str] = ()) -> PathMap:
        """Return the rules of a file, one in a line, and further ones. Empty lines and those that
        begin with `#` say nothing. SettingError where the file cannot be read."""
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{file}: the path rules cannot be read: {error}") from None
        return cls([*(line for line in lines if line and not line.startswith("#")), *rules])

    @staticmethod
    def _read(rule: str) -> tuple[re.Pattern[str], str]:
        pattern, sign, replacement = rule.rpartition("=")
        if not sign or not pattern:
            raise SettingError(
                f"{rule!r} is no rule for paths: write 'regex=replacement', such as "
                r"'^transformer\.h\.=model.layers.'"
            )
        try:
            made = re.compile(pattern.strip())
            made.sub(replacement.strip(), "")
        except re.error as error:
            raise SettingError(f"{rule!r}: {error}; write 'regex=replacement'") from None
        return made, replacement.strip()

    def __call__(self, path: str) -> str:
        """Return what the reference calls a path of the test; SettingError where another path of
        the test becomes the same one."""
        if not self._rules:
            return path
        if path not in self._known:
            found = path
            for rule, pattern, replacement in self._rules:
                found, count = pattern.subn(replacement, found)
                if count:
                    self._used.add(rule)
            other = self._origins.setdefault(found, path)
            if other != path:
                raise SettingError(
                    f"the rules for paths make {found or '(root)'} of both {other or '(root)'} and "
                    f"{path or '(root)'}",
                    "write rules that leave every path of the second trace one of its own",
                )
            self._known[path] = found
        return self._known[path]

    @property
    def unused(self) -> list[str]:
        """The rules that matched no path so far."""
        return [rule for rule, *_ in self._rules if rule not in self._used]


@dataclass(slots=True, eq=False, kw_only=True)
class AlignedValue:
    """One value of both traces, by micro-batch on either side."""

    key: SlotKey
    ref: dict[int, SlotValues]
    test: dict[int, SlotValues]

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of both sides."""
        return {v.dtype for side in (self.ref, self.test) for v in side.values()}

    @property
    def first_ref(self) -> SlotValues:
        """The reference's, in its first micro-batch."""
        return next(iter(self.ref.values()))

    @property
    def first_test(self) -> SlotValues:
        """The test's, in its first micro-batch."""
        return next(iter(self.test.values()))

    @property
    def call(self) -> CallView:
        """The reference's first call that has it."""
        return self.first_ref.call

    @property
    def is_input(self) -> bool:
        """True for what a call begins with."""
        return is_input(self.key.slot, self.key.phase)

    @property
    def is_vector(self) -> bool:
        """True where the reference's value has one dim."""
        return len(whole_shape(self.first_ref)) == 1

    @property
    def is_discrete(self) -> bool:
        """True where both sides hold indices, counts or a mask."""
        return all(map(is_whole_number, self.dtypes))

    @property
    def is_mask(self) -> bool:
        """True where both sides hold a mask."""
        return self.dtypes == {"bool"}

    @property
    def test_ranks(self) -> Array:
        """Ranks of the test that have it, sorted."""
        return np.unique(np.concatenate([values.ranks for values in self.test.values()]))

    @property
    def is_root_input(self) -> bool:
        """True for what the root was handed."""
        return self.key.phase is Phase.FORWARD and not self.key.path and self.is_input


def whole_shape(values: SlotValues) -> tuple[int, ...]:
    """Return the shape of the whole tensor; where nothing tells it, that of one rank."""
    view = values.views[0]
    return view.global_shape or next(iter(view.shapes().values()), ())


@dataclass(slots=True, kw_only=True)
class AlignedStep:
    """The values of one step of both traces."""

    values: list[AlignedValue] = field(default_factory=list)
    """In the order in which one process computes them."""
    only_ref: list[SlotKey] = field(default_factory=list)
    only_test: list[SlotKey] = field(default_factory=list)
    """With the path that the test has."""


def align(
    ref: StepView, test: StepView, paths: PathMap, phases: frozenset[Phase] = COMPARED
) -> AlignedStep:
    """Return which values of two steps belong together, of the phases that are compared."""
    theirs: dict[SlotKey, dict[int, SlotValues]] = {}
    original: dict[SlotKey, str] = {}
    for values in test.values(*phases):
        call = values.call
        renamed = SlotKey(call.phase, paths(call.path), call.ordinal, values.slot)
        theirs.setdefault(renamed, {})[call.micro_batch or 0] = values
        original[renamed] = call.path
    ours: dict[SlotKey, dict[int, SlotValues]] = {}
    for key, values in in_order(ref):
        if key.phase in phases:
            ours.setdefault(key, {})[values.call.micro_batch or 0] = values
    found = AlignedStep()
    for key, own in ours.items():
        partners = [other for other in _same(key, ours) if other in theirs]
        found.values += [AlignedValue(key=key, ref=own, test=theirs[each]) for each in partners]
        for other in partners:
            original.pop(other, None)
        if not partners:
            found.only_ref.append(key)
    found.only_test = [key._replace(path=path) for key, path in original.items()]
    return found


def _same(key: SlotKey, ours: Mapping[SlotKey, object]) -> Iterator[SlotKey]:
    """Yield the slots of the test that hold what the reference has in this one: where only one side
    has module hooks of its own, what they made (`returned`) stands for the output."""
    yield key
    head, dot, rest = key.slot.partition(".")
    swapped = {"output": "returned", "returned": "output"}.get(head)
    if swapped:
        other = key._replace(slot=f"{swapped}{dot}{rest}")
        if other not in ours:
            yield other


def in_order(step_view: StepView) -> Iterator[tuple[SlotKey, SlotValues]]:
    """Yield every value of a step: of a call what goes in, then its children, then what comes
    out; choices (indices, masks) before the numbers that follow from them."""
    for top in step_view.calls:
        if top.parent is not None or top.phase not in COMPARED:
            continue
        waiting: list[tuple[CallView, bool]] = [(top, True)]
        while waiting:
            call, is_entered = waiting.pop()
            if call.phase not in COMPARED:
                continue
            found = [
                (slot, values)
                for slot, values in call.slots.items()
                if values.dtype != "python" and is_input(slot, call.phase) is is_entered
            ]
            found.sort(key=lambda each: not is_whole_number(each[1].dtype))
            for slot, values in found:
                yield SlotKey(call.phase, call.path, call.ordinal, slot), values
            if is_entered:
                waiting.append((call, False))
                waiting.extend((child, True) for child in reversed(call.children))
