"""What the files of a trace folder are called, and what progress is told to."""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "NODES_FORMAT",
    "REPLICA_FOLDER",
    "STEPS_FOLDER",
    "TENSOR_FOLDER",
    "TRACE_FORMAT",
    "TRACE_NAME",
    "VALUES_NAME",
    "Progress",
]

VALUES_NAME = "values.safetensors"
TRACE_NAME = "trace.json"
TRACE_FORMAT = "rankscope.trace/1"
NODES_FORMAT = "rankscope.nodes/1"
STEPS_FOLDER = "steps"
TENSOR_FOLDER = "tensors"
"""Folder of the chunks of full tensors inside a trace folder."""
REPLICA_FOLDER = "spool"
"""Folder of the replicas inside a trace folder."""
Progress = Callable[[str, float], None]
"""Told what is being done, and how much of it (0 to 1)."""
