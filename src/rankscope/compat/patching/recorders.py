"""`patch_output_recorders`: what one model says about its outputs, in terms of replaced classes.

A class says by `_can_record_outputs` which of its modules give hidden states and attentions. It is
an attribute of the class, so a change there would reach every other model of that class, and stay.
The changed copy is therefore kept on the instance.

`capture_outputs` of transformers asks a registry that has one entry for each *class*, when the
first output is asked for, and then never again. Where a model's forward is decorated by it, its
hooks are therefore set here, at once, by its own function, which reads what this model says.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.compat.outputs.outputrecorder import DECLARATION, transformers_capturing
from rankscope.compat.patching import registry
from rankscope.compat.patching.registry import NameMap

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
    names = registry.names
    if not names:
        return
    patched: dict[nn.Module, _Recorders] = {}
    for module in model.modules():
        original = _original(module)
        if original is not None:
            recorders = {output: _replaced(one, names) for output, one in original.items()}
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
        return type(recorder)(_replaced(one, names) for one in recorder)
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
    captured = [] if capturing is None else list(_captured(model, capturing, set()))
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
        kept = {key: registry[key] for key in recorders_of.keys() & registry.keys()}
        try:
            dict.update(registry, recorders_of)
            for module in captured:
                _remove_hooks(module, capturing)
                capturing.install_all_output_capturing_hooks(module)
        finally:
            for key in recorders_of.keys() - kept.keys():
                del registry[key]
            dict.update(registry, kept)


def _captured(model: nn.Module, capturing: ModuleType, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if model in seen:
        return
    seen.add(model)
    if _is_decorated(type(model), capturing):
        yield model
        return
    for child in model.children():
        yield from _captured(child, capturing, seen)


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
