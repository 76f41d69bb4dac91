"""Which values of two traces have a partner in the other one, why others have none, and which rule
for paths would make most of them meet.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from rankscope.diagnosis.comparison.alignment import AlignedStep, PathMap, SlotKey
from rankscope.diagnosis.comparison.tracesides import TraceSide
from rankscope.globs import glob_matches, slot_matches
from rankscope.tree.summary import counted
from rankscope.tree.views import Trace

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

    def __init__(self, ref: TraceSide, test: TraceSide, paths: PathMap) -> None:
        self._paths = paths
        self._traces = ref.trace, test.trace
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
