"""Dispatch: operations that nothing of the program sees, and what kinds of tensors there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

_C: Any = torch._C


disable_torch_function: Callable[[], contextlib.AbstractContextManager[object]] = getattr(
    _C, "DisableTorchFunction", contextlib.nullcontext
)
"""Context without any `__torch_function__`; without the name modes see our reads."""

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
    for name in _HIDDEN_KEYS:
        key = kinds.__members__.get(name)
        if key is not None:
            chosen = keys(key) if chosen is None else chosen | keys(key)
    return chosen


_KEYS = _hidden_keys()


def operation_guards() -> Iterable[contextlib.AbstractContextManager[object]]:
    """Return fresh guards that keep autograd (without torch's names that alone) and all modes
    out."""
    yield disable_torch_function()
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


def overrides_dispatch(kind: type) -> bool:
    """True for classes with a `__torch_dispatch__` of their own: memory is not value."""
    own = getattr(kind, "__torch_dispatch__", None)
    return getattr(own, "__func__", own) is not getattr(
        torch.Tensor.__torch_dispatch__, "__func__", torch.Tensor.__torch_dispatch__
    )
