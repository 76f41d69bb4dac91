"""Choosing among the names of a trace: one glob dialect, and an error that lists what was near."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from rankscope.errors import SelectionError
from rankscope.globs import glob_matches, without_wrappers
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

_SHOWN = 5
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PHASES = {slot: phase for phase in Phase for slot in phase.facts.slots}
"""Where slots of these kinds are meant, if no phase is named."""


def parse_path(text: str) -> str:
    """Return the glob that the option --path names; `(root)` is how the empty path is shown."""
    return "" if text == "(root)" else text


def paths_around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one, that of the root first."""
    if path and not path.startswith("@"):
        yield ""
    parts = path.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def parse_ranges(option: str, text: str) -> tuple[range, ...]:
    """Return the numbers that the option --step or --rank (`option`) names, as in `0-2,5`; () for
    `all`, and where none is given. SelectionError: it names none."""
    parts = [] if text in ("", "all") else text.split(",")
    matches = [_RANGE.fullmatch(part.strip()) for part in parts]
    if None in matches:
        raise SelectionError(f"--{option} {text!r}: write {option}s as 0-2,5 or all")
    return tuple(range(int(m[1]), int(m[2] or m[1]) + 1) for m in matches if m)


def parse_phase(word: str) -> Phase:
    """Return the phase that the option --phase names; SelectionError: an unknown name."""
    if word.strip().upper() not in Phase.__members__:
        words = ", ".join(phase.word for phase in Phase)
        raise SelectionError(f"--phase: no phase is called {word!r}; choose from {words}")
    return Phase[word.strip().upper()]


def parse_phases(text: str) -> frozenset[Phase]:
    """Return the phases that --phase names, separated by commas, or `all`; errors as of
    `parse_phase`."""
    return frozenset(Phase if text == "all" else map(parse_phase, text.split(",")))


def parse_mode(word: str) -> Mode:
    """Return the mode that the option --mode names; SelectionError: an unknown name."""
    if word.strip().upper() not in Mode.__members__:
        raise SelectionError(f"--mode: {word!r} is neither train nor eval")
    return Mode[word.strip().upper()]


def named(kind: type[Phase] | type[Mode], noun: str, choice: Any) -> Any:
    """Return the phase or mode a caller named; SelectionError: an unknown name."""
    if choice is None or isinstance(choice, kind):
        return choice
    try:
        return kind[str(choice).upper()]
    except KeyError:
        words = ", ".join(item.word for item in kind)
        raise SelectionError(f"no {noun} is called {choice!r}: choose from {words}") from None


def default_phase(slot: str) -> Phase:
    """Return the phase meant without a name: backward, grads or params by the slot, else
    forward."""
    return _PHASES.get(slot.replace(":", ".").split(".")[0], Phase.FORWARD)


def nothing_matched(noun: str, glob: str, names: Iterable[str]) -> SelectionError:
    """Return the error for a glob that matched no name: says which are near, or which there are."""
    choices, plain = sorted(set(names)), without_wrappers(glob)
    if plain != glob and any(glob_matches(plain, name) for name in choices):
        reason = f"names of wrappers are left out: write {plain!r}"
        return SelectionError(f"{noun} {glob!r} matches nothing in this trace; {reason}")
    plain = glob.replace("*", "").strip(".")
    near = difflib.get_close_matches(plain, choices, n=_SHOWN, cutoff=0.5)
    containing = [name for name in choices if plain and plain in name and name not in near]
    near += containing[: _SHOWN - len(near)]
    listed = ", ".join(name or "(root)" for name in near or choices[:_SHOWN])
    kind = "there are" if len(choices) <= _SHOWN else f"{len(choices)} exist, such as"
    kind = "the nearest are" if near else kind
    return SelectionError(f"{noun} {glob!r} matches nothing in this trace; {kind} {listed}")
