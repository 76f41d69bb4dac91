"""FSDP2 on the device: what it frees is poison.

FSDP2 frees unsharded parameters by resizing their storage to nothing, for which the mechanism has
no door. Here the memory stays allocated and is overwritten behind the work of the current stream:
whoever reads it afterwards, or on a stream that is not ordered behind it, reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from tests.lab.lateaccelerator.memory import POISON, on_host
from tests.lab.lateaccelerator.streams import current_stream

__all__ = ["register"]


def register() -> None:
    """Take over the two functions with which FSDP2 frees storages and fills them again."""
    free: Callable[[torch.Tensor], None] = _fsdp_param.free_storage
    restore: Callable[[torch.Tensor], None] = _fsdp_param.alloc_storage

    def free_storage(tensor: torch.Tensor) -> None:
        if tensor.device.type != "late":
            return free(tensor)
        memory = on_host(tensor.detach()).view(-1).view(torch.uint8)
        return current_stream().enqueue(lambda: memory.fill_(POISON), "free")

    def alloc_storage(tensor: torch.Tensor) -> None:
        if tensor.device.type != "late":
            restore(tensor)

    _fsdp_param.free_storage, _fsdp_param.alloc_storage = free_storage, alloc_storage
