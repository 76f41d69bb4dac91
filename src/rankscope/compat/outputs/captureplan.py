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

from rankscope.capture.torch_internals.compiling import (
    constant_while_tracing,
    module_with,
    unseen_by_compiler,
)
from rankscope.compat.outputs.outputrecorder import Watch, read_declaration
from rankscope.compat.outputs.states import Tap

__all__ = ["DECLARATION", "modules_to_record", "paths_to_record"]

DECLARATION = "_can_record_outputs"
_NO_CHILDREN: dict[str, nn.Module | None] = {}
_MOST = 1_000_000
"""Modules: beyond any model, and soon reached where one holds itself."""


@dataclass(frozen=True, slots=True)
class _RecordedModule:
    """One module to record from, by its position in the shape."""

    position: int
    taps: tuple[Tap, ...]


@dataclass(slots=True)
class _ModelShape:
    """Everything that a choice of modules depends on, level by level from the model down; a module
    held twice stands in it twice, and a name that holds none stands in it too.
    """

    classes: list[type]
    names: list[str]
    counts: list[int]
    """How many children each module holds."""


@dataclass(slots=True)
class _Known:
    """What was found in one model while it had this shape."""

    shape: _ModelShape
    submodels: list[int]
    """Positions of the modules with a declaration of their own; the model itself is the first."""
    watches: dict[int, tuple[Watch, ...]] = field(default_factory=dict)
    places: dict[tuple[str, ...], tuple[_RecordedModule, ...]] = field(default_factory=dict)
    """Chosen modules by the outputs asked for, under these watches."""


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
"""Threads may replace each other's entry; each goes on with what it found itself."""


def modules_to_record(
    model: nn.Module, keys: tuple[str, ...]
) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    """Return the modules to record these outputs from, each once, with what to take from it."""
    # behind a graph break this runs as a frame of its own: compiled, it would be again for every
    # other model that comes or goes
    modules, places = unseen_by_compiler(_look)(model, keys)
    found: dict[int, tuple[nn.Module, tuple[Tap, ...]]] = {}
    for place in places:
        module, taps = modules[place.position], place.taps
        assert module is not None
        if id(module) in found:  # held twice
            taps = tuple(dict.fromkeys(found[id(module)][1] + taps))
        found[id(module)] = module, taps
    return list(found.values())


@constant_while_tracing
def paths_to_record(
    identity: int, keys: tuple[str, ...]
) -> tuple[tuple[str, tuple[Tap, ...]], ...]:
    """Return the same for the model with this `id`, with a path in place of each module."""
    model = module_with(identity)
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple((paths[id(module)], taps) for module, taps in modules_to_record(model, keys))


def _look(
    model: nn.Module, keys: tuple[str, ...]
) -> tuple[list[nn.Module | None], tuple[_RecordedModule, ...]]:
    modules, shape = _read(model)
    known = _known.get(model)
    if known is None or known.shape != shape:
        known = _known[model] = _Known(shape, _submodels(shape))
    watches = {
        position: read_declaration(getattr(modules[position], DECLARATION, None))
        for position in known.submodels
    }
    if known.watches != watches:
        known = _known[model] = _Known(shape, known.submodels, watches)
    places = known.places.get(keys)
    if places is None:
        places = known.places[keys] = _choose(shape, modules, watches, frozenset(keys))
    return modules, places


def _read(model: nn.Module) -> tuple[list[nn.Module | None], _ModelShape]:
    modules: list[nn.Module | None] = [model]
    names: list[str] = []
    counts: list[int] = []
    for module in modules:  # grows while it is read
        children = _NO_CHILDREN if module is None else module._modules
        counts.append(len(children))
        if children:
            modules += children.values()
            names += children.keys()
            if len(modules) > _MOST:
                raise RecursionError(f"{type(model).__name__} holds itself, at some depth")
    return modules, _ModelShape(list(map(type, modules)), names, counts)


def _submodels(shape: _ModelShape) -> list[int]:
    declaring = (n for n, cls in enumerate(shape.classes) if n and hasattr(cls, DECLARATION))
    return [0, *declaring]


def _choose(
    shape: _ModelShape,
    modules: list[nn.Module | None],
    watches: dict[int, tuple[Watch, ...]],
    keys: frozenset[str],
) -> tuple[_RecordedModule, ...]:
    paths, covering = [""] * len(modules), [watches[0]] * len(modules)
    names, child = iter(shape.names), 1
    places = []
    for position, module in enumerate(modules):
        if module is None:
            continue
        path = paths[position]
        covering[position] = watches.get(position, covering[position])
        for _ in range(shape.counts[position]):  # children stand in the order of who holds them
            paths[child], covering[child] = f"{path}.{next(names)}", covering[position]
            child += 1
        taps: dict[Tap, None] = {}
        for watch in covering[position]:
            if watch.key in keys and watch.covers(module, path):
                first = _first_parameter(module) if watch.takes_first_input else None
                taps[watch.key, watch.index, first] = None
        if taps:
            places.append(_RecordedModule(position, tuple(taps)))
    return tuple(places)


def _first_parameter(module: nn.Module) -> str:
    schema: Any = getattr(module.forward, "schema", None)
    if schema:  # TorchScript, whose class has no forward
        names = [each.name for each in schema.arguments]
    else:
        names = _parameters(type(module).forward)
    return names[1] if len(names) > 1 else ""


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # written in C
        return []
