"""Which value of the test is which of the reference: by canonical path, phase, call and slot.

Micro-batches are not told apart here: a batch may be cut into other ones. What has no partner is
counted, never guessed; a rule for paths that would make most of it meet is proposed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, is_input
from rankscope.errors import SettingError
from rankscope.globs import glob_matches, slot_matches
from rankscope.record.phases import Phase
from rankscope.record.value import is_whole_number
from rankscope.tree.summary import counted
from rankscope.tree.views import Trace

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


# ---- values without a partner --------------------------------------------------------------------


_FEWEST_COMPARED: Final = 0.1
"""A verdict rests on at least this part of the values that both traces hold."""
_NAMED: Final = 3
_FEWEST: Final = 0.5
"""Part of the parameters of a side that must have a partner."""
_FEWEST_VALUES: Final = 0.25
"""The same of all values: those of modules that compiling hides have none."""
_MOST_PREFIXES: Final = 8
"""What many paths end with tells nothing about how they begin."""
_TRIED: Final = 12
_FLAT: Final = ":_flat_param"
"""What FSDP1 makes of the parameters that it wraps together, unless told to keep theirs."""


def _refusing_option(trace: Trace, key: SlotKey) -> str:
    """Return the option that kept a value out of a trace; "" for none."""
    settings = trace.run.get("settings", {})
    if settings.get("digest") == "none":
        return "--rs-digest none"
    takes = {
        "phases": lambda word: word in (key.phase.word, "all"),
        "paths": lambda word: glob_matches(word, key.path),
        "slots": lambda word: slot_matches(word, key.slot),
    }
    for name, is_taken in takes.items():
        words = [word for part in str(settings.get(name, "")).split(",") if (word := part.strip())]
        if words and not any(map(is_taken, words)):
            return f"--rs-{name} {','.join(words)}"
    return ""


class Tally:
    """Counts over the steps of a comparison what was compared, and collects what has no partner."""

    def __init__(self, ref: Trace, test: Trace, paths: PathMap) -> None:
        self._paths, self._traces = paths, (ref, test)
        self._only_ref: dict[SlotKey, str] = {}
        """Values without a partner, with the option of the other trace that left each out, "" for
        none."""
        self._only_test: dict[SlotKey, str] = {}
        self._both: dict[SlotKey, None] = {}
        self.compared = 0
        self.unpaired = 0
        """Values that one of both traces alone holds."""
        self.skipped: Counter[str] = Counter()
        """Why others were not compared."""

    def take(self, aligned: AlignedStep) -> None:
        """Count what has no partner in one step."""
        self.unpaired += len(aligned.only_ref) + len(aligned.only_test)
        self._both.update(dict.fromkeys(value.key for value in aligned.values))
        for key in aligned.only_ref:
            if key not in self._only_ref:
                self._only_ref[key] = _refusing_option(self._traces[1], key)
        for key in aligned.only_test:
            if key not in self._only_test:
                mapped = key._replace(path=self._paths(key.path))
                self._only_test[key] = _refusing_option(self._traces[0], mapped)

    @property
    def in_both(self) -> int:
        """Values that both traces hold."""
        return self.compared + self.skipped.total()

    def lacks(self, too_few: str) -> str:
        """Return why so few values were compared that the rest says nothing about the runs, and
        what to do; "" where enough were. `too_few` says it where most values that both traces hold
        were left out: it names `compared`, `both`, `count` and `reason`."""
        for alone, whose, other in (
            (self._only_ref, "REF", "TEST"),
            (self._only_test, "TEST", "REF"),
        ):
            for noun, fewest, is_meant in (
                ("parameter", _FEWEST, _is_parameter),
                ("value", _FEWEST_VALUES, bool),
            ):
                met = {(k.path, k.slot) for k in self._both if is_meant(k)}
                lost = {(k.path, k.slot) for k, why in alone.items() if not why and is_meant(k)}
                missing, whole = len(lost - met), len(lost | met)
                if missing and len(met) < fewest * whole:
                    return (
                        f"{missing:,} of {counted(whole, noun)} of {whose} "
                        f"{'has' if missing == 1 else 'have'} no partner in {other}: "
                        f"{self._remedy()}"
                    )
        if 0 < self.compared >= _FEWEST_COMPARED * self.in_both:
            return ""
        if self.in_both:
            ((reason, count),) = self.skipped.most_common(1)
            both = counted(self.in_both, "value")
            return too_few.format(compared=self.compared, both=both, count=count, reason=reason)
        why = self._left_out() or "no value was recorded in one of them"
        return f"the traces have no value in common: {why}"

    def _left_out(self) -> str:
        """Return with which options both traces were taken that left values of the other one out;
        "" for none."""
        told = []
        for alone, other in ((self._only_test, "REF"), (self._only_ref, "TEST")):
            options = dict.fromkeys(filter(None, alone.values()))
            if options:
                told.append(f"{other} was taken with {' and '.join(options)}")
        return f"{', '.join(told)}: trace both with the same options" if told else ""

    def _remedy(self) -> str:
        alone = (*self._only_ref, *self._only_test)
        if any(key.slot.endswith(_FLAT) for key in alone):
            return "FSDP1 keeps them flat: give it use_orig_params=True"
        rule, met = self._rule()
        if rule:
            return f"give --map '{rule}', with which {counted(met, 'path')} would meet"
        return (
            "say how paths of TEST become those of REF with --map 'regex=replacement', if these "
            "are traces of one model"
        )

    def _rule(self) -> tuple[str, int]:
        """Return the rule that changes how paths of the test begin and makes most of them meet, and
        how many then do; ("", 0) where none makes half of those meet that could."""
        known = {key.path for key in self._both} | {""}
        theirs = {self._paths(k.path) for k, why in self._only_test.items() if not why} - known
        ours = {k.path for k, why in self._only_ref.items() if not why} - known
        heads: defaultdict[str, list[str]] = defaultdict(list)
        for path in ours:
            for head, tail in _cuts(path):
                heads[tail].append(head)
        candidates: Counter[tuple[str, str]] = Counter()
        for path in theirs:
            for head, tail in _cuts(path):
                if len(heads.get(tail, ())) <= _MOST_PREFIXES:
                    candidates.update((head, other) for other in heads.get(tail, ()))
        best, most = "", 0
        for (head, other), _ in candidates.most_common(_TRIED):
            rule = _rule_of(head, other)
            changed = PathMap([rule])
            met = len({changed(path) for path in theirs} & ours)
            if met > most:
                best, most = rule, met
        return (best, most) if 2 * most >= min(len(theirs), len(ours)) else ("", 0)

    def notes(self) -> Iterator[str]:
        """Yield what has no partner, and which rules changed no path."""
        for alone, whose, other in (
            (self._only_ref, "the reference alone", "the second trace"),
            (self._only_test, "the second trace alone", "the reference"),
        ):
            by_option: defaultdict[str, list[SlotKey]] = defaultdict(list)
            for key, option in alone.items():
                by_option[option].append(key)
            for option, keys in by_option.items():
                why = f", because {other} was taken with {option}" if option else ""
                yield f"{counted(len(keys), 'value')} in {whose}{why}: {_listed(keys)}"
        for rule in self._paths.unused:
            yield f"--map '{rule}' matches no path of the second trace"


def _is_parameter(key: SlotKey) -> bool:
    return key.slot.startswith("param:")


def _listed(keys: Collection[SlotKey]) -> str:
    names = list(dict.fromkeys(f"{key.path or '(root)'}:{key.slot}" for key in keys))
    return f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"


def _cuts(path: str) -> Iterable[tuple[str, str]]:
    parts = path.split(".")
    return ((".".join(parts[:at]), ".".join(parts[at:])) for at in range(len(parts)))


def _rule_of(head: str, other: str) -> str:
    """Return the rule that makes paths which begin with one head begin with another one."""
    if not head:
        return rf"^(.)={other}.\1"
    return rf"^{re.escape(head)}\.={other}{'.' if other else ''}"
