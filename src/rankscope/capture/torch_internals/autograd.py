"""Autograd: the backward pass that runs, the nodes of the graph, hooks on tensors, and what
checkpointing raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rankscope.capture.torch_internals.tensors import loaded_class

_C: Any = torch._C

current_graph_task: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)
"""Number of the backward pass running on this thread, -1 outside; without the name always -1."""

next_node: Callable[[], int] = getattr(
    getattr(_C, "_autograd", None), "_get_sequence_nr", lambda: 0
)
"""Number that the next node of this thread's autograd graph will have; without the name always 0,
and no backward call is found for what backward issues."""

_current_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)


def current_node() -> tuple[int, torch.Tensor | None] | None:
    """Return the number of the graph node that backward executes on this thread, and the leaf whose
    gradient it accumulates; None outside. Without torch's names always None."""
    node = _current_node()
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else (int(number()), getattr(node, "variable", None))


def call_at_end_of_backward(function: Callable[[], None]) -> bool:
    """Call a function when this thread's backward pass has added its last gradient, after earlier
    requests; False, and no call, without torch's name."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:
        return False
    queue(function)
    return True


def has_hook(tensor: torch.Tensor, handle: torch.utils.hooks.RemovableHandle) -> bool:
    """True if this tensor hook was registered; handles never recur. False without torch's table."""
    return handle.id in (getattr(tensor, "_backward_hooks", None) or ())


def stops_recomputation(error: BaseException) -> bool:
    """True for the exception by which checkpointing stops; never without torch's class."""
    stop = loaded_class("torch.utils.checkpoint", "_StopRecomputationError")
    return stop is not None and isinstance(error, stop)
