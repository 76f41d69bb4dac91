"""Which class stands in for which, in the words of transformers: the four calls that say it, and
what one model says about its outputs in terms of replaced classes (`patch_output_recorders`).

A class says by `_can_record_outputs` which of its modules give hidden states and attentions. It is
an attribute of the class, so a change there would reach every other model of that class, and stay.
The changed copy is therefore kept on the instance.

`capture_outputs` of transformers asks a registry that has one entry for each *class*, when the
first output is asked for, and then never again. Where a model's forward is decorated by it, its
hooks are therefore set here, at once, by its own function, which reads what this model says.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.compat import classpatching
from rankscope.compat.classpatching import ImportWatch, NameMap, apply_patches
from rankscope.compat.outputrecorder import DECLARATION, transformers_capturing

# ---- recorders -----------------------------------------------------------------------------------


_Recorders = dict[str, Any]
"""Output name -> class, class name, recorder, or a list of them."""


_changed: WeakKeyDictionary[nn.Module, tuple[_Recorders, _Recorders]] = WeakKeyDictionary()
"""What a model said before, and what was put on it: a second call starts from the former."""


def patch_output_recorders(model: nn.Module) -> None:
    """Have this model's recorders target the registered replacements; no other model changes.

    Every submodule that has `_can_record_outputs` gets a copy of its own, in which classes, class
    names, recorders and lists of them stand for the replacement registered for that name. Calling
    it again gives the same result. Without a registered replacement nothing is done.
    """
    names = classpatching.registered
    if not names:
        return
    patched: dict[nn.Module, _Recorders] = {}
    for module in model.modules():
        original = _original(module)
        if original is not None:
            recorders = {output: _replaced(entry, names) for output, entry in original.items()}
            if recorders != getattr(module, DECLARATION):
                _changed[module] = original, recorders
                setattr(module, DECLARATION, recorders)
                patched[module] = recorders
    if patched:
        _renew_hooks(model, patched)


def _original(module: nn.Module) -> _Recorders | None:
    if DECLARATION not in vars(module) and not hasattr(type(module), DECLARATION):
        return None  # a wrapper may answer for what it wraps
    present = getattr(module, DECLARATION)
    original, patched = _changed.get(module, (None, None))
    if patched is not None and present is patched:
        return original
    return present if isinstance(present, dict) else None


def _replaced(recorder: Any, names: NameMap) -> Any:
    if type(recorder) in (list, tuple):
        return type(recorder)(_replaced(inner, names) for inner in recorder)
    if isinstance(recorder, (str, type)):
        return _replacement(recorder, names) or recorder
    target = getattr(recorder, "target_class", None)
    replacement = _replacement(target or getattr(recorder, "class_name", None), names)
    if replacement is None or not dataclasses.is_dataclass(recorder):
        return recorder
    assert not isinstance(recorder, type)
    return dataclasses.replace(recorder, target_class=replacement)


def _replacement(target: str | type | None, names: NameMap) -> type[nn.Module] | None:
    name = target.__name__ if isinstance(target, type) else target
    return names.find(name) if isinstance(name, str) else None


_NEEDED = {"_CAN_RECORD_REGISTRY", "_hook_installation_lock", "install_all_output_capturing_hooks"}
_INSTALLED = "_output_capturing_hooks_installed"


def _renew_hooks(model: nn.Module, patched: Mapping[nn.Module, dict[str, Any]]) -> None:
    """Set the hooks of every model in `model` that transformers captures by the changed recorders
    of its modules; hooks of an earlier capture are replaced."""
    capturing = transformers_capturing()
    captured = [] if capturing is None else list(_capturing_modules(model, capturing, set()))
    if capturing is None or not captured:
        return
    if not vars(capturing).keys() >= _NEEDED:
        warnings.warn(
            "this release of transformers captures outputs in a way rankscope does not know: "
            f"{type(model).__name__} keeps the recorders of its class. Known is 5.23.",
            stacklevel=3,
        )
        return
    registry: dict[str, Any] = capturing._CAN_RECORD_REGISTRY
    recorders_of = {str(type(module)): recorders for module, recorders in patched.items()}
    with capturing._hook_installation_lock:
        hooks = {key: registry[key] for key in recorders_of.keys() & registry.keys()}
        try:
            dict.update(registry, recorders_of)
            for module in captured:
                _remove_hooks(module, capturing)
                capturing.install_all_output_capturing_hooks(module)
        finally:
            for key in recorders_of.keys() - hooks.keys():
                del registry[key]
            dict.update(registry, hooks)


def _capturing_modules(
    model: nn.Module, capturing: ModuleType, visited: set[nn.Module]
) -> Iterator[nn.Module]:
    if model in visited:
        return
    visited.add(model)
    if _is_decorated(type(model), capturing):
        yield model
        return
    for child in model.children():
        yield from _capturing_modules(child, capturing, visited)


def _is_decorated(cls: type, capturing: ModuleType) -> bool:
    """Whether a forward of this class or of a base of it, which it may call, is decorated."""
    for base in cls.__mro__:
        function = vars(base).get("forward")
        while function is not None:
            if getattr(function, "__globals__", None) is vars(capturing):
                return True
            function = getattr(function, "__wrapped__", None)
    return False


def _remove_hooks(model: nn.Module, capturing: ModuleType) -> None:
    for module in model.modules():
        vars(module).pop(_INSTALLED, None)
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__globals__", None) is vars(capturing):
                del module._forward_hooks[number]


# ---- the mapping ---------------------------------------------------------------------------------


_LOADING = "transformers.modeling_utils"
_MARK = "rankscope_combined"
"""Holds on a function of ours the one of transformers in whose place it stands."""
_lock = threading.RLock()


def follow() -> None:
    """Make loading follow the registry, or let go of it where nothing is registered."""
    with _lock:
        loading = sys.modules.get(_LOADING)
        if not classpatching.registered:
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
        original = vars(loading)[name]
        if not hasattr(original, _MARK):
            vars(loading)[name] = combined = combine(original)
            setattr(combined, _MARK, original)


def _let_go(loading: ModuleType) -> None:
    for name in _COMBINED:
        original = getattr(vars(loading).get(name), _MARK, None)
        if original is not None:
            vars(loading)[name] = original


def _with_our_patches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def apply(*args: Any, **kwargs: Any) -> Iterator[None]:
        with original(*args, **kwargs), apply_patches():
            yield

    return apply


def _with_our_recorders(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patch(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        patch_output_recorders(model)

    return patch


_COMBINED = {"apply_patches": _with_our_patches, "patch_output_recorders": _with_our_recorders}


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
        duplicates = [key for key in entries if key in classpatching.registered]
        if duplicates and not overwrite:
            raise ValueError(
                f"{duplicates} already have a patch mapping registered, so nothing was added. "
                "Pass overwrite=True to replace it, or unregister_patch_mapping() first."
            )
        names = classpatching.registered = NameMap({**classpatching.registered, **entries})
    for key in entries & names.invalid.keys():
        warnings.warn(
            f"{key!r} is not a regular expression ({names.invalid[key]}): it stands for a class of "
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
        unknown = [key for key in going if key not in classpatching.registered]
        if unknown:
            raise ValueError(
                f"Cannot unregister {unknown}: not found in monkey patch mapping cache, so "
                f"nothing was removed. Give keys as registered: {list(classpatching.registered)}."
            )
        remaining = {
            key: replacement
            for key, replacement in classpatching.registered.items()
            if key not in going
        }
        classpatching.registered = NameMap(remaining)
    follow()


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Return the registered entries in their order; changing the copy changes nothing."""
    return dict(classpatching.registered)


def clear_patch_mapping() -> None:
    """Remove every entry; blocks that are open keep the entries they began with."""
    with _lock:
        classpatching.registered = NameMap({})
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
            f"the replacement for {key!r} must be a subclass of nn.Module, unlike "
            f"{replacement.__qualname__}. Derive it from torch.nn.Module: nothing was registered"
        )
