"""Nothing that watches torch can notice a digest, and nothing that changes torch can change it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from rankscope.capture.describe import Describer
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.digest import Digester
from rankscope.capture.measuring import ValueNumbers
from rankscope.capture.pytree import walk
from rankscope.capture.torch_internals.tensors import invisible

CPU = torch.device("cpu")


def on_host(x: torch.Tensor) -> ValueNumbers:
    with invisible():
        described, local = Describer(0).describe(walk("output", x)[0][1])  # type: ignore[arg-type]
        return Digester().read(local, described.meta.ranges, samples=True)


def by_torch(x: torch.Tensor) -> ValueNumbers:
    digester = DeviceDigester(CPU)
    digester.read(x, None, samples=True)
    return digester.collect(wait=True)[0][1]


def same(one: ValueNumbers, other: ValueNumbers) -> bool:
    return one._replace(samples=None) == other._replace(samples=None)


BOTH = pytest.mark.parametrize("read", [on_host, by_torch])
Read = Callable[[torch.Tensor], ValueNumbers]


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@BOTH
def test_function_and_dispatch_modes_see_nothing(read: Read) -> None:
    x = torch.randn(40, 300, requires_grad=True)
    expected = read(x)
    with (
        Functions() as functions,
        Operations() as operations,
        FlopCounterMode(display=False) as flops,
    ):
        # a mode's own entering may be seen by the other one
        functions.seen.clear()
        operations.seen.clear()
        reading = read(x)
        assert functions.seen == []
        assert operations.seen == []
    assert flops.get_total_flops() == 0
    assert same(reading, expected)


@BOTH
def test_autocast_default_device_default_dtype_and_grad_mode_change_nothing(read: Read) -> None:
    x = torch.randn(40, 300)
    expected = read(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(read(x), expected)
    with torch.device("meta"):
        assert same(read(x), expected)
    torch.set_default_dtype(torch.float16)
    try:
        assert same(read(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert same(read(x), expected)


@BOTH
def test_saved_tensor_hooks_and_the_graph_are_left_alone(read: Read) -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(30, 30, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        read(x)
    assert saved == []
    assert x.grad_fn is None
    version = x._version
    read(x)
    assert x._version == version


@BOTH
@pytest.mark.parametrize("kind", ["reentrant", "plain", "selective"])
def test_gradients_under_checkpointing_are_bitwise_the_same(read: Read, kind: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(8, 64)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def gradient(watched: bool) -> torch.Tensor:
        w = weight.clone().requires_grad_()

        def block(value: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(value @ w)
            if watched:
                read(hidden)
            return (hidden @ w).sin()

        options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
        if kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        checkpoint(block, x.clone().requires_grad_(), **options).sum().backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(gradient(watched=False), gradient(watched=True))


@BOTH
def test_the_random_state_is_untouched(read: Read) -> None:
    x = torch.randn(100)
    state = torch.get_rng_state()
    read(x)
    assert torch.equal(torch.get_rng_state(), state)
