"""The parts of a training script that do not depend on how the model is parallelized."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gpt import Options


def device_of_rank() -> torch.device:
    """Return this rank's accelerator, or the CPU where the host has fewer of them than ranks."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < local_ranks:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, index)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the job for the time of the block, with the backend that fits the device."""
    device = device_of_rank()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Return this process's number in the job, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def report(step: int, loss: float) -> None:
    """Print the loss of one step."""
    print(f"step {step} loss {loss:.6f}", flush=True)


def save_check(
    options: Options, losses: list[float], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Write losses, last gradients, final parameters and random state of this rank, if asked to.

    A parameter split over ranks is written as this rank's part of it.
    """
    if options.check_file is None:
        return
    stem = f"{options.check_file}.rank{rank()}"
    Path(stem).parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in parameters:
        tensors[f"param:{name}"] = _local(parameter)
        if parameter.grad is not None:
            tensors[f"grad:{name}"] = _local(parameter.grad)
    save_file(tensors, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps({"losses": [loss.hex() for loss in losses]}))


def _local(value: Tensor) -> Tensor:
    local = value.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.cpu().clone().contiguous()
