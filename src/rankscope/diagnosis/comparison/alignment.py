"""Which value of the test is which of the reference: by canonical path, phase, call and slot.

Micro-batches are not told apart here: a batch may be cut into other ones. What has no partner is
counted, never guessed. Models that go by other names are paired by their parameters.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np

from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    is_below,
    is_input,
)
from rankscope.errors import SettingError
from rankscope.globs import glob_matches, slot_matches
from rankscope.record.phases import Phase
from rankscope.record.texts import counted
from rankscope.record.value import is_whole_number
from rankscope.tree.views import Trace

COMPARED: Final = frozenset({Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.GRADS, Phase.PARAMS})
"""What checkpointing runs again and the collectives belong to one topology alone."""
FORWARDS: Final = frozenset({Phase.FORWARD})
_SWAPPED: Final = {"output": "returned", "returned": "output"}
_AROUND: Final = "@@"
"""Stands before paths that the reference gives to other modules."""


def _covers(head: str, path: str) -> bool:
    """True for a beginning of paths; the roots beside the first are not inside of it."""
    return is_below(path, head) if head else not path.startswith("@")


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
    `regex=replacement` is applied once to every path, in order. SettingError for any other text.
    Without rules, `heads` says which beginning of paths is which of the reference's."""

    @classmethod
    def of(cls, rules: PathMap | Iterable[str]) -> PathMap:
        """Return rules that were read already as they are."""
        return rules if isinstance(rules, PathMap) else cls([*rules])

    def __init__(self, rules: Sequence[str] = (), heads: Mapping[str, str] | None = None) -> None:
        self._rules = [(rule, *self._read(rule)) for rule in rules]
        self._heads = heads or {}
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
                f"{rule!r} is not a rule for paths: write 'regex=replacement', such as "
                r"'^transformer\.h\.=model.layers.'"
            )
        try:
            compiled = re.compile(pattern.strip())
            compiled.sub(replacement.strip(), "")
        except re.error as error:
            raise SettingError(f"{rule!r}: {error}; write 'regex=replacement'") from None
        return compiled, replacement.strip()

    def __call__(self, path: str) -> str:
        """Return what the reference calls a path; SettingError where two paths become one."""
        if not self._rules:
            return self._below_head(path)
        if path not in self._known:
            mapped = path
            for rule, pattern, replacement in self._rules:
                mapped, count = pattern.subn(replacement, mapped)
                if count:
                    self._used.add(rule)
            origin = self._origins.setdefault(mapped, path)
            if origin != path:
                raise SettingError(
                    f"the rules for paths make {mapped or '(root)'} of both {origin or '(root)'} "
                    f"and {path or '(root)'}",
                    "write rules that leave every path of the second trace one of its own",
                )
            self._known[path] = mapped
        return self._known[path]

    def _below_head(self, path: str) -> str:
        heads = sorted((head for head in self._heads if _covers(head, path)), key=len)
        if not heads:
            is_taken = any(_covers(head, path) for head in self._heads.values())
            return f"{_AROUND}{path}" if is_taken else path
        below = path.removeprefix(heads[-1]).removeprefix(".")
        ref_head = self._heads[heads[-1]]
        if not below and [*self._heads.values()].count(ref_head) > 1:
            return f"{_AROUND}{path}"  # a stage is called with what is none of the reference's
        return ".".join(filter(None, (ref_head, below)))

    def __bool__(self) -> bool:
        return bool(self._rules or self._heads)

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
    def is_handed_to_root(self) -> bool:
        """True for what the largest root of either side was handed."""
        is_root_of_test = not self.first_test.call.node.path and self.call.parent is not None
        is_root = not self.key.path or is_root_of_test
        return self.key.phase is Phase.FORWARD and is_root and self.is_input


def whole_shape(values: SlotValues) -> tuple[int, ...]:
    """Return the shape of the whole tensor; where nothing tells it, that of one rank."""
    shapes = (v.global_shape or next(iter(v.shapes().values()), ()) for v in values.views)
    return next(filter(None, shapes), ())  # ranks without a piece of it tell none


@dataclass(slots=True, kw_only=True)
class AlignedStep:
    """The values of one step of both traces."""

    values: list[AlignedValue] = field(default_factory=list)
    """In the order in which one process computes them."""
    only_ref: list[SlotKey] = field(default_factory=list)
    only_test: list[SlotKey] = field(default_factory=list)


def align(ref: StepView, test: StepView, phases: frozenset[Phase] = COMPARED) -> AlignedStep:
    """Return which values of two steps belong together, of the phases that are compared.

    Where only one side has module hooks of its own, what they made (`returned`) stands for the
    output of the other side.
    """
    test_values, ref_values = (_by_key(view, phases) for view in (test, ref))
    only_test = {
        key: next(iter(by_micro_batch.values())).call.node.path
        for key, by_micro_batch in test_values.items()
    }
    step = AlignedStep()
    for key, by_micro_batch in ref_values.items():
        keys = [key]
        head, dot, tail = key.slot.partition(".")
        if head in _SWAPPED:
            hooked = key._replace(slot=f"{_SWAPPED[head]}{dot}{tail}")
            keys += [hooked] if hooked not in ref_values else []
        partners = [partner for partner in keys if partner in test_values]
        for partner in partners:
            only_test.pop(partner, None)
            value = AlignedValue(key=key, ref=by_micro_batch, test=test_values[partner])
            step.values.append(value)
        if not partners:
            step.only_ref.append(key)
    step.only_test = [key._replace(path=path) for key, path in only_test.items()]
    return step


def _by_key(step_view: StepView, phases: frozenset[Phase]) -> dict[SlotKey, dict[int, SlotValues]]:
    by_key: dict[SlotKey, dict[int, SlotValues]] = {}
    for key, values in in_order(step_view):
        if key.phase in phases:
            by_key.setdefault(key, {})[values.call.micro_batch or 0] = values
    return by_key


def in_order(step_view: StepView) -> Iterator[tuple[SlotKey, SlotValues]]:
    """Yield every value of a step: of a call what goes in, then its children, then what comes
    out; choices (indices, masks) before the numbers that follow from them. Behind optimizer steps
    each rank's first value of a parameter stands beside the first of others: owners have it behind
    their step, ranks that are sent it when the step ends."""
    by_parameter: defaultdict[tuple[str, str], list[SlotValues]] = defaultdict(list)
    for values in sorted(step_view.values(Phase.PARAMS), key=lambda v: v.call.ordinal):
        lives = by_parameter[values.parameter]
        at = next(
            (n for n, v in enumerate(lives) if not np.isin(v.ranks, values.ranks).any()), None
        )
        if at is None:
            lives.append(values)
        else:
            lives[at] = SlotValues(lives[at].call, [*lives[at].views, *values.views])
    parameters = {
        (v.call, v.slot): (ordinal, v)
        for lives in by_parameter.values()
        for ordinal, v in enumerate(lives)
    }
    waiting = [(call, True) for call in reversed(step_view.calls) if call.parent is None]
    while waiting:
        call, is_entered = waiting.pop()
        if call.phase not in COMPARED:
            continue
        slots = [
            (slot, values)
            for slot, values in call.slots.items()
            if values.dtype != "python" and is_input(slot, call.phase) is is_entered
        ]
        for slot, values in sorted(slots, key=lambda pair: not is_whole_number(pair[1].dtype)):
            if call.phase is not Phase.PARAMS:
                yield SlotKey(call.phase, call.path, call.ordinal, slot), values
            elif (call, slot) in parameters:
                ordinal, values = parameters[call, slot]
                yield SlotKey(call.phase, call.path, ordinal, slot), values
        if is_entered:
            waiting.append((call, False))
            waiting.extend((child, True) for child in reversed(call.children))


# ---- models beside each other --------------------------------------------------------------------


_NEAR: Final = 2e-2
"""Relative distance of what two models began with, up to which a coarse dtype explains it."""


class _Head(NamedTuple):
    """How the paths of a model begin: those of a root, or of a module inside of it."""

    path: str
    root: str

    @property
    def is_root(self) -> bool:
        return self.path == self.root

    def overlaps(self, head: _Head) -> bool:
        """True where one is inside the other."""
        is_inside = is_below(self.path, head.path) or is_below(head.path, self.path)
        return self.root == head.root and is_inside


_Model = dict[tuple[str, str], SlotValues]
"""The parameters below a head, by path from there and slot."""


class BeginningOfRun(Protocol):
    """What one run began with."""

    setup: StepView | None

    def began_with(self, values: SlotValues) -> Array:
        """Return a sketch, NaN where none is known."""


def paired_models(ref: BeginningOfRun, test: BeginningOfRun) -> dict[str, str]:
    """Return {beginning of paths of the test: that of the reference} of models that have the same
    parameters, where a root goes by another name: one run wraps it, or calls another root first.
    {} where all go by the same, and where several fit a root as well. Several roots of the test
    that hold different parameters of one model are stages of it."""
    if ref.setup is None or test.setup is None:
        return {}
    refs, tests = _models(ref.setup), _models(test.setup)
    first = _Head("", "")
    are_single = all({*map(_root, models)} == {first} for models in (refs, tests))
    if are_single and refs[first].keys() & tests[first].keys():
        return {}
    fits: dict[tuple[_Head, _Head], tuple[int, ...]] = {}
    for head, ref_head in _chances(tests, refs):
        names, ref_names = tests[head].keys(), refs[ref_head].keys()
        shared, count = len(names & ref_names), len(names) + len(ref_names)
        is_whole = shared in (
            len(names) if head.is_root else -1,
            len(ref_names) if ref_head.is_root else -1,
        )
        if is_whole or 3 * shared > count:  # more than half of all names
            unlike = _unlike((ref, refs[ref_head]), (test, tests[head]))
            fits[head, ref_head] = (-shared, *unlike)
    pairs: dict[_Head, _Head] = {}
    # the largest models first; of those that fit as well, the one of this name, then the outermost
    for head, ref_head in sorted(
        fits, key=lambda pair: (fits[pair], pair[0] != pair[1], sum(len(h.path) for h in pair))
    ):
        if (head, ref_head) not in fits:
            continue
        rivals = [fit for (h, r), fit in fits.items() if (h == head) != (r == ref_head)]
        if head == ref_head or min(rivals, default=(1,)) > fits[head, ref_head]:
            pairs[head] = ref_head
            overlapping = [p for p in fits if p[0].overlaps(head) or p[1].overlaps(ref_head)]
            for pair in overlapping:
                del fits[pair]
    for head in (h for h in tests if h.is_root and h not in pairs):
        for ref_head in dict.fromkeys(pairs.values()):  # stages that one process calls as one model
            taken_names = {name for h, r in pairs.items() if r == ref_head for name in tests[h]}
            if tests[head].keys() <= refs[ref_head].keys() - taken_names:
                pairs[head] = ref_head
                break
    is_other = any(head != ref_head for head, ref_head in pairs.items())
    return {head.path: ref_head.path for head, ref_head in pairs.items()} if is_other else {}


def _root(head: _Head) -> _Head:
    return _Head(head.root, head.root)


def _chances(*sides: Mapping[_Head, _Model]) -> set[tuple[_Head, _Head]]:
    """Return pairs of heads of which one is a root, or both have most parameters of theirs."""
    roots = [{*map(_root, models)} for models in sides]
    large = [{h for h in m if 2 * len(m[h]) > len(m[_root(h)])} for m in sides]
    pairs = (roots[0], sides[1]), (sides[0], roots[1]), large
    return {pair for heads, ref_heads in pairs for pair in itertools.product(heads, ref_heads)}


def _models(setup: StepView) -> dict[_Head, _Model]:
    models: defaultdict[_Head, _Model] = defaultdict(dict)
    for values in setup.parameters(Phase.SETUP):
        top = values.call.top.path
        root = top if top.startswith("@") else ""
        names = [name for name in values.call.path[len(root) :].split(".") if name]
        for count in range(len(names) + 1):
            head = ".".join(filter(None, (root, *names[:count])))
            models[_Head(head, root)][".".join(names[count:]), values.slot] = values
    return models


def _unlike(*models: tuple[BeginningOfRun, _Model]) -> tuple[int, int, int]:
    """Return how many parameters of two models have no partner or another shape, how many are
    trained in one alone, and how many began with other numbers."""
    (ref, refs), (test, tests) = models
    pairs = [(refs[name], tests[name]) for name in refs.keys() & tests.keys()]
    return (
        len(refs.keys() ^ tests.keys()) + sum(whole_shape(a) != whole_shape(b) for a, b in pairs),
        sum(a.needs_gradient != b.needs_gradient for a, b in pairs),
        sum(_is_apart(ref.began_with(a), test.began_with(b)) for a, b in pairs),
    )


def _is_apart(ref: Array, test: Array) -> bool:
    return bool(np.linalg.norm(test - ref) > _NEAR * np.linalg.norm(ref))


# ---- values without a partner --------------------------------------------------------------------


_FEWEST_COMPARED: Final = 0.1
"""A verdict rests on at least this part of the values that both traces hold."""
_NAMED: Final = 3
_FEWEST: Final = 0.5
"""Part of the parameters of a side that must have a partner."""
_FEWEST_VALUES: Final = 0.25
"""The same of all values: those of modules that compiling hides have none."""
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
        self.skipped: Counter[str] = Counter()

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

    def leave_out(self, reason: str, count: int) -> None:
        """Count values as not compared that turned out to say nothing."""
        if count:
            self.compared -= count
            self.skipped[reason] += count

    @property
    def in_both(self) -> int:
        """Values that both traces hold."""
        return self.compared + self.skipped.total()

    def lacks(self, too_few: str) -> str:
        """Return why so few values were compared that the rest says nothing about the runs, and
        what to do; "" where enough were. `too_few` says it where most values that both traces hold
        were left out: it names `compared`, `both`, `count` and `reason`."""
        sides = (self._only_ref, "REF", "TEST"), (self._only_test, "TEST", "REF")
        nouns = ("parameter", _FEWEST, "param:"), ("value", _FEWEST_VALUES, "")
        for (unpaired, side, partner), (noun, fewest, head) in itertools.product(sides, nouns):
            paired = {(key.path, key.slot) for key in self._both if key.slot.startswith(head)}
            lost = {(k.path, k.slot) for k, option in unpaired.items() if not option}
            lost = {(path, slot) for path, slot in lost if slot.startswith(head)}
            missing, total = len(lost - paired), len(lost | paired)
            if missing and len(paired) < fewest * total:
                return (
                    f"{missing:,} of {counted(total, noun)} of {side} "
                    f"{'has' if missing == 1 else 'have'} no partner in {partner}: {self._remedy()}"
                )
        if 0 < self.compared >= _FEWEST_COMPARED * self.in_both:
            return ""
        if self.in_both:
            ((reason, count),) = self.skipped.most_common(1)
            values = counted(self.in_both, "value")
            return too_few.format(compared=self.compared, both=values, count=count, reason=reason)
        listed = []
        for unpaired, partner in ((self._only_test, "REF"), (self._only_ref, "TEST")):
            options = dict.fromkeys(filter(None, unpaired.values()))
            listed += [f"{partner} was taken with {' and '.join(options)}"] if options else []
        why = f"{', '.join(listed)}: trace both with the same options" if listed else ""
        why = why or "no value was recorded in one of them"
        return f"the traces have no value in common: {why}"

    def _remedy(self) -> str:
        if any(key.slot.endswith(_FLAT) for key in (*self._only_ref, *self._only_test)):
            return "FSDP1 keeps them flat: give it use_orig_params=True"
        return (
            "say how paths of TEST become those of REF with --map 'regex=replacement', if these "
            "are traces of one model"
        )

    def notes(self) -> Iterator[str]:
        """Yield what has no partner, and which rules changed no path."""
        for unpaired, side, partner in (
            (self._only_ref, "the reference alone", "the second trace"),
            (self._only_test, "the second trace alone", "the reference"),
        ):
            for option, keys in grouped((o, key) for key, o in unpaired.items()).items():
                names = list(dict.fromkeys(f"{key.path or '(root)'}:{key.slot}" for key in keys))
                listed = f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
                why = f", because {partner} was taken with {option}" if option else ""
                yield f"{counted(len(keys), 'value')} in {side}{why}: {listed}"
        for rule in self._paths.unused:
            yield f"--map '{rule}' matches no path of the second trace"
