"""How the options of an optimizer stand in a note: `lr=0.001; weight_decay=0.1 | 0.0`, values that
groups of parameters do not share beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["options_text", "read_options"]

_MOST_VALUES: Final = 8
_OPTIONS, _VALUES = "; ", " | "


def options_text(options: Mapping[str, Sequence[str]]) -> str:
    """Return the text of options.

    Args:
        options: {name: values, each once}; those without a value are left out.
    """
    return _OPTIONS.join(
        f"{name}={_VALUES.join(_first(values))}" for name, values in options.items() if any(values)
    )


def read_options(text: str) -> dict[str, set[str]]:
    """Return {name: values} of such a text."""
    parts = (option.partition("=") for option in text.split(_OPTIONS))
    return {name: set(values.split(_VALUES)) for name, _, values in parts}


def _first(values: Sequence[str]) -> list[str]:
    more = ["..."] if len(values) > _MOST_VALUES else []
    return [*values[:_MOST_VALUES], *more]
