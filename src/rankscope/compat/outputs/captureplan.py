"""Which modules of a model one capture records from.

A model's declaration covers its modules down to a submodel that has a declaration of its own,
which covers what is below it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from rankscope.capture.torch_internals.compiling import (
    constant_while_tracing,
    module_with,
    unseen_by_compiler,
)
from rankscope.compat.outputs.outputrecorder import Watch, read_declaration
from rankscope.compat.outputs.states import Tap

DECLARATION = "_can_record_outputs"


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
    found: dict[nn.Module, dict[Tap, None]] = {}  # a module may be held twice

    def walk(module: nn.Module, path: str, watches: tuple[Watch, ...]) -> None:
        if hasattr(type(module), DECLARATION):
            watches = _declared(module, keys)
        cls: Any = type(module)
        for watch in watches:
            if _covers(watch, cls, path):
                first = _first_parameter(module) if watch.takes_first_input else None
                found.setdefault(module, {})[watch.key, watch.index, first] = None
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}", watches)

    walk(model, "", _declared(model, keys))
    return [(module, (*taps,)) for module, taps in found.items()]


def _declared(model: nn.Module, keys: tuple[str, ...]) -> tuple[Watch, ...]:
    watches = read_declaration(getattr(model, DECLARATION, None))
    return tuple(watch for watch in watches if watch.key in keys)


@functools.lru_cache(maxsize=1 << 14)
def _covers(watch: Watch, cls: Any, path: str) -> bool:
    """As `Watch.covers`, which takes longer than the walk through a model."""
    return watch.covers(cls, path)


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
