"""The first promise in one call: a program plain and the same traced give equal numbers, bitwise.

    def program():
        model = Net()
        losses = train(model)
        return model, losses

    found = traced_unharmed(program, tmp_path / "trace", steps="0-1")

A program builds everything it uses (the random state is the same each time) and returns whatever
counts: tensors, numbers, modules (parameters, buffers and gradients), optimizers (their state), in
any nesting. The random state afterwards is held side by side too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import rankscope
from rankscope.tree.views import Trace

__all__ = ["differences", "numbers_of", "traced_unharmed"]


def traced_unharmed(program: Callable[[], Any], out: Path, **settings: Any) -> Trace:
    """Run a program plain, then traced into `out`, and return the trace.

    Raises:
        AssertionError: a number, or the random state, differs; names each.
    """
    plain = numbers_of(_run, program)
    with rankscope.trace(out=out, **settings) as handle:
        traced = numbers_of(_run, program)
    assert not differences(plain, traced), "\n".join(differences(plain, traced))
    return handle.open()


def numbers_of(run: Callable[..., Any], *arguments: Any) -> dict[str, bytes | str]:
    """Return {name: bytes} of all that a call returned, and of the random state it left."""
    return dict(_flat("result", run(*arguments)))


def differences(plain: Mapping[str, bytes | str], traced: Mapping[str, bytes | str]) -> list[str]:
    """Return the names whose bytes are not the same on both sides."""
    assert plain, "a program that returns nothing proves nothing"
    return sorted(
        f"{name} is not the same with tracing on"
        for name in plain.keys() | traced.keys()
        if plain.get(name) != traced.get(name)
    )


def _run(program: Callable[[], Any]) -> Any:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    result = program()
    state = np.random.get_state()
    return {
        "returned": result,
        "random state": [torch.get_rng_state(), str(state), str(random.getstate())],
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, bytes | str]]:
    if isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from _flat(f"{name}.{key}", tensor)
            yield from _flat(f"{name}.{key}.grad", tensor.grad if tensor.is_leaf else None)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _flat(name, value.state_dict()["state"])
    elif isinstance(value, torch.Tensor):
        yield name, _bytes_of(value)
    elif isinstance(value, np.ndarray):
        yield name, value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _flat(f"{name}.{index}", item)
    else:
        yield name, repr(value)


def _bytes_of(tensor: torch.Tensor) -> bytes | str:
    """Return the bytes of a tensor's values (its own shard of a DTensor), NaN payloads included."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.is_sparse or tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_meta:
        return f"meta {tuple(tensor.shape)} {tensor.dtype}"
    plain = tensor.contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else str(tensor.shape)
