"""torch.distributed: process groups and their store, the classes and operators through which
collectives go, values they may still be writing, DTensors, and what a pipeline and FSDP are at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from rankscope.capture.torch_internals.tensors import loaded_class
from rankscope.layout.placement import PlacementKind
from rankscope.record.ranks import ProcessGroup

_C: Any = torch._C


def process_groups() -> tuple[ProcessGroup, ...]:
    """Return every process group of this rank, the default one first; () without torch's table."""
    world = getattr(getattr(torch.distributed, "distributed_c10d", None), "_world", None)
    names, backends = getattr(world, "pg_names", {}), getattr(world, "pg_map", {})
    groups = []
    # a copy: another thread may make a group, and a dict that changes under iteration raises
    for group, members in list(getattr(world, "pg_group_ranks", {}).items()):
        if group in names:  # else a placeholder for groups of others
            groups.append(
                ProcessGroup(
                    name=str(names[group]),
                    ranks=tuple(sorted(members, key=members.__getitem__)),
                    backend=str(backends.get(group, ("",))[0]),
                    description=str(getattr(group, "group_desc", "")),
                )
            )
    return tuple(groups)


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
    """Return the C++ classes of process groups, of their work objects and of a work's future; None
    in a torch without distributed."""
    c10d, future = getattr(_C, "_distributed_c10d", None), getattr(_C, "Future", None)
    group, work = getattr(c10d, "ProcessGroup", None), getattr(c10d, "Work", None)
    return None if group is None or work is None or future is None else (group, work, future)


def functional_operators(names: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return (name, operator) of the (namespace, name) operators that this torch has. Every Python
    call of an operator uses its attribute `_op`; an operator without it is left out and not
    seen."""
    operators = []
    for space, name in names:
        operator = getattr(getattr(torch.ops, space, None), name, None)
        if hasattr(operator, "_op"):
            operators.append((name, operator))
    return operators


def is_collective_outstanding() -> bool:
    """True while a functional collective has not been waited for, or torch does not tell."""
    # torch's registry forgets a collective once it was waited for; without it everything counts as
    # outstanding
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


def is_dtensor(kind: type) -> bool:
    """True for DTensor and its subclasses."""
    dtensor = loaded_class("torch.distributed.tensor", "DTensor")
    return dtensor is not None and issubclass(kind, dtensor)


def dtensor_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return local tensor and spec of a DTensor, past its properties (modes see those)."""
    parts: Any = tensor
    return parts._local_tensor, parts._spec


def placement_class(placement: object) -> str:
    """Return the name of exactly the classes that are read as a kind of placement, else ""."""
    kind = type(placement)
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return ""
    is_torchs = kind.__module__ == "torch.distributed.tensor.placement_types"
    is_read = PlacementKind.of_torch_class(kind.__name__) is not PlacementKind.OTHER
    return kind.__name__ if is_torchs and is_read else ""


def shard_order(spec: object) -> tuple[int, ...] | None:
    """Return the mesh axes in the order in which they cut, None for their own order.

    Newer torch can shard a dim over axes in another order than the mesh's; without the field the
    order is the mesh's. A strided shard says the order itself: torch 2.10 has both for FSDP2 over
    tensor parallelism.
    """
    order = getattr(spec, "shard_order", None)
    if not order or all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order):
        return None
    if any(type(p).__name__ == "_StridedShard" for p in getattr(spec, "placements", ())):
        return None
    return tuple(axis for entry in order for axis in entry.mesh_dims)


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Return the global ranks of a DeviceMesh in row-major order. Runs torch operations."""
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())


_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def shape_inference() -> frozenset[CodeType]:
    """Return the functions in which a pipeline stage runs once on empty memory to learn shapes.
    Empty without torch's names: then that run counts as a micro-batch."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    if stage is None:
        return frozenset()
    codes = (getattr(getattr(stage, name, None), "__code__", None) for name in _INFERENCE)
    return frozenset(code for code in codes if code is not None)


def pipeline_schedules() -> tuple[type, ...]:
    """Return the base classes of all schedules, whose `step` runs all micro-batches."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    names = ("PipelineScheduleSingle", "PipelineScheduleMulti")
    classes = (getattr(schedules, name, None) for name in names)
    return tuple(cls for cls in classes if isinstance(cls, type) and "step" in vars(cls))


def stage_modules(schedule: object) -> list[torch.nn.Module]:
    """Return the modules that this rank's stages of a schedule run; without torch's names none."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    modules = (getattr(stage, "submod", None) for stage in stages)
    return [module for module in modules if isinstance(module, torch.nn.Module)]


def is_sync_off(module: torch.nn.Module) -> bool:
    """True for a DDP or FSDP1 wrapper inside `no_sync()`, and for an FSDP2 module that is told not
    to reduce gradients. Without torch's names, False."""
    facts = vars(module)
    if facts.get("require_backward_grad_sync") is False or facts.get("_sync_gradients") is False:
        return True
    sharded = loaded_class("torch.distributed.fsdp", "FSDPModule")
    if sharded is None or not isinstance(module, sharded):
        return False
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", 0)]
    names = ("reduce_grads", "all_reduce_grads")
    return any(getattr(group, name, True) is False for group in groups for name in names)


def is_flattened(parameter: torch.Tensor) -> bool:
    """True for a parameter of FSDP1, its flat one or a view into that: while backward runs FSDP1
    keeps the gradient of earlier passes elsewhere. Without torch's mark, False."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


_MOST_FRAMES = 20


def sharded_module_in_hand() -> torch.nn.Module | None:
    """Return the module whose gradients FSDP2 is reducing on this thread's Python stack: at the end
    of backward, for gradients that no hook of the graph has reached. Without torch's names, None:
    such a reduction then belongs to no module."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "post_backward":
            modules = getattr(frame.f_locals.get("self"), "modules", None)
            if isinstance(modules, tuple) and modules:
                return modules[0] if isinstance(modules[0], torch.nn.Module) else None
        frame = frame.f_back
    return None


def sharded_originals(
    modules: Iterable[torch.nn.Module],
) -> Iterator[tuple[torch.nn.Parameter, object]]:
    """Yield the original parameters that FSDP1 keeps as runs of a flat one
    (`use_orig_params=True`), each with the process group whose ranks share it. Without torch's
    names there are none."""
    kind = loaded_class("torch.distributed.fsdp._flat_param", "FlatParamHandle")
    if kind is None:
        return
    for module in modules:
        handle = module.__dict__.get("_handle")
        if not isinstance(handle, kind) or not getattr(handle, "uses_sharded_strategy", False):
            continue
        flat = getattr(handle, "flat_param", None)
        for parameter in getattr(flat, "_params", None) or ():
            yield parameter, getattr(handle, "process_group", None)
