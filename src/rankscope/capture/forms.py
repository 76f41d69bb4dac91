"""How the arguments and results of a call are nested, as JSON: what the slots alone do not tell.

    {"slot": "input.0"}                                  a tensor, and where its value stands
    {"slot": "output", "stride": [1, 8], "device": "cuda:0"}    not row-major, not on the CPU
    {"slot": "input.0", "parameter": true}               an `nn.Parameter`
    {"items": {"hidden": {"slot": "output.hidden"}}}     a dict, or fields of a dataclass
    [{"slot": "output.0"}, "None"]                       a list or tuple
    "None"                                               anything else: its repr

Every object has `slot` or `items`, so that no key of a program is taken for one of ours.
"""

from __future__ import annotations

import functools
import json
import re
from collections import UserDict
from collections.abc import Callable
from typing import Any, Final

import torch

from rankscope.capture.pytree import children_of, describe_leaf, is_plain_text, is_tensor, key_names
from rankscope.capture.torch_internals.dtensor import dtensor_parts, is_dtensor

_MOST_DEPTH: Final = 24
_MOST_TEXT: Final = 1 << 18  # a form that takes more is left out
_MOST_SAID: Final = 1 << 14
_MOST_KEY: Final = 100
_ADDRESS: Final = re.compile(r"\bat 0x[0-9A-Fa-f]+")
_TRUSTED: Final = "transformers."
"""Its caches and configurations: what their repr says, they only read."""
_CONSTANT_KEYS: Final = {"True": "true", "False": "false", "None": "null"}
_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_OUTPUT: Final = _encode({"slot": "output"})
Say = Callable[[object], str]  # the text of what is no tensor and no container


def call_form(args: object, kwargs: object, modules: int, say: Say) -> str | None:
    """Return the form of the arguments of a call, with how many modules the called one holds:
    `{"args": [...], "kwargs": {...}, "modules": 2}`; None where it would be too long. Slots are
    `input.0`, `input.name`."""
    if not kwargs and type(args) is tuple and all(map(_is_usual, args)):
        return _of_usual(len(args), modules)
    held = form_of("input", kwargs, say)
    named = held["items"] if isinstance(held, dict) else {}
    return _bounded({"args": form_of("input", args, say), "kwargs": named, "modules": modules})


def result_form(value: object, say: Say) -> str | None:
    """Return the form of what a call returned; None where it would be too long."""
    return _OUTPUT if _is_usual(value) else _bounded(form_of("output", value, say))


def _is_usual(value: object) -> bool:
    return type(value) is torch.Tensor and value.is_cpu and _is_row_major(value)


def _is_row_major(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_contiguous()
    except RuntimeError:  # sparse
        return False


@functools.lru_cache(maxsize=256)
def _of_usual(count: int, modules: int) -> str:
    args = [{"slot": f"input.{index}"} for index in range(count)]
    return _encode({"args": args, "kwargs": {}, "modules": modules})


def form_of(slot: str, value: object, say: Say) -> Any:
    """Return the form of a value whose slot is `slot`, as data for JSON."""
    return _form(slot, value, say, [])


def plain_text_of(value: object) -> str:
    """Return what stands for a leaf where no line of the program's own code may run: its repr,
    without addresses, where that is of Python, torch or transformers; else its class."""
    kind = type(value)
    if is_plain_text(kind):
        return repr(value)[:_MOST_SAID]
    if kind.__repr__ is object.__repr__:
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"<{module}{kind.__qualname__} object at 0xXXXXXXXX>"
    if kind.__module__.startswith(_TRUSTED):
        try:
            return without_addresses(repr(value))
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            return describe_leaf(value)
    return describe_leaf(value)


def without_addresses(text: str) -> str:
    """Return a repr that two runs agree on, cut where it is very long."""
    return _ADDRESS.sub("at 0xXXXXXXXX", text[:_MOST_SAID])


def _bounded(form: object) -> str | None:
    text = _encode(form)
    return text if len(text) <= _MOST_TEXT else None


def _form(slot: str, value: Any, say: Say, path: list[int]) -> Any:
    kind = type(value)
    if is_tensor(value):
        return _tensor(slot, value)
    if is_plain_text(kind) and kind is not torch.Size:
        return say(value)
    if len(path) >= _MOST_DEPTH or id(value) in path:
        return describe_leaf(value)
    path.append(id(value))
    try:
        if issubclass(kind, (tuple, list)):
            named = children_of(value)
            if named is None:  # a shape, or a long row of numbers
                base = tuple if issubclass(kind, tuple) else list
                return [say(item) for item in base.__iter__(value)]
            return [_form(f"{slot}.{name}", item, say, path) for name, item in named]
        if issubclass(kind, dict):
            return _items(slot, value, say, path)
        return _opened(slot, value, say, path)
    finally:
        path.pop()


def _items(slot: str, value: dict[object, object], say: Say, path: list[int]) -> Any:
    items = tuple(dict.items(value))
    forms: dict[str, Any] = {}
    for (key, item), name in zip(items, key_names(key for key, _ in items)):
        text = key if type(key) is str else _CONSTANT_KEYS.get(name) or _text_of_key(key, name)
        forms[name if text in forms else text] = _form(f"{slot}.{name}", item, say, path)
    return {"items": forms}


def _text_of_key(key: object, name: str) -> str:
    """Return what a key of a dict is written as: a tuple as Python writes it, else its name in
    slots."""
    is_plain = type(key) is tuple and all(is_plain_text(type(each)) for each in key)
    text = repr(key) if is_plain else name
    return text if len(text) <= _MOST_KEY else name


def _opened(slot: str, value: object, say: Say, path: list[int]) -> Any:
    """Return the form of any other container: its parts if a tensor is among them, else its repr. A
    cache and other registered nodes are said by their repr, as the debugger of transformers
    does."""
    kind = type(value)
    if kind.__module__.startswith(_TRUSTED) and UserDict not in kind.__mro__:
        return say(value)
    parts = children_of(value)
    if not parts:
        return say(value)
    forms = {name: _form(f"{slot}.{name}", part, say, path) for name, part in parts}
    return {"items": forms} if any(map(_holds_tensor, forms.values())) else say(value)


def _holds_tensor(form: Any) -> bool:
    if isinstance(form, list):
        return any(map(_holds_tensor, form))
    if isinstance(form, dict):
        return "slot" in form or any(map(_holds_tensor, form["items"].values()))
    return False


def _tensor(slot: str, tensor: torch.Tensor) -> dict[str, Any]:
    form: dict[str, Any] = {"slot": slot}
    is_distributed = is_dtensor(type(tensor))
    if issubclass(type(tensor), torch.nn.Parameter) and not is_distributed:
        form["parameter"] = True
    local = dtensor_parts(tensor)[0] if is_distributed else tensor
    try:
        if local.layout is torch.strided and not local.is_contiguous():
            form["stride"] = list(local.stride())
        if local.device.type != "cpu":
            form["device"] = str(local.device)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return {"slot": slot}  # sparse, nested, or a class that refuses: it has no strides
    return form
