"""Which modules of a model one capture records from.

A model's declaration covers its modules down to a submodel that has a declaration of its own,
which covers what is below it. Looking through a model takes time, so what was found is kept beside
the model's shape (classes, names, who holds whom) and used again while that is unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.capture.torch_internals import constant_while_tracing
from rankscope.compat.capturestates import Tap
from rankscope.compat.recorder import Watch, read_declaration

__all__ = ["DECLARATION", "modules_to_record", "paths_to_record"]

DECLARATION = "_can_record_outputs"


@dataclass(frozen=True, slots=True)
class _Place:
    """One module to record from, by its number in the shape and by one path to it."""

    number: int
    path: str
    taps: tuple[Tap, ...]


@dataclass(slots=True)
class _Shape:
    """Everything a choice of modules depends on. Modules are numbered in order of first sight."""

    edges: list[Any]
    classes: list[type]


@dataclass(slots=True)
class _Known:
    """What was found in one model while it had this shape."""

    shape: _Shape
    submodels: list[int]
    """Numbers of the modules with a declaration of their own; the model itself is the first."""
    watches: dict[int, tuple[Watch, ...]] = field(default_factory=dict)
    places: dict[tuple[str, ...], tuple[_Place, ...]] = field(default_factory=dict)
    """Chosen modules by the outputs asked for, under these watches."""


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""Threads may replace each other's entry; each goes on with what it found itself."""


def modules_to_record(
    model: nn.Module, keys: tuple[str, ...]
) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    """Return the modules to record these outputs from, each once, with what to take from it."""
    modules, places = _look(model, keys)
    return [(modules[place.number], place.taps) for place in places]


@constant_while_tracing
def paths_to_record(
    model: nn.Module, keys: tuple[str, ...]
) -> tuple[tuple[str, tuple[Tap, ...]], ...]:
    """Return the same with a path in place of each module."""
    return tuple((place.path.lstrip("."), place.taps) for place in _look(model, keys)[1])


def _look(model: nn.Module, keys: tuple[str, ...]) -> tuple[list[nn.Module], tuple[_Place, ...]]:
    modules, shape = _outline(model)
    known = _known.get(model)
    if known is None or known.shape != shape:
        known = _known[model] = _Known(shape, _submodels(shape))
    watches = {
        number: read_declaration(getattr(modules[number], DECLARATION, None))
        for number in known.submodels
    }
    if known.watches != watches:
        known = _known[model] = _Known(shape, known.submodels, watches)
    places = known.places.get(keys)
    if places is None:
        places = known.places[keys] = _choose(modules, watches, frozenset(keys))
    return modules, places


def _submodels(shape: _Shape) -> list[int]:
    declaring = (n for n, cls in enumerate(shape.classes) if n and hasattr(cls, DECLARATION))
    return [0, *declaring]


def _outline(model: nn.Module) -> tuple[list[nn.Module], _Shape]:
    modules, numbers = [model], {id(model): 0}
    edges: list[Any] = []
    for module in modules:  # grows while it is read
        for name, child in module._modules.items():
            if child is not None:
                number = numbers.setdefault(id(child), len(modules))
                if number == len(modules):
                    modules.append(child)
                edges.append(name)
                edges.append(number)
        edges.append(None)
    return modules, _Shape(edges, [type(module) for module in modules])


def _choose(
    modules: list[nn.Module], watches: dict[int, tuple[Watch, ...]], keys: frozenset[str]
) -> tuple[_Place, ...]:
    numbers = {id(module): number for number, module in enumerate(modules)}
    paths: dict[int, str] = {}
    taps: dict[int, dict[Tap, None]] = {}

    def look(module: nn.Module, path: str, covering: tuple[Watch, ...], above: set[int]) -> None:
        number = numbers[id(module)]
        if number in above:
            return  # it holds itself, at some depth
        covering = watches.get(number, covering)
        paths.setdefault(number, path)
        for watch in covering:
            if watch.key in keys and watch.covers(module, path):
                first = _first_parameter(type(module).forward) if watch.takes_first_input else None
                taps.setdefault(number, {})[watch.key, watch.index, first] = None
        for name, child in module._modules.items():
            if child is not None:
                look(child, f"{path}.{name}", covering, above | {number})

    look(modules[0], "", (), set())
    return tuple(_Place(number, paths[number], tuple(found)) for number, found in taps.items())


@functools.lru_cache(maxsize=1024)
def _first_parameter(forward: Callable[..., Any]) -> str:
    names = list(inspect.signature(forward).parameters)
    return names[1] if len(names) > 1 else ""
