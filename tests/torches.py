"""What versions of torch from 2.8 on differ in, where a test has to say which gives what.

Each name says what a version does wrong or does not have yet.
`tests/lab/distributed/test_torches.py` holds the running torch to them; docs/questions.md says it
to users.
"""

from __future__ import annotations

import inspect
import re
from typing import ClassVar

import torch
from torch import nn
from torch.distributed import distributed_c10d

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

GLOO_SUMS_FOR_AVERAGES = TORCH < (2, 9)
"""`reduce_scatter_tensor` over gloo takes ReduceOp.AVG and sums: every gradient of FSDP2 is as many
times too large as ranks share the batch."""

GATHERS_COMPLEX = TORCH >= (2, 9)
"""Else `full_tensor` of complex shards raises `Invalid scalar type` over gloo."""

HAS_SCHEDULE_EVAL = TORCH >= (2, 9)
"""Pipeline schedules have `eval`; without it only one that has no loss runs forward alone."""

COALESCED_GATHERS_ARE_ASYNC = "(outputs, inputs)" in inspect.getsource(
    distributed_c10d._coalescing_manager
)
"""Coalesced all-gathers are handed no options (2.8, 2.9): asynchronous, and torch waits itself."""

PRINTS_WIDE = "PRINT_OPTS.sci_mode is None" not in inspect.getsource(torch._tensor_str._Formatter)
"""Where `sci_mode=True` is asked for, torch pads and breaks lines (2.8) for numbers as wide as
without it."""

STRIDED_SHARDS_ARE_CUT_EVENLY = TORCH < (2, 10)
"""Where a dim does not divide, `_StridedShard` means other rows than FSDP2 over tensor parallelism
gives a rank: `full_tensor` of these has wrong rows."""

GATHERS_STRIDED_SHARDS = TORCH not in ((2, 10), (2, 11))
"""Else `full_tensor` of a `_StridedShard` raises, but for the form that FSDP2 makes."""

KEEPS_GROUPS = TORCH in ((2, 11), (2, 12))
"""A mesh of an earlier call, and the threads of its groups, outlive every cache that is emptied."""


def own_defect(error: BaseException) -> str:
    """Return what torch itself does wrong where that ended a test's ranks or programs; "" where
    nothing known did. Pipeline stages of torch 2.9 greet each other with 8 bytes and receive 4.
    """
    is_greeting = TORCH == (2, 9) and "8 vs 4. Received data size doesn't match" in str(error)
    return "pipeline stages of torch 2.9 abort over gloo as they greet each other" * is_greeting


RUNS_ZERO_BUBBLE = TORCH >= (2, 12)
"""Else `ScheduleZBVZeroBubble` loses its connections over gloo, on two ranks."""

REFUSES_OUTER_AXES = TORCH < (2, 9)
"""`parallelize_module` raises for an axis that is not the last of its mesh."""

PADS_EMPTY = TORCH >= (2, 10)
"""Else `full_tensor` of a shard that has to be padded raises where another dim has no elements."""


class _WithDict(nn.Module):
    words: ClassVar[dict[str, int]] = {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self.words)


def follows_dicts_in_strict_export() -> bool:
    """False where `torch.export.export(strict=True)` follows no attribute of a module that is a
    dict (2.8, 2.9), as the declaration of `capture_outputs` is.
    """
    try:
        torch.export.export(_WithDict(), (torch.ones(2),), strict=True)
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def of_program(stdout: str) -> str:
    """Return what a program printed, without the lines that gloo of torch 2.8 prints there. Ranks
    print these at once, so that lines are torn.
    """
    gloo = re.compile(r"\[Gloo\]|peer ranks|^\d*$")
    return "".join(line + "\n" for line in stdout.splitlines() if not gloo.search(line))
