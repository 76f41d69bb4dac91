"""The tensors inside any argument or result, each with the name of its slot.

A single tensor is `output`, a tuple gives `output.0` and `output.1`, keys and nesting add dots
(`input.cache.key`). Mappings, dataclasses, named tuples, Hugging Face's ModelOutput (a mapping) and
every class registered as a torch pytree node are walked. Anything else is a leaf, and
`describe_leaf` says what it is without calling a line of the user's code and without addresses, so
that two runs agree.
"""

from __future__ import annotations

import enum
import types
from collections import UserDict
from typing import Final

import numpy as np
import torch

from rankscope.capture.torch_internals import registered_children

__all__ = ["describe_leaf", "walk"]

Leaves = list[tuple[str, object]]

_MOST_DEPTH: Final = 24
_MOST_LEAVES: Final = 1 << 16
_MOST_TEXT: Final = 200
_MOST_NAME: Final = 100
_LONG_SEQUENCE: Final = 16
_PRIMITIVES: Final = frozenset({int, float, bool, complex, str, bytes, type(None), type(Ellipsis)})
_SAID_BY_TORCH: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def walk(prefix: str, value: object) -> Leaves:
    """Return (slot, leaf) of every leaf of a value, in order; an empty or absent value has none.

    Args:
        prefix: slot of the value itself: "output", "input" ...
        value: any nesting. It is only read; cycles and excessive depth or width end as leaves.
    """
    if type(value) is torch.Tensor:
        return [(prefix, value)]
    if type(value) is tuple and all(type(item) is torch.Tensor for item in value):
        return [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
    if (type(value) is dict or type(value) is tuple or type(value) is list) and not value:
        return []
    found: Leaves = []
    _walk(prefix, value, found, [])
    return found


def _walk(slot: str, value: object, found: Leaves, path: list[int]) -> None:
    if type(value) in _PRIMITIVES or isinstance(value, torch.Tensor) or len(found) >= _MOST_LEAVES:
        if len(found) < _MOST_LEAVES:
            found.append((slot, value))
        return
    children = None
    if len(path) < _MOST_DEPTH and id(value) not in path:
        children = _children(value)
    if not children:
        found.append((slot, value))
        return
    path.append(id(value))
    for name, child in children:
        _walk(f"{slot}.{name}", child, found, path)
    path.pop()


def _children(value: object) -> Leaves | None:
    """Return the named parts of a container, None for a leaf."""
    if isinstance(
        value, (torch.Size, str, bytes, enum.Enum, type, types.ModuleType, torch.nn.Module)
    ):
        return None
    try:
        if isinstance(value, (tuple, list)):
            return _of_sequence(value)
        if isinstance(value, dict):
            return _named(dict.items(value))
        registered = registered_children(value)
        if registered is not None:
            return _named(registered)
        if isinstance(value, (UserDict, types.MappingProxyType)):
            return _named(list(value.items()))
        fields = getattr(type(value), "__dataclass_fields__", None)
        if isinstance(fields, dict):
            return [(name, getattr(value, name, None)) for name in fields]
    except Exception:  # noqa: BLE001 - a user's container may raise anything; then it is a leaf
        return None
    return None


def _of_sequence(value: tuple[object, ...] | list[object]) -> Leaves | None:
    if len(value) > _LONG_SEQUENCE and _PRIMITIVES.issuperset(map(type, value)):
        return None  # a list of token numbers is one leaf, not a slot for each
    fields = getattr(type(value), "_fields", None)
    if isinstance(fields, tuple) and len(fields) == len(value):
        return list(zip(map(str, fields), value, strict=True))
    return [(str(index), item) for index, item in enumerate(value)]


def _named(items: object) -> Leaves:
    """Return items with slot names for keys; keys that read alike get their position."""
    named: Leaves = []
    used: set[str] = set()
    for key, child in items:  # type: ignore[attr-defined]  # pairs of any mapping
        name = key if type(key) is str else describe_leaf(key)
        if len(name) > _MOST_NAME:
            name = name[:_MOST_NAME] + "~"
        if name in used:
            name = f"{name}#{len(named)}"
        used.add(name)
        named.append((name, child))
    return named


def describe_leaf(value: object) -> str:
    """Return a bounded, address-free description of anything that is not a tensor."""
    kind = type(value)
    if kind in _PRIMITIVES:
        return _primitive(value)
    if isinstance(value, _SAID_BY_TORCH):
        return _bounded(kind.__repr__(value))
    if isinstance(value, enum.Enum):
        return _bounded(f"{kind.__qualname__}.{value._name_}")
    if isinstance(value, type):
        return _bounded(f"class {value.__module__}.{value.__qualname__}")
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return _bounded(f"function {value.__qualname__}")
    if isinstance(value, types.BuiltinFunctionType):
        return _bounded(f"function {value.__name__}")
    if kind is slice or kind is range:
        assert isinstance(value, (slice, range))
        parts = (describe_leaf(part) for part in (value.start, value.stop, value.step))
        return _bounded(f"{kind.__name__}({', '.join(parts)})")
    if kind is np.ndarray:
        assert isinstance(value, np.ndarray)
        return _bounded(f"ndarray {value.dtype.str} {list(value.shape)}")
    if kind.__module__ == "numpy" and isinstance(value, np.generic):
        return _bounded(f"{kind.__name__}({describe_leaf(value.item())})")
    if kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        return _sequence(kind.__name__, value)
    if kind is dict or kind is set or kind is frozenset:
        assert isinstance(value, (dict, set, frozenset))
        return f"{kind.__name__} of {len(value)}"
    return _bounded(f"{kind.__module__}.{kind.__qualname__}")


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
    rest = ", ..." if len(value) > _LONG_SEQUENCE else ""
    return _bounded(f"{name} of {len(value)}: {first}{rest}")


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "~"
