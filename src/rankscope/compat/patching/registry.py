"""The registered replacements: which class stands in for the classes of a name or pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn


class NameMap(dict[str, type[nn.Module]]):
    """Replacements under names and patterns, in their order; never changed once it is made.

    A key is both at once. It is asked first whether it equals the name; after that each key is
    searched in the name as a regular expression, so an unanchored key also matches in the middle. A
    key that is no valid expression is compared as a plain name; `invalid` says why.
    """

    def __init__(self, entries: Mapping[str, type[nn.Module]]) -> None:
        super().__init__(entries)
        self.invalid: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], type[nn.Module]]] = []
        for key, replacement in self.items():
            try:
                self._patterns.append((re.compile(key), replacement))
            except (re.error, OverflowError, RecursionError) as error:
                self.invalid[key] = str(error)

    def find(self, name: str) -> type[nn.Module] | None:
        """Return the replacement for a class: by the key that equals its name, else the first that
        matches."""
        if name in self:
            return self[name]
        return next((replacement for key, replacement in self._patterns if key.search(name)), None)


names = NameMap({})
"""What `register_patch_mapping` fills: replaced as a whole, so every reader gets a whole state."""
