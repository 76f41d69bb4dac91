"""The tensors inside any argument or result, each with the name of its slot, and how they are
nested.

A single tensor is `output`, a tuple gives `output.0` and `output.1`, keys and nesting add dots
(`input.cache.key`). Walked are what is stored in tuples, lists, dicts and their subclasses (named
tuples, Hugging Face's ModelOutput), in a UserDict or UserList, in the fields of dataclasses, and
pytree nodes that a library of `_TRUSTED` registered. Anything else is a leaf, and `describe_leaf`
says what it is, without addresses, so that two runs agree.

No line of the user's own code runs: a container that computes its items would draw its random
numbers twice. So types are asked, never objects (`isinstance` asks for `__class__`, which may be a
property), and builtins are read past what a subclass overrides.

The *form* of a call is how its arguments and results are nested, as JSON:

    {"slot": "input.0"}                                  a tensor, and where its value stands
    {"slot": "output", "stride": [1, 8], "device": "cuda:0"}    not row-major, not on the CPU
    {"slot": "input.0", "parameter": true}               an `nn.Parameter`
    {"items": {"hidden": {"slot": "output.hidden"}}}     a dict, or fields of a dataclass
    [{"slot": "output.0"}, "None"]                       a list or tuple
    "None"                                               anything else: its repr

Every object has `slot` or `items`, so that no key of a program is taken for one of ours.
"""

from __future__ import annotations

import enum
import functools
import gc
import json
import re
import types
from collections import UserDict, UserList
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeGuard

import numpy as np
import torch

from rankscope.capture.torch_internals.distributed import dtensor_parts, is_dtensor
from rankscope.capture.torch_internals.tensors import registered_children

Leaves = list[tuple[str, object]]

_MOST_DEPTH: Final = 24
_MOST_LEAVES: Final = 1 << 16
_MOST_TEXT: Final = 200
_MOST_NAME: Final = 100
_LONG_SEQUENCE: Final = 16
_TRUSTED: Final = frozenset({"torch", "torchrec", "tensordict", "transformers"})
"""Libraries whose flatten functions may be called: they have no side effects."""
_LEAVES: Final = (
    torch.Size, str, bytes, enum.Enum, type, types.ModuleType, torch.nn.Module,
)  # fmt: skip
_PRIMITIVES: Final = frozenset({int, float, bool, complex, str, bytes, type(None), type(Ellipsis)})
_SAID_BY_TORCH: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """True for a tensor; asks its type only."""
    return issubclass(type(value), torch.Tensor)


def is_plain_text(kind: type) -> bool:
    """True for a class whose repr is Python's or torch's own, and short: numbers, dtypes ..."""
    return kind in _PRIMITIVES or kind in _SAID_BY_TORCH


def walk(prefix: str, value: object) -> Leaves:
    """Return (slot, leaf) of every leaf of a nested value, in order; an empty or absent value has
    none. The value is only read; cycles and excessive depth or width end as leaves. `prefix` is the
    slot of the value itself."""
    if type(value) is torch.Tensor:
        return [(prefix, value)]
    if type(value) is tuple and all(type(item) is torch.Tensor for item in value):
        return [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
    if (type(value) is dict or type(value) is tuple or type(value) is list) and not value:
        return []
    leaves: Leaves = []
    _walk(prefix, value, leaves, [])
    return leaves


def parts(slot: str, value: object) -> Leaves:
    """Return the leaves of a value inside another, as `walk` does; an empty one is a leaf here."""
    leaves: Leaves = []
    _walk(slot, value, leaves, [])
    return leaves


def _walk(slot: str, value: object, leaves: Leaves, path: list[int]) -> None:
    if type(value) in _PRIMITIVES or is_tensor(value) or len(leaves) >= _MOST_LEAVES:
        if len(leaves) < _MOST_LEAVES:
            leaves.append((slot, value))
        return
    children = None
    # only the way down is asked: the same list twice is walked twice, a list in itself once
    if len(path) < _MOST_DEPTH and id(value) not in path:
        children = children_of(value)
    if not children:
        leaves.append((slot, value))
        return
    path.append(id(value))
    for name, child in children:
        _walk(f"{slot}.{name}", child, leaves, path)
    path.pop()


def children_of(value: Any) -> Leaves | None:
    """Return the named parts of a container, None for a leaf."""
    kind = type(value)
    if issubclass(kind, _LEAVES):
        return None
    try:
        if issubclass(kind, tuple):
            # the builtin's own iterator: a subclass may compute its items, and draw random numbers
            # doing so
            return _of_sequence(kind, tuple(tuple.__iter__(value)))
        if issubclass(kind, list):
            return _of_sequence(kind, tuple(list.__iter__(value)))
        if issubclass(kind, dict):
            return _named(dict.items(value))
        registered = registered_children(value, _TRUSTED)
        if registered is not None:
            return _named(registered)
        if kind is types.MappingProxyType:
            # a proxy hides its mapping: to ask it for items may run code of the program
            return _of_data(gc.get_referents(value)[0])
        if UserDict in kind.__mro__ or UserList in kind.__mro__:
            return _of_data(_stored(value, "data"))
        fields = _static(kind, "__dataclass_fields__")
        if type(fields) is dict:
            return [(name, _stored(value, name)) for name in fields]
    except Exception:  # noqa: BLE001 - a class may refuse anything; then it is a leaf
        return None
    return None


def _of_data(data: Any) -> Leaves | None:
    if issubclass(type(data), dict):
        return _named(dict.items(data))
    if issubclass(type(data), list):
        return _of_sequence(type(data), tuple(list.__iter__(data)))
    return None


def _stored(value: object, name: str) -> object:
    """Return a value stored in the object, a slot or its class; None if it would be computed."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots only
        attributes = {}
    if name in attributes:
        return attributes[name]
    default = _static(type(value), name)
    if type(default) is types.MemberDescriptorType:
        return default.__get__(value, type(value))
    return None if hasattr(type(default), "__get__") else default


def _static(kind: type, name: str) -> object:
    return next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)


def _of_sequence(kind: type, items: tuple[object, ...]) -> Leaves | None:
    if len(items) > _LONG_SEQUENCE and _PRIMITIVES.issuperset(map(type, items)):
        return None  # a list of token numbers is one leaf, not a slot for each
    fields = _static(kind, "_fields")
    if type(fields) is tuple and len(fields) == len(items):
        return list(zip(map(str, fields), items, strict=True))
    return [(str(index), item) for index, item in enumerate(items)]


def _named(items: object) -> Leaves:
    pairs: tuple[tuple[object, object], ...] = tuple(items)  # type: ignore[arg-type]  # of any mapping
    return list(zip(key_names(key for key, _ in pairs), (child for _, child in pairs)))


def key_names(keys: Iterable[object]) -> list[str]:
    """Return names for the keys of one mapping in slots, all different."""
    names: list[str] = []
    used: set[str] = set()
    for key in keys:
        name = key if type(key) is str else describe_leaf(key)
        if len(name) > _MOST_NAME:
            name = name[:_MOST_NAME] + "~"
        if name in used:
            name = f"{name}#{len(names)}"
        used.add(name)
        names.append(name)
    return names


def describe_leaf(value: Any) -> str:
    """Return a bounded, address-free description of anything that is not a tensor."""
    kind = type(value)
    if kind in _PRIMITIVES:
        return _primitive(value)
    if issubclass(kind, _SAID_BY_TORCH):
        return _bounded(kind.__repr__(value))
    if issubclass(kind, enum.Enum):
        return _bounded(f"{kind.__qualname__}.{_stored(value, '_name_')}")
    if issubclass(kind, type):
        return _bounded(f"class {_name_of(value)}")
    if kind is types.MethodType:
        value = value.__func__
        kind = type(value)
    if kind is types.FunctionType:
        return _bounded(f"function {value.__qualname__}")
    if kind is types.BuiltinFunctionType:
        return _bounded(f"function {value.__name__}")
    if kind is slice or kind is range:
        parts = (describe_leaf(part) for part in (value.start, value.stop, value.step))
        return _bounded(f"{kind.__name__}({', '.join(parts)})")
    if kind is np.ndarray:
        return _bounded(f"ndarray {value.dtype.str} {list(value.shape)}")
    if kind.__module__ == "numpy" and issubclass(kind, np.generic):
        return _bounded(f"{kind.__name__}({describe_leaf(value.item())})")
    if kind is list or kind is tuple:
        return _sequence(kind.__name__, value)
    if kind is dict or kind is set or kind is frozenset:
        return f"{kind.__name__} of {len(value)}"
    return _bounded(_name_of(kind))


def _name_of(kind: type) -> str:
    """Return module and name of a class without running its metaclass's code."""
    module, name = (type.__dict__[key].__get__(kind) for key in ("__module__", "__qualname__"))
    return f"{module}.{name}"


def _primitive(value: object) -> str:
    if isinstance(value, (str, bytes)) and len(value) > _MOST_TEXT:
        return _bounded(repr(value[:_MOST_TEXT]))
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_TEXT:
        return f"int of {value.bit_length()} bits"
    return repr(value)


def _sequence(name: str, value: list[object] | tuple[object, ...]) -> str:
    if not _PRIMITIVES.issuperset(map(type, value[:_LONG_SEQUENCE])):
        return f"{name} of {len(value)}"
    first = ", ".join(map(_primitive, value[:_LONG_SEQUENCE]))
    ellipsis = ", ..." if len(value) > _LONG_SEQUENCE else ""
    return _bounded(f"{name} of {len(value)}: {first}{ellipsis}")


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "~"


_LONGEST_FORM: Final = 1 << 18  # a form that takes more is left out
_MOST_SAID: Final = 1 << 14
_MOST_KEY: Final = 100
_ADDRESS: Final = re.compile(r"\bat 0x[0-9A-Fa-f]+")
_TRUSTED_REPRS: Final = "transformers."
"""Caches and configurations whose repr has no side effects."""
_CONSTANT_KEYS: Final = {"True": "true", "False": "false", "None": "null"}
_encode: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_OUTPUT: Final = _encode({"slot": "output"})
Say = Callable[[object], str]  # the text of what is no tensor and no container


def call_form(args: object, kwargs: object, modules: int, say: Say) -> str | None:
    """Return the form of a call's arguments, with the number of modules that the called module
    holds: `{"args": [...], "kwargs": {...}, "modules": 2}`; None if it would be too long. Slots are
    `input.0`, `input.name`."""
    if not kwargs and type(args) is tuple and all(map(_is_usual, args)):
        return _form_of_tensors(len(args), modules)
    keywords = form_of("input", kwargs, say)
    named = keywords["items"] if isinstance(keywords, dict) else {}
    return _bounded_form({"args": form_of("input", args, say), "kwargs": named, "modules": modules})


def result_form(value: object, say: Say) -> str | None:
    """Return the form of what a call returned; None where it would be too long."""
    return _OUTPUT if _is_usual(value) else _bounded_form(form_of("output", value, say))


def _is_usual(value: object) -> bool:
    return type(value) is torch.Tensor and value.is_cpu and _is_row_major(value)


def _is_row_major(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_contiguous()
    except RuntimeError:  # sparse
        return False


@functools.lru_cache(maxsize=256)
def _form_of_tensors(count: int, modules: int) -> str:
    args = [{"slot": f"input.{index}"} for index in range(count)]
    return _encode({"args": args, "kwargs": {}, "modules": modules})


def form_of(slot: str, value: object, say: Say) -> Any:
    """Return the form of a value whose slot is `slot`, as data for JSON."""
    return _form(slot, value, say, [])


def plain_text_of(value: object) -> str:
    """Return the text of a leaf without running code of the program: its repr, without addresses,
    for types of Python, torch and transformers; else its class."""
    kind = type(value)
    if is_plain_text(kind):
        return repr(value)[:_MOST_SAID]
    if kind.__repr__ is object.__repr__:
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"<{module}{kind.__qualname__} object at 0xXXXXXXXX>"
    if kind.__module__.startswith(_TRUSTED_REPRS):
        try:
            return without_addresses(repr(value))
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            return describe_leaf(value)
    return describe_leaf(value)


def without_addresses(text: str) -> str:
    """Return a repr that two runs agree on, cut where it is very long."""
    return _ADDRESS.sub("at 0xXXXXXXXX", text[:_MOST_SAID])


def _bounded_form(form: object) -> str | None:
    text = _encode(form)
    return text if len(text) <= _LONGEST_FORM else None


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
    """Return the text of a dict's key: a tuple as Python writes it, else its name in slots."""
    is_plain = type(key) is tuple and all(is_plain_text(type(part)) for part in key)
    text = repr(key) if is_plain else name
    return text if len(text) <= _MOST_KEY else name


def _opened(slot: str, value: object, say: Say, path: list[int]) -> Any:
    """Return the form of any other container: its parts if a tensor is among them, else its repr.
    Caches and other registered nodes appear as their repr, as in the debugger of transformers."""
    kind = type(value)
    if kind.__module__.startswith(_TRUSTED_REPRS) and UserDict not in kind.__mro__:
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
