"""torch's own parallelism: what a pipeline and FSDP2 are at, told by the functions they run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType

import torch

from rankscope.capture.torch_internals.loaded import loaded_class

_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def shape_inference() -> frozenset[CodeType]:
    """Return the functions in which a pipeline stage runs once on empty memory, to learn shapes.
    Without their names there are none: that run then counts as a micro-batch."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    if stage is None:
        return frozenset()
    found = (getattr(getattr(stage, name, None), "__code__", None) for name in _INFERENCE)
    return frozenset(code for code in found if code is not None)


def pipeline_schedules() -> tuple[type, ...]:
    """Return the classes whose `step` runs all micro-batches of a batch; every schedule inherits
    one."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    names = ("PipelineScheduleSingle", "PipelineScheduleMulti")
    found = (getattr(schedules, name, None) for name in names)
    return tuple(cls for cls in found if isinstance(cls, type) and "step" in vars(cls))


def stage_modules(schedule: object) -> list[torch.nn.Module]:
    """Return the modules that this rank's stages of a schedule run; without torch's names none."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    found = (getattr(stage, "submod", None) for stage in stages)
    return [module for module in found if isinstance(module, torch.nn.Module)]


def is_sync_off(module: torch.nn.Module) -> bool:
    """True for a DDP or FSDP1 wrapper inside `no_sync()`, and for an FSDP2 module that is told not
    to reduce gradients. Without torch's names, False."""
    own = vars(module)
    if own.get("require_backward_grad_sync") is False or own.get("_sync_gradients") is False:
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
    of backward it does so for what no hook of the graph has reached. Without its names, None: such
    a reduction then belongs to no module."""
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
    (`use_orig_params=True`), each with the process group between whose ranks it is cut. Without
    torch's names there are none."""
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
