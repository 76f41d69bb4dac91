"""Which modules of a model one capture records from.

A model's declaration covers its modules down to a submodel that has a declaration of its own,
which covers what is below it. Looking through a model takes time, so what was found in one of some
shape (classes, names, who holds whom) is used again for that shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from torch import nn

from rankscope.capture.torch_internals.compiling import (
    constant_while_tracing,
    module_with,
    unseen_by_compiler,
)
from rankscope.compat.outputs.outputrecorder import Watch, read_declaration
from rankscope.compat.outputs.states import Tap

DECLARATION = "_can_record_outputs"

_NO_CHILDREN: dict[str, nn.Module | None] = {}
_MOST = 1_000_000
"""Modules: beyond any model, and soon reached where one holds itself."""


class _ModelShape(NamedTuple):
    """All that a choice of modules depends on, level by level from the model down; a module held
    twice stands in it twice, and a name that holds none stands in it too."""

    classes: tuple[type, ...]
    names: tuple[str, ...]
    counts: tuple[int, ...]
    """How many children each module holds."""


def modules_to_record(
    model: nn.Module, keys: tuple[str, ...]
) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    """Return the modules to record these outputs from, each once, with what to take from it."""
    # behind a graph break this runs as a frame of its own: compiled, it would be again for every
    # other model that comes or goes
    return unseen_by_compiler(_look)(model, keys)


@constant_while_tracing
def paths_to_record(
    identity: int, keys: tuple[str, ...]
) -> tuple[tuple[str, tuple[Tap, ...]], ...]:
    """Return the same for the model with this `id`, with a path in place of each module."""
    model = module_with(identity)
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple((paths[id(module)], taps) for module, taps in modules_to_record(model, keys))


def _look(model: nn.Module, keys: tuple[str, ...]) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    modules, shape = _read(model)
    declaring = {cls for cls in {*shape.classes} if hasattr(cls, DECLARATION)}
    submodels = [n for n, cls in enumerate(shape.classes) if not n or cls in declaring]
    watches = {n: read_declaration(getattr(modules[n], DECLARATION, None)) for n in submodels}
    found: dict[nn.Module, dict[Tap, None]] = {}  # a module may be held twice
    for position, watch in _choose(shape, tuple(watches.items()), keys):
        module = modules[position]
        assert module is not None
        first = _first_parameter(module) if watch.takes_first_input else None
        found.setdefault(module, {})[watch.key, watch.index, first] = None
    return [(module, (*taps,)) for module, taps in found.items()]


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
    return modules, _ModelShape((*map(type, modules),), (*names,), (*counts,))


@functools.lru_cache(maxsize=64)
def _choose(
    shape: _ModelShape, watches: tuple[tuple[int, tuple[Watch, ...]], ...], keys: tuple[str, ...]
) -> list[tuple[int, Watch]]:
    """Return which positions of the shape are recorded from, with what says so.

    Args:
        shape: of the model.
        watches: what the model and each submodel with a declaration ask for, by position.
        keys: the outputs asked for.
    """
    declared = dict(watches)
    paths, covering = [""] * len(shape.classes), [declared[0]] * len(shape.classes)
    names, child = iter(shape.names), 1
    chosen = []
    for position, cls in enumerate(shape.classes):
        path = paths[position]
        covering[position] = declared.get(position, covering[position])
        for _ in range(shape.counts[position]):  # children stand in the order of who holds them
            paths[child], covering[child] = f"{path}.{next(names)}", covering[position]
            child += 1
        for watch in covering[position]:
            if watch.key in keys and cls is not NoneType and watch.covers(cls, path):
                chosen.append((position, watch))
    return chosen


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
