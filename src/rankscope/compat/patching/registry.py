"""The registered replacements: which class stands in for the classes of a name or pattern."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from rankscope.record.namelookup import NameMap

__all__ = ["REGISTRY", "PatchRegistry"]


class PatchRegistry:
    """Entries that change all at once or not at all; every reader gets a state that was whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: NameMap[type[nn.Module]] = NameMap({})

    @property
    def names(self) -> NameMap[type[nn.Module]]:
        """The entries as they stand now; a later change makes a new map."""
        return self._names

    def register(self, mapping: Mapping[str, type[nn.Module]], *, overwrite: bool) -> None:
        """Add every entry of `mapping`, or none where one of them is refused."""
        entries = dict(mapping)
        for key, replacement in entries.items():
            _refuse_unfit(key, replacement)
        with self._lock:
            taken = [key for key in entries if key in self._names]
            if taken and not overwrite:
                raise ValueError(
                    f"{taken} already have a patch mapping registered, so nothing was added. "
                    "Pass overwrite=True to replace it, or unregister_patch_mapping() first."
                )
            self._names = NameMap({**self._names, **entries})
            invalid = {
                key: self._names.invalid[key] for key in entries & self._names.invalid.keys()
            }
        for key, reason in invalid.items():
            warnings.warn(
                f"{key!r} is no regular expression ({reason}): it stands for a class of exactly "
                "that name",
                stacklevel=3,
            )

    def unregister(self, keys: Iterable[str]) -> None:
        """Remove every key, or none where one of them is unknown."""
        going = [keys] if isinstance(keys, str) else list(keys)
        with self._lock:
            unknown = [key for key in going if key not in self._names]
            if unknown:
                raise ValueError(
                    f"Cannot unregister {unknown}: not found in monkey patch mapping cache, so "
                    f"nothing was removed. Give keys as registered: {list(self._names)}."
                )
            self._names = NameMap({k: v for k, v in self._names.items() if k not in going})

    def clear(self) -> None:
        """Remove every entry."""
        with self._lock:
            self._names = NameMap({})


def _refuse_unfit(key: object, replacement: object) -> None:
    if not isinstance(key, str):
        raise TypeError(
            f"a key is the name of a class or a pattern for names, not {type(key).__name__} {key!r}"
        )
    if not isinstance(replacement, type):
        raise TypeError(
            f"the replacement for {key!r} must be a class, got {type(replacement).__name__}. "
            "Give the class itself: nothing was registered"
        )
    if not issubclass(replacement, nn.Module):
        raise TypeError(
            f"the replacement for {key!r} must be a subclass of nn.Module, and "
            f"{replacement.__qualname__} is none. Derive it from torch.nn.Module: nothing was "
            "registered"
        )


REGISTRY = PatchRegistry()
"""What `register_patch_mapping` fills: one for the process."""
