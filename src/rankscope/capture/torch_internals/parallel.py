"""torch's own parallelism: what a pipeline stage and FSDP2 are at, told by the functions they
run.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch

__all__ = ["shape_inference", "sharded_module_in_hand"]


_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def shape_inference() -> frozenset[CodeType]:
    """Return the functions in which a pipeline stage runs once on empty memory, to learn shapes.

    Without their names, or where no pipeline was imported, there are none: that run then counts as
    a micro-batch.
    """
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    if stage is None:
        return frozenset()
    found = (getattr(getattr(stage, name, None), "__code__", None) for name in _INFERENCE)
    return frozenset(code for code in found if code is not None)


_MOST_FRAMES = 20


def sharded_module_in_hand() -> torch.nn.Module | None:
    """Return the module whose gradients FSDP2 is reducing on this thread's Python stack.

    At the end of backward it does so for what no hook of the graph has reached. Without its names,
    None: such a reduction then belongs to no module.
    """
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
