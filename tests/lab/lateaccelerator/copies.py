"""Copies between host and device, and the host memory that takes part in them.

    to the device    from pinned memory, `non_blocking`: the host memory is read when the entry runs
                     from other memory, `non_blocking`: it is read now (CUDA stages it)
                     blocking: the host waits for the stream, and that is counted
    to the host      to pinned memory, `non_blocking`: poison lies there until the entry runs
                     anything else: the host waits, and that is counted

torch's own kernels know no memory that is pinned for a device written in Python, so four operators
of the CPU are replaced: the two that make empty tensors, `is_pinned` and `_pin_memory`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch

from tests.lab.lateaccelerator.memory import POISON, is_pinned, on_host, pinned
from tests.lab.lateaccelerator.streams import (
    current_stream,
    refuse_while_capturing,
    run_to,
    synchronizing,
)

__all__ = ["register"]

_aten: Final = torch.ops.aten
_META: Final = torch.device("meta")
_CPU_KEY: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_kernels: dict[str, Any] = {}
"""torch's own, for memory that is not pinned."""
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Take over copies from and to the device, and pinned memory."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy_from, "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel"
        for name, kernel in (
            ("empty.memory_format", _empty_on_host),
            ("empty_strided", _empty_strided_on_host),
        ):
            _kernels[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
            aten.impl(name, kernel, "CPU")
        aten.impl("is_pinned", _is_pinned, "CPU")
        aten.impl("_pin_memory", _pin_memory, "CPU")
    _libraries.append(aten)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        if source.device.type == "cpu":
            _to_device(source, on_host(target), non_blocking)
        elif target.device.type == "cpu":
            _to_host(on_host(source), target, non_blocking)
        else:
            here, there = on_host(source), on_host(target)
            current_stream().enqueue(lambda: there.copy_(here), "copy")
        return target


def _to_device(source: torch.Tensor, there: torch.Tensor, non_blocking: bool) -> None:
    stream = current_stream()
    if non_blocking:
        held = source if is_pinned(source) else source.clone()
        stream.enqueue(lambda: there.copy_(held), "copy")
        return
    with synchronizing("blocking copy to the device"):
        stream.enqueue(lambda: there.copy_(source), "copy")
        run_to(stream, stream.enqueued)


def _to_host(here: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    stream = current_stream()
    if non_blocking and is_pinned(target):
        _poison(target)
        stream.enqueue(lambda: target.copy_(here), "copy")
        return
    what = "copy to host memory that is not pinned" if non_blocking else "blocking copy to the host"
    with synchronizing(what):
        stream.enqueue(lambda: target.copy_(here), "copy")
        run_to(stream, stream.enqueued)


def _poison(target: torch.Tensor) -> None:
    if target.is_contiguous():
        target.view(-1).view(torch.uint8).fill_(POISON)
    else:
        target.fill_(float("nan") if target.dtype.is_floating_point else -1)


# ---- host memory --------------------------------------------------------------------------------


def _empty_on_host(size: Sequence[int], **options: Any) -> torch.Tensor:
    if not options.get("pin_memory"):
        return _kernels["empty.memory_format"].call_boxed(_CPU_KEY, size, **options)
    shape = _aten.empty.memory_format(
        size, dtype=options.get("dtype"), device=_META, memory_format=options.get("memory_format")
    )
    refuse_while_capturing("to pin memory")
    return pinned(size, shape.stride(), shape.dtype)


def _empty_strided_on_host(
    size: Sequence[int], stride: Sequence[int], **options: Any
) -> torch.Tensor:
    if not options.get("pin_memory"):
        return _kernels["empty_strided"].call_boxed(_CPU_KEY, size, stride, **options)
    refuse_while_capturing("to pin memory")
    return pinned(size, stride, options.get("dtype") or torch.get_default_dtype())


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return is_pinned(tensor)


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    refuse_while_capturing("to pin memory")
    return pinned(tensor.size(), tensor.stride(), tensor.dtype).copy_(tensor)
