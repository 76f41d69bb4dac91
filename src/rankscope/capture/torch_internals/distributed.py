"""torch.distributed: process groups, its store, the classes and operators through which collectives
go, and values they may still be writing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rankscope.capture.torch_internals.loaded import loaded_class
from rankscope.record.streams import ProcessGroup

_C: Any = torch._C


def process_groups() -> tuple[ProcessGroup, ...]:
    """Return every process group of this rank, the default one first; () without torch's table."""
    world = getattr(getattr(torch.distributed, "distributed_c10d", None), "_world", None)
    names, backends = getattr(world, "pg_names", {}), getattr(world, "pg_map", {})
    found = []
    for group, members in list(getattr(world, "pg_group_ranks", {}).items()):
        if group in names:  # else a placeholder for groups of others
            found.append(
                ProcessGroup(
                    name=str(names[group]),
                    ranks=tuple(sorted(members, key=members.__getitem__)),
                    backend=str(backends.get(group, ("",))[0]),
                    description=str(getattr(group, "group_desc", "")),
                )
            )
    return tuple(found)


def group_ranks(group: object) -> tuple[int, ...] | None:
    """Return the global ranks of a group in its own order; None where torch's table lacks it."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    members = getattr(world, "pg_group_ranks", {}).get(group)
    return None if members is None else tuple(sorted(members, key=members.__getitem__))


def group_named(name: str) -> Any:
    """Return the process group of this name; None without the name of torch's function."""
    resolve = getattr(getattr(_C, "_distributed_c10d", None), "_resolve_process_group", None)
    return resolve(name) if resolve is not None else None


def collectives_issued(group: Any, device: torch.device | None) -> int | None:
    """Return how many collectives this rank has issued in a group since the group was made, by the
    count that torch keeps of them for this device; None where the backend keeps none.

    gloo counts sends and receives as well, and rank 0 of a `monitored_barrier` counts more than the
    others: the count is the same on all ranks only where these are.
    """
    try:
        counted = group if device is None else group._get_backend(device)
        return int(counted._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, NotImplementedError):  # a backend without, or of others
        return None


def default_store() -> Any:
    """Return the store of the default process group, None where torch does not say."""
    find = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return find() if find is not None else None


def collective_classes() -> tuple[Any, Any, Any] | None:
    """Return the classes of process groups, of the work they hand out and of a work's future, as
    C++ made them; None in a torch without distributed."""
    c10d, future = getattr(_C, "_distributed_c10d", None), getattr(_C, "Future", None)
    group, work = getattr(c10d, "ProcessGroup", None), getattr(c10d, "Work", None)
    return None if group is None or work is None or future is None else (group, work, future)


def functional_operators(names: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return (name, operator) of those of the (namespace, name) operators this torch has. Every
    Python call of one goes through its attribute `_op`; an operator without is left out and not
    seen."""
    found = []
    for space, name in names:
        operator = getattr(getattr(torch.ops, space, None), name, None)
        if hasattr(operator, "_op"):
            found.append((name, operator))
    return found


def is_collective_outstanding() -> bool:
    """True while a functional collective has not been waited for, or torch does not tell."""
    count = getattr(getattr(_C, "_distributed_c10d", None), "_get_work_registry_size", None)
    return count is None or count() != 0


def is_async_collective(kind: type) -> bool:
    """True for the class of values that a functional collective may still be writing."""
    waiting = loaded_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return waiting is not None and issubclass(kind, waiting)


def async_collective_result(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the plain tensor behind an AsyncCollectiveTensor, and whether it may be read. Nothing
    is waited for.

    It may be read once somebody has waited: the tensor says so itself, or no functional collective
    of this process is outstanding. Without torch's names it never may.
    """
    waiting: Any = tensor
    result = getattr(waiting, "elem", None)
    if not isinstance(result, torch.Tensor):
        return tensor, False
    return result, bool(getattr(waiting, "completed", False)) or not is_collective_outstanding()
