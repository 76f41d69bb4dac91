"""`from_pretrained` and `from_config` of transformers honour what is registered here.

They patch by two functions they find in `transformers.modeling_utils`. While anything is
registered, and only where the user has loaded that module, the two names hold functions that do
what stood there and then ours. With the last entry gone they hold again what they held.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from rankscope.compat.patchapply import apply_patches
from rankscope.compat.patchimports import ImportWatch
from rankscope.compat.patchrecorders import patch_output_recorders
from rankscope.compat.patchregistry import REGISTRY

__all__ = ["follow"]

_LOADING = "transformers.modeling_utils"
_lock = threading.RLock()
_theirs: dict[str, Callable[..., Any]] = {}


def follow() -> None:
    """Make loading follow the registry, or let go of it where nothing is registered."""
    with _lock:
        loading = sys.modules.get(_LOADING)
        if not REGISTRY.names:
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
        if not hasattr(theirs, "rankscope_combined"):
            _theirs[name] = theirs
            combined = combine(theirs)
            combined.rankscope_combined = True  # type: ignore[attr-defined]
            vars(loading)[name] = combined


def _let_go(loading: ModuleType) -> None:
    for name, theirs in list(_theirs.items()):
        if hasattr(vars(loading).get(name), "rankscope_combined"):
            vars(loading)[name] = theirs
        del _theirs[name]


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


def _nothing() -> None:
    """Before an import there is nothing to do."""


_watch = ImportWatch(_nothing, follow)
