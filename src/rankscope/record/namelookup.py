"""What a name stands for: keys that are names or patterns, an exact key before every pattern.

A key is both at once. It is asked first whether it equals the name; after that each key is searched
in the name as a regular expression, in the order given, so an unanchored key also matches in the
middle. `^Name$` matches one name only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["MatchedEntry", "NameMap"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedEntry(Generic[T]):
    """The entry that a name was matched with."""

    key: str
    value: T
    match: re.Match[str] | None
    """The pattern's match, for its groups; None where the key equals the name."""


class NameMap(Mapping[str, T]):
    """Entries under names and patterns, in the order given; they never change.

    A key that is no valid expression is compared as a plain name; `invalid` says which and why.
    """

    __slots__ = ("_entries", "_patterns", "invalid")

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = dict(entries)
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.invalid: dict[str, str] = {}
        """Key -> why it is no regular expression."""
        for key in self._entries:
            try:
                self._patterns[key] = re.compile(key)
            except (re.error, OverflowError, RecursionError) as error:
                self.invalid[key] = str(error)

    def find(self, name: str) -> MatchedEntry[T] | None:
        """Return the entry for this name: the key that equals it, else the first that matches."""
        if name in self._entries:
            return MatchedEntry(key=name, value=self._entries[name], match=None)
        for key, pattern in self._patterns.items():
            match = pattern.search(name)
            if match is not None:
                return MatchedEntry(key=key, value=self._entries[key], match=match)
        return None

    def __getitem__(self, key: str) -> T:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
