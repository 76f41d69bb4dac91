"""Hooks of transformers' own output capture, set for one model instead of for its class.

`capture_outputs` of transformers asks a registry that has one entry for each *class*, when the
first output is asked for, and then never again. Where a model's forward is decorated by it, its
hooks are therefore set here, at once, by its own function, which reads what this model says.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from rankscope.compat.outputs.outputrecorder import transformers_capturing

_NEEDED = {"_CAN_RECORD_REGISTRY", "_hook_installation_lock", "install_all_output_capturing_hooks"}
_INSTALLED = "_output_capturing_hooks_installed"


def renew_hooks(model: nn.Module, patched: Mapping[nn.Module, dict[str, Any]]) -> None:
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
