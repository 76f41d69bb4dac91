"""Messages in the words of whoever reads them: the variable or keyword they used, not an option."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping

from rankscope.agent.settings import SETTINGS

__all__ = ["as_keywords", "as_variables", "did_you_mean", "misspelt_variables"]

_PREFIX = "RANKSCOPE_"
_OPTION = re.compile(r"--rs-([a-z]+(?:-[a-z]+)*)")
_OTHERS = {
    "RANKSCOPE",
    "RANKSCOPE_KERNEL",
    "RANKSCOPE_OWNER",
    "RANKSCOPE_PYTHON",
    "RANKSCOPE_RUN_FOLDER",
    "RANKSCOPE_SAID",
    "RANKSCOPE_TORCH",
    "RANKSCOPE_VENV",
}
"""Variables that are no settings."""


def as_variables(text: str) -> str:
    """Name variables where a message names options of `rankscope run`."""
    return _OPTION.sub(lambda m: _PREFIX + m[1].replace("-", "_").upper(), text)


def as_keywords(text: str) -> str:
    """Name keyword arguments where a message names options of `rankscope run`."""
    return _OPTION.sub(lambda m: m[1].replace("-", "_") + "=", text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean x? " with what a name begins, or else is most like; "" for neither."""
    names = list(known)
    found = [each for each in names if name.strip("-") and each.startswith(name)]
    found = found or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {' or '.join(found)}? " if found else ""


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> str:
    """Return one sentence on variables that begin like ours and mean nothing; "" without any."""
    known = {setting.variable for setting in SETTINGS} | _OTHERS
    ends = {name.removeprefix(_PREFIX): name for name in known}
    switch = _PREFIX.rstrip("_")
    parts = [
        f"{name} is no setting, did you mean {switch}?"
        for name in sorted(environ)
        if name != switch and not name.startswith(_PREFIX) and _is_nearly(name, switch)
    ]
    wrong = [name for name in environ if name.startswith(_PREFIX) and name not in known]
    for name in sorted(wrong):
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
        parts.append(f"{name} is no setting" + (f", did you mean {ends[near[0]]}?" if near else ""))
    return "; ".join(parts)


def _is_nearly(name: str, switch: str) -> bool:
    """True for one letter too few, too many, another or in its neighbour's place."""
    if abs(len(name) - len(switch)) > 1 or name[:1] != switch[:1]:
        return False
    return difflib.SequenceMatcher(None, name, switch, autojunk=False).ratio() > 0.85
