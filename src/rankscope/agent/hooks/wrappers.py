"""Wrappers around modules, and the class that the user wrote behind them."""

from __future__ import annotations

from torch import nn

_WRAPPED_ATTRIBUTE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module", "DDP"),
    "torch.nn.parallel.data_parallel.DataParallel": ("module", "DataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module",
        "FSDP1",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module",
        "checkpoint",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": (
        "_checkpoint_wrapped_module",
        "offload",
    ),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", "compile"),
}
"""Wrapper class -> (attribute holding the wrapped module, the word the trace uses)."""
_FSDP2 = "torch.distributed.fsdp.FSDPModule"
"""Base of the class that fully_shard() gives a module: no wrapper, but it has another name."""

_wrappers: dict[type, tuple[str, str] | None] = {}


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def wrapper_of(module: nn.Module) -> tuple[str, str] | None:
    """Return where a wrapper holds what it wraps, and the trace's word for it; None for others."""
    cls = type(module)
    if cls not in _wrappers:
        found = (_WRAPPED_ATTRIBUTE.get(_qualified(base)) for base in cls.__mro__)
        _wrappers[cls] = next((wrapper for wrapper in found if wrapper is not None), None)
    return _wrappers[cls]


def own_class(cls: type) -> tuple[type, tuple[str, ...]]:
    """Return the class the user wrote and the words for what was put over it in place."""
    if any(_qualified(base) == _FSDP2 for base in cls.__mro__):
        own = next(
            c for c in cls.__mro__[1:] if issubclass(c, nn.Module) and _qualified(c) != _FSDP2
        )
        return own, ("FSDP2",)
    return cls, ()


def class_behind_wrappers(module: nn.Module) -> type:
    """Return the class the user wrote of what stands inside all wrappers."""
    while (wrapper := wrapper_of(module)) is not None:
        module = getattr(module, wrapper[0])
    return own_class(type(module))[0]
