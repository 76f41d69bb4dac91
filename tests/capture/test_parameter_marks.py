"""Marks of frameworks on parameters and activations: what is read, and what is left alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from rankscope.capture.describe import ParameterMarks, activation_marks


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


# ---- what a plan of transformers says of activations ---------------------------------------------


NAME = "transformers.distributed.tensor_parallel"
STYLES = """
class TensorParallelLayer:
    def install_forward(self, module, mesh):
        original_forward = module.forward

        def tp_forward(*args, **kwargs):
            return self, mesh, module, original_forward

        module.forward = tp_forward
        return module

class ColwiseParallel(TensorParallelLayer):
    def __init__(self, **layouts):
        self.__dict__.update(layouts)

class RowwiseParallel(ColwiseParallel): pass
class EmbeddingParallel(TensorParallelLayer): pass
class AllReduceParallel(TensorParallelLayer): pass
class PackedColwiseParallel(ColwiseParallel): pass
"""
"""What is read of transformers 5.23; the tests of `diff` load a model with the real one."""


@pytest.fixture
def styles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    theirs = ModuleType(NAME)
    exec(STYLES, theirs.__dict__)
    monkeypatch.setitem(sys.modules, NAME, theirs)
    return theirs


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group that talks to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(two_ranks: None) -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def said(module: nn.Module) -> dict[str, str]:
    """{slot: placement} of what is said of the activations of a module."""
    return {slot: mark.as_fields()["placement"] for slot, mark in activation_marks(module)}


WHOLE, CUT_LAST = Replicate(), Shard(-1)


@pytest.mark.parametrize(
    ("name", "layouts", "expected"),
    [
        ("ColwiseParallel", (WHOLE, CUT_LAST), ("Replicate()", "Shard(-1)")),
        ("ColwiseParallel", (WHOLE, WHOLE), ("Replicate()", "Replicate()")),
        ("RowwiseParallel", (CUT_LAST, WHOLE), ("Shard(-1)", "Replicate()")),
        ("RowwiseParallel", (WHOLE, WHOLE), ("Replicate()", "Replicate()")),
        ("EmbeddingParallel", (), ("Replicate()", "Replicate()")),
        ("AllReduceParallel", (), (None, "Replicate()")),
        ("PackedColwiseParallel", (WHOLE, CUT_LAST), (None, None)),
        # a program's own: the output is reduced and scattered over the sequence
        ("RowwiseParallel", (CUT_LAST, Shard(1)), ("Shard(-1)", "Shard(1)")),
        # what no style of transformers says
        ("ColwiseParallel", (Shard(-2), Partial()), (None, None)),
        ("ColwiseParallel", (WHOLE, "Shard(-1)"), ("Replicate()", None)),
        ("ColwiseParallel", ((WHOLE,), None), (None, None)),
    ],
)
def test_a_plan_says_how_activations_lie(styles, mesh, name, layouts, expected):
    given = dict(zip(("input_layouts", "output_layouts"), layouts))
    layer = getattr(styles, name)(**given).install_forward(nn.Linear(2, 2), mesh)
    slots = zip(("input.0", "output"), expected)
    assert said(layer) == {slot: text for slot, text in slots if text is not None}
    assert {(m.axis, m.members) for _, m in activation_marks(layer)} <= {("tp", (0, 1))}


def test_a_plan_that_was_not_applied_says_nothing(styles, mesh):
    model = nn.Sequential(nn.Linear(2, 2))
    model._tp_plan, model._device_mesh = {"*": "colwise", "0": 3}, mesh
    assert said(model) == said(model[0]) == {}
    model[0].forward = nn.Linear(2, 2).forward
    assert said(model[0]) == {}
    model[0].forward = "no function"
    assert said(model[0]) == {}


def test_without_a_mesh_of_one_axis_a_plan_says_nothing(styles, two_ranks):
    style = styles.ColwiseParallel(input_layouts=WHOLE, output_layouts=CUT_LAST)
    assert said(style.install_forward(nn.Linear(2, 2), None)) == {}
    assert said(style.install_forward(nn.Linear(2, 2), "tp")) == {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    assert said(style.install_forward(nn.Linear(2, 2), mesh)) == {}
    assert said(style.install_forward(nn.Linear(2, 2), mesh["tp"])) != {}
    unnamed = init_device_mesh("cpu", (2,))
    layer = style.install_forward(nn.Linear(2, 2), unnamed)
    assert {mark.axis for _, mark in activation_marks(layer)} == {"tp"}


def test_a_forward_that_was_replaced_again_says_nothing(styles, mesh):
    style = styles.ColwiseParallel(input_layouts=WHOLE, output_layouts=CUT_LAST)
    layer = style.install_forward(nn.Linear(2, 2), mesh)
    own = layer.forward

    @functools.wraps(own)
    def halved(*args: Any) -> Any:
        return own(*args)

    layer.forward = halved
    assert said(layer) == {}


def test_a_style_of_the_program_or_none_says_nothing(styles, mesh):
    class Own(styles.ColwiseParallel):  # may do anything
        @property
        def input_layouts(self) -> Any:
            raise RuntimeError("asked")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("asked")

    assert said(Own().install_forward(nn.Linear(2, 2), mesh)) == {}
    layer = styles.EmbeddingParallel().install_forward(nn.Linear(2, 2), mesh)
    cell = layer.forward.__closure__[layer.forward.__code__.co_freevars.index("self")]
    cell.cell_contents = 3
    assert said(layer) == {}
    del cell.cell_contents
    assert said(layer) == {}


def test_without_transformers_nothing_is_said(styles, mesh, monkeypatch):
    layer = styles.EmbeddingParallel().install_forward(nn.Linear(2, 2), mesh)
    assert said(layer) != {}
    monkeypatch.setitem(sys.modules, NAME, None)
    assert said(layer) == {}
