"""The four calls that say which class stands in for which, in the words of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from rankscope.compat.patchloading import follow
from rankscope.compat.patchregistry import REGISTRY

__all__ = [
    "clear_patch_mapping",
    "get_patch_mapping",
    "register_patch_mapping",
    "unregister_patch_mapping",
]


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:
    """Have classes replaced: keys are names or patterns of classes, values subclasses of Module.

    A key that equals a name comes before every pattern; patterns are searched anywhere in the name,
    in the order of registration. All entries are taken or, where this raises, none.

    Raises:
        TypeError: a key is no string, or a replacement no class or no `torch.nn.Module`.
        ValueError: a key is registered already and `overwrite` is false.
    """
    REGISTRY.register(mapping, overwrite=overwrite)
    follow()


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Remove entries by the very keys they were registered under, all or none.

    Raises:
        ValueError: a key is not registered.
    """
    REGISTRY.unregister(keys)
    follow()


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Return the registered entries in their order; changing the copy changes nothing."""
    return dict(REGISTRY.names)


def clear_patch_mapping() -> None:
    """Remove every entry; blocks that are open keep the entries they began with."""
    REGISTRY.clear()
    follow()
