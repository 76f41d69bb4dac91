"""Tensors as torch sees them: operations that nothing of the program sees, what kinds of tensors
there are, pytree nodes that libraries registered, and how tensors are printed.

On the CPU rankscope runs no torch operation: it reads attributes and memory, which only function
modes (a default device is one) could notice (`invisible`). Where torch operations are needed
(accelerators, meshes) autograd, autocast, functorch and every Python mode are kept out too
(`invisible_operations`); dtype and device are passed to every factory, whose defaults remain.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch


def loaded_class(module: str, name: str) -> type | None:
    """Return a class of a module that the program imported: otherwise no such object exists."""
    candidate = getattr(sys.modules.get(module), name, None)
    return candidate if isinstance(candidate, type) else None


_C: Any = torch._C


disable_torch_function: Callable[[], contextlib.AbstractContextManager[object]] = getattr(
    _C, "DisableTorchFunction", contextlib.nullcontext
)
"""Context without any `__torch_function__`; without the name modes see our reads."""

function_modes: Callable[[], int] = getattr(_C, "_len_torch_function_stack", lambda: 1)
"""How many modes would see a read of a plain tensor; without torch's name as if there were one."""

_HIDDEN_KEYS = (
    "Python", "PythonTLSSnapshot", "PythonDispatcher", "PreDispatch", "Functionalize",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched",
    "FuncTorchVmapMode", "FuncTorchGradWrapper", "FuncTorchBatchedDecomposition",
    "AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastHPU",
    "AutocastIPU", "AutocastMTIA", "AutocastMAIA", "AutocastXLA", "AutocastPrivateUse1",
)  # fmt: skip


def _hidden_keys() -> object | None:
    keys, kinds = getattr(_C, "DispatchKeySet", None), getattr(_C, "DispatchKey", None)
    if keys is None or kinds is None:
        return None
    chosen = None
    # by name, those that this torch has: a key that is missing has no mode to hide from
    for name in _HIDDEN_KEYS:
        key = kinds.__members__.get(name)
        if key is not None:
            chosen = keys(key) if chosen is None else chosen | keys(key)
    return chosen


_KEYS = _hidden_keys()


def operation_guards() -> Iterable[contextlib.AbstractContextManager[object]]:
    """Return fresh guards against autograd and (with torch's names for it) all modes."""
    yield disable_torch_function()
    # excluded, not switched off: the program's own modes stand there unchanged when the guard is
    # left
    exclude = getattr(_C, "_ExcludeDispatchKeyGuard", None)
    if exclude is not None and _KEYS is not None:
        yield exclude(_KEYS)
    below = getattr(_C, "_AutoDispatchBelowAutograd", None)
    yield below() if below is not None else torch.no_grad()


def _bits_by_key_set() -> Callable[[torch.Tensor], int] | None:
    keys = getattr(_C, "_dispatch_keys", None)
    raw = getattr(getattr(_C, "DispatchKeySet", None), "raw_repr", None)
    return None if keys is None or raw is None else lambda tensor: int(raw(keys(tensor)))


dispatch_bits: Callable[[torch.Tensor], int] = _bits_by_key_set() or (lambda tensor: 0)
"""Dispatch keys of a tensor as one number: kinds differ in it; without the names always 0."""


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """True for the wrappers of torch.func and functionalization: they have no memory."""
    wrapped = getattr(getattr(_C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    functional = getattr(torch, "_is_functional_tensor", None)
    return bool(
        (wrapped is not None and wrapped(tensor)) or (functional is not None and functional(tensor))
    )


def inside_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the gradient transforms of torch.func wrap: the same numbers, in memory. What
    `vmap` batches, or nothing wraps, is returned as it is."""
    functorch: Any = getattr(_C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_gradtrackingtensor", lambda tensor: False)
    while is_wrapped(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def overrides_dispatch(kind: type) -> bool:
    """True for classes with a `__torch_dispatch__` of their own: memory is not value."""
    method = getattr(kind, "__torch_dispatch__", None)
    return getattr(method, "__func__", method) is not getattr(
        torch.Tensor.__torch_dispatch__, "__func__", torch.Tensor.__torch_dispatch__
    )


def registered_children(
    value: object, libraries: frozenset[str]
) -> list[tuple[str, object]] | None:
    """Return the named children of an instance of a pytree node that one of these libraries
    registered, by the registered flatten function, else None. Without torch's table always None."""
    from torch.utils import _pytree  # here: it imports optree machinery that most runs never need

    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None or str(node.flatten_fn.__module__).partition(".")[0] not in libraries:
        return None
    with_keys = getattr(node, "flatten_with_keys_fn", None)
    if with_keys is not None:
        return [(_key_name(key), child) for key, child in with_keys(value)[0]]
    return [(str(index), child) for index, child in enumerate(node.flatten_fn(value)[0])]


def _key_name(key: object) -> str:
    for attribute in ("key", "name", "idx"):
        label = getattr(key, attribute, None)
        if isinstance(label, (str, int)):
            return str(label)
    return type(key).__name__


class PrintOptions(NamedTuple):
    """As torch names and begins with them."""

    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3


def print_options() -> PrintOptions:
    """Return the current print options; without torch's name for them, its defaults."""
    options = getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", PrintOptions())
    return PrintOptions(options.precision, options.threshold, options.edgeitems)


invisible = disable_torch_function
"""Returns a context for reading attributes and memory of tensors, about half a microsecond.
Registering a tensor hook needs no more either: grad mode is left as it is."""


@contextlib.contextmanager
def invisible_operations() -> Iterator[None]:
    """Run torch operations in which no mode, hook, autocast or autograd takes part."""
    with contextlib.ExitStack() as stack:
        for guard in operation_guards():
            stack.enter_context(guard)
        yield
