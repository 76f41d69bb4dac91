"""Choosing among the names of a trace: one glob dialect, and an error that lists what was near."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from rankscope.errors import SelectionError
from rankscope.record.call import Phase

__all__ = ["default_phase", "glob_matches", "nothing_matched"]

_SHOWN = 5
_PHASES = {
    "grad_input": Phase.BACKWARD,
    "grad_output": Phase.BACKWARD,
    "grad:": Phase.GRADS,
    "param:": Phase.PARAMS,
    "buffer:": Phase.PARAMS,
}
"""Where slots that begin so are meant, if no phase is named."""


def default_phase(slot: str) -> Phase:
    """Return the phase in which a slot is meant where none is named: forward, but gradients in
    backward and grads, parameters and buffers in params."""
    return next((p for begin, p in _PHASES.items() if slot.startswith(begin)), Phase.FORWARD)


def glob_matches(glob: str, name: str) -> bool:
    """True where an fnmatch glob matches the whole name; `**` means what `*` means."""
    return fnmatch.fnmatchcase(name, glob.replace("**", "*"))


def nothing_matched(what: str, glob: str, names: Iterable[str]) -> SelectionError:
    """Return the error for a glob that matched none of the names: says which are near, or which
    there are."""
    known = sorted(set(names))
    plain = glob.replace("*", "").strip(".")
    near = difflib.get_close_matches(plain, known, n=_SHOWN, cutoff=0.5)
    near += [name for name in known if plain and plain in name and name not in near][
        : _SHOWN - len(near)
    ]
    shown = near or known[:_SHOWN]
    listed = ", ".join(name or "(root)" for name in shown)
    kind = (
        "the nearest are"
        if near
        else "there are"
        if len(known) <= _SHOWN
        else f"{len(known)} exist, such as"
    )
    return SelectionError(f"{what} {glob!r} matches nothing in this trace; {kind} {listed}")
