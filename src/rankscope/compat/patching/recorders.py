"""`patch_output_recorders`: what one model says about its outputs, in terms of replaced classes.

A class says by `_can_record_outputs` which of its modules give hidden states and attentions. It is
an attribute of the class, so a change there would reach every other model of that class, and stay.
The changed copy is therefore kept on the instance.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.compat.outputs.captureplan import DECLARATION
from rankscope.compat.patching import registry
from rankscope.compat.patching.capturehooks import renew_hooks
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
        renew_hooks(model, patched)


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
