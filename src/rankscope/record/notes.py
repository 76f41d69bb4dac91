"""What is noted of a step, a rank or a tensor: a kind with fields, and the sentence made of them.

A program asks for the kind and the fields, never for words of the sentence. Records and
`trace.json` carry them as a *fact*, `{"kind": "no_step_begun", "steps": "40000"}`, beside the
sentence; of older ones, with the sentence alone, `Note.read` finds kind and fields.
"""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from rankscope.record.ranks import ranks_named

_MOST_VALUES: Final = 8
"""Most values of an option that a note names."""
_MOST_MODULES: Final = 500
"""Most modules that a note names."""
_ALL_MODULES: Final = "all modules"
_OPTIONS, _VALUES = "; ", " | "
BLACK_BOX: Final = "black box: "


class NoteKind(enum.Enum):
    """The kinds of notes, each with its sentence: fields in braces, numbers with `:d`. Traces
    without facts are read by these sentences: a reworded one would be read as text alone."""

    TEXT = "{text}"
    """Words for people alone, such as the text of an exception."""

    # of a rank
    NO_STEP_REACHED = "no step was traced: the job ended at {last}, before any of {steps}"
    NO_STEP_BEGUN = "no step was traced: the job ended without a step, not one of {steps}"
    UNMATCHED_GLOB = "paths: '{glob}' matched no module; modules here are {near} ..."

    # of a step
    FOREIGN_PARAMETERS = (
        "{optimizer} holds {own:d} parameters of the modules seen, and {foreign:d} that none of "
        "them owns ({idle:d} without a gradient; shapes {shapes})"
    )
    SCALER_SKIPPED = "GradScaler skipped the step of {optimizer}: inf or NaN in its gradients"
    OPTIMIZER_SKIPPED = "{optimizer} skipped its own step: GradScaler found inf or NaN"
    OPTIMIZER_RAISED = "the step of {optimizer} did not return: it raised"
    OPTIMIZER_OPTIONS = "{optimizer} steps with {options}"
    """Options of every optimizer that steps, as `lr=0.001; betas=(0.9, 0.95)`."""
    IN_EVAL_MODE = "{model} is stepped with {modules} in eval mode"
    """The outermost modules whose `training` is False, in the order of the model."""
    RATE_OF_ZERO = "{optimizer} steps {parameters:d} parameters with a learning rate of 0"
    MISSED_STEP = "not traced on this rank: {why}"
    RUN_EAGERLY = "compiled regions run as written (compile=eager)"

    # of a tensor that no rank holds whole
    REPLICAS_DIFFER = "replicas differ: ranks {ranks} should hold the same values"


@dataclass(frozen=True, slots=True)
class Note:
    """One note."""

    kind: NoteKind
    values: tuple[str | int, ...]
    """Values of the fields, in the order of the sentence."""

    @classmethod
    def of(cls, kind: NoteKind, **fields: str | int) -> Note:
        """Return a note with all fields of its kind."""
        return cls(kind, tuple(fields[name] for name in _FIELDS[kind]))

    @classmethod
    def words(cls, text: str) -> Note:
        """Return a note for people alone."""
        return cls(NoteKind.TEXT, (text,))

    @classmethod
    def read(cls, text: str, fact: object = None) -> Note:
        """Return the note of a record or trace, by its fact if that is known, else by its text."""
        return _of_fact(fact) or _of_sentence(text)

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields by name."""
        return dict(zip(_FIELDS[self.kind], self.values))

    @property
    def fact(self) -> dict[str, str | int] | None:
        """The note's fields for programs; None for a text alone."""
        return (
            None if self.kind is NoteKind.TEXT else {"kind": self.kind.name.lower(), **self.fields}
        )

    def as_json(self) -> dict[str, Any]:
        """Return the note for `trace.json`: the sentence, and the fact if there is one."""
        return {"note": str(self)} | ({} if self.fact is None else {"fact": self.fact})

    def __str__(self) -> str:
        return self.kind.value.format(**self.fields)


@dataclass(frozen=True, slots=True)
class RanksNote:
    """A note of some ranks."""

    ranks: tuple[int, ...]
    note: Note

    def __str__(self) -> str:
        return f"{ranks_named(self.ranks)}: {self.note}"


def _fields(kind: NoteKind) -> dict[str, type[str] | type[int]]:
    parts = string.Formatter().parse(kind.value)
    return {name: int if spec == "d" else str for _, name, spec, _ in parts if name}


def _pattern(kind: NoteKind) -> re.Pattern[str]:
    parts = string.Formatter().parse(kind.value)
    groups = [
        re.escape(words) + (f"({'[0-9]+' if spec == 'd' else '.*'})" if name else "")
        for words, name, spec, _ in parts
    ]
    return re.compile("".join(groups), re.DOTALL)


_FIELDS: Final = {kind: _fields(kind) for kind in NoteKind}
_PATTERNS: Final = {kind: _pattern(kind) for kind in NoteKind if kind is not NoteKind.TEXT}
_BY_NAME: Final = {kind.name.lower(): kind for kind in NoteKind}


def _of_fact(fact: object) -> Note | None:
    kind = _BY_NAME.get(str(fact.get("kind"))) if isinstance(fact, Mapping) else None
    if kind is None or not isinstance(fact, Mapping):
        return None
    values: tuple[Any, ...] = tuple(fact.get(name) for name in _FIELDS[kind])
    if [*map(type, values)] != [*_FIELDS[kind].values()]:
        return None  # of another version, or damaged
    return Note(kind, values)


@lru_cache(maxsize=1024)
def _of_sentence(text: str) -> Note:
    for kind, pattern in _PATTERNS.items():
        match = pattern.fullmatch(text)
        if match:
            types = _FIELDS[kind].values()
            return Note(kind, tuple(cast(value) for cast, value in zip(types, match.groups())))
    return Note.words(text)


def options_text(options: Mapping[str, Sequence[str]]) -> str:
    """Return an optimizer's options, `lr=0.001; weight_decay=0.1 | 0.0` where groups differ."""
    return _OPTIONS.join(
        f"{name}={_VALUES.join(_first(values))}" for name, values in options.items() if any(values)
    )


def read_options(text: str) -> dict[str, set[str]]:
    """Return {name: values} of a text of `OPTIMIZER_OPTIONS`."""
    parts = (option.partition("=") for option in text.split(_OPTIONS))
    return {name: set(values.split(_VALUES)) for name, _, values in parts}


def modules_text(paths: Sequence[str]) -> str:
    """Return the outermost modules of a model, `stem, head.1`; "" is the path of all."""
    more = ["..."] if len(paths) > _MOST_MODULES else []
    return ", ".join([*(path or _ALL_MODULES for path in paths[:_MOST_MODULES]), *more])


def read_modules(text: str) -> list[str]:
    """Return the paths of a text of `IN_EVAL_MODE`, "" for all modules."""
    return ["" if path == _ALL_MODULES else path for path in text.split(", ") if path != "..."]


def _first(values: Sequence[str]) -> list[str]:
    more = ["..."] if len(values) > _MOST_VALUES else []
    return [*values[:_MOST_VALUES], *more]
