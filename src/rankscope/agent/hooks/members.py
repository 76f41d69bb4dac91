"""What a module holds, read off torch's own tables: a user's class may override every method that
lists modules, parameters or buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def modules_of(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (raw path, module) of a module and all below it, each once, in torch's own order."""
    seen: set[int] = set()
    waiting = [("", top)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in module._modules.items()
            if child is not None
        ]
        waiting.extend(reversed(children))


def parameters_of_module(top: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module and of all below it, each once, in torch's own order."""
    seen: set[int] = set()
    for _, module in modules_of(top):
        for parameter in own_parameters(module).values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name; scripted modules keep theirs in C++."""
    found = module._parameters
    return found if isinstance(found, dict) else dict(found.items())


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; scripted modules keep theirs in C++."""
    found = module._buffers
    return found if isinstance(found, dict) else dict(found.items())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what backward left in a parameter. FSDP1 puts views of its flat parameter in a
    parameter's place between forward and backward: no leaves, so they hold no gradient, and torch
    warns of the question."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None
