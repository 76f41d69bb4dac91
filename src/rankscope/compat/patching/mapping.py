"""The four calls that say which class stands in for which, in the words of transformers."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from rankscope.compat.patching import registry
from rankscope.compat.patching.apply import apply_patches
from rankscope.compat.patching.imports import ImportWatch
from rankscope.compat.patching.recorders import patch_output_recorders
from rankscope.compat.patching.registry import NameMap

_LOADING = "transformers.modeling_utils"
_MARK = "rankscope_combined"
"""Holds on a function of ours the one of transformers in whose place it stands."""
_lock = threading.RLock()


def follow() -> None:
    """Make loading follow the registry, or let go of it where nothing is registered."""
    with _lock:
        loading = sys.modules.get(_LOADING)
        if not registry.names:
            _watch.stop()
            if loading is not None:
                _let_go(loading)
        elif loading is None or not _COMBINED.keys() <= vars(loading).keys():
            _watch.start()
        else:
            _watch.stop()
            _take(loading)


def _take(loading: ModuleType) -> None:
    for name, combine in _COMBINED.items():
        theirs = vars(loading)[name]
        if not hasattr(theirs, _MARK):
            vars(loading)[name] = combined = combine(theirs)
            setattr(combined, _MARK, theirs)


def _let_go(loading: ModuleType) -> None:
    for name in _COMBINED:
        theirs = getattr(vars(loading).get(name), _MARK, None)
        if theirs is not None:
            vars(loading)[name] = theirs


def _combined_apply(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    @contextmanager
    def apply(*args: Any, **kwargs: Any) -> Iterator[None]:
        with theirs(*args, **kwargs), apply_patches():
            yield

    return apply


def _combined_recorders(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def patch(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        theirs(model, *args, **kwargs)
        patch_output_recorders(model)

    return patch


_COMBINED = {"apply_patches": _combined_apply, "patch_output_recorders": _combined_recorders}


_watch = ImportWatch(lambda: None, follow)


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:
    """Have classes replaced: keys are names or patterns of classes, values subclasses of Module.

    A key that equals a name comes before every pattern; patterns are searched anywhere in the name,
    in the order of registration. All entries are taken or, where this raises, none.

    Raises:
        TypeError: a key is no string, or a replacement no class or no `torch.nn.Module`.
        ValueError: a key is registered already and `overwrite` is false.
    """
    entries = dict(mapping)
    for key, replacement in entries.items():
        _refuse_unfit(key, replacement)
    with _lock:
        taken = [key for key in entries if key in registry.names]
        if taken and not overwrite:
            raise ValueError(
                f"{taken} already have a patch mapping registered, so nothing was added. "
                "Pass overwrite=True to replace it, or unregister_patch_mapping() first."
            )
        names = registry.names = NameMap({**registry.names, **entries})
    for key in entries & names.invalid.keys():
        warnings.warn(
            f"{key!r} is no regular expression ({names.invalid[key]}): it stands for a class of "
            "exactly that name",
            stacklevel=2,
        )
    follow()


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Remove entries by the very keys they were registered under, all or none.

    Raises:
        ValueError: a key is not registered.
    """
    going = [keys] if isinstance(keys, str) else list(keys)
    with _lock:
        unknown = [key for key in going if key not in registry.names]
        if unknown:
            raise ValueError(
                f"Cannot unregister {unknown}: not found in monkey patch mapping cache, so "
                f"nothing was removed. Give keys as registered: {list(registry.names)}."
            )
        left = {key: found for key, found in registry.names.items() if key not in going}
        registry.names = NameMap(left)
    follow()


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Return the registered entries in their order; changing the copy changes nothing."""
    return dict(registry.names)


def clear_patch_mapping() -> None:
    """Remove every entry; blocks that are open keep the entries they began with."""
    with _lock:
        registry.names = NameMap({})
    follow()


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
