"""Marks of frameworks on parameters: what is read of them, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankscope.capture.describe import ParameterMarks


def mark_of(**attributes: Any) -> tuple[str, str] | None:
    """Axis and placement that these attributes give a parameter of shape [4, 6]."""
    layer = nn.Linear(6, 4, bias=False)
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    found = ParameterMarks([layer]).of(layer, layer.weight)
    return None if found is None else (found.axis, str(found.placement))


CUT = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        (CUT, ("tp", "Shard(0)")),
        (CUT | {"partition_dim": 1, "allreduce": True}, ("tp", "Shard(1)")),
        (CUT | {"partition_stride": 2}, ("tp", "StridedShard(0, split_factor=2)")),
        (CUT | {"allreduce": False}, ("etp", "Shard(0)")),
        ({"tensor_model_parallel": False, "partition_dim": -1}, ("tp", "Replicate()")),
        ({"sequence_parallel": True}, ("tp", "Replicate()")),
        ({"sequence_parallel": False, "allreduce": True}, ("tp", "Replicate()")),
        # an expert's bias is whole along an axis whose ranks it does not name
        ({"allreduce": False, "sequence_parallel": False}, None),
        # `allreduce` alone says nothing of tensor parallelism
        ({"allreduce": True}, None),
        # something else's attributes of these names
        ({"tensor_model_parallel": "yes"}, None),
        (CUT | {"partition_dim": 2}, None),
        (CUT | {"partition_dim": -1}, None),
        (CUT | {"partition_stride": 0}, None),
        ({"sequence_parallel": "no"}, None),
    ],
)
def test_megatron_says_how_a_parameter_lies(attributes, expected):
    assert mark_of(**attributes) == expected


def test_reading_marks_runs_no_code_of_the_program():
    class Loud(nn.Parameter):
        @property
        def tensor_model_parallel(self) -> bool:
            raise RuntimeError("asked")

    layer = nn.Linear(2, 2, bias=False)
    layer.weight = Loud(torch.ones(2, 2))
    layer.tp_group = "no group"
    assert ParameterMarks([layer]).of(layer, layer.weight) is None
    layer.weight.__dict__["sequence_parallel"] = False
    found = ParameterMarks([layer]).of(layer, layer.weight)
    assert found is not None and found.members is None
