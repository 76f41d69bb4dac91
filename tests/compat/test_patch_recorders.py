"""Recorders of one model in terms of replaced classes; every other model keeps its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from rankscope.compat import (
    patch_output_recorders,
    register_patch_mapping,
)


class Layer(nn.Linear):
    pass


class Attention(nn.Linear):
    pass


class Fused(nn.Linear):
    pass


class Other(nn.Linear):
    pass


@dataclass
class Recorder:
    target_class: type[nn.Module] | None
    index: int = 0
    layer_name: str | None = None
    class_name: str | None = None


class Model(nn.Module):
    _can_record_outputs: Any = {  # noqa: RUF012
        "hidden_states": Layer,
        "attentions": Recorder(Attention, index=1, layer_name="self"),
        "by_name": "Attention",
        "by_class_name": Recorder(None, class_name="Attention"),
        "several": [Layer, Recorder(Attention, index=2), "Unknown"],
        "a_few": (Layer, "Attention"),
        "odd": 3,
        "odder": None,
    }

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(2, 2)


@pytest.fixture(autouse=True)
def class_unchanged() -> Any:
    before = copy.deepcopy(Model._can_record_outputs)
    recorder = Model._can_record_outputs["attentions"]
    yield
    assert Model._can_record_outputs == before
    assert Model._can_record_outputs["attentions"] is recorder


def test_every_form_of_recorder_of_this_model_targets_the_replacement() -> None:
    register_patch_mapping({"Attention": Fused})
    model = Model()
    patch_output_recorders(model)
    assert model._can_record_outputs == {
        "hidden_states": Layer,
        "attentions": Recorder(Fused, index=1, layer_name="self"),
        "by_name": Fused,
        "by_class_name": Recorder(Fused, class_name="Attention"),
        "several": [Layer, Recorder(Fused, index=2), "Unknown"],
        "a_few": (Layer, Fused),
        "odd": 3,
        "odder": None,
    }


def test_calling_it_after_the_mapping_changed_follows_the_mapping() -> None:
    register_patch_mapping({"Attention": Fused})
    model = Model()
    patch_output_recorders(model)
    register_patch_mapping({"Attention": Other}, overwrite=True)
    patch_output_recorders(model)
    assert model._can_record_outputs["by_name"] is Other


@pytest.mark.parametrize("mapping", [{}, {"Nothing": Fused}])
def test_where_nothing_matches_the_model_gets_no_attribute(mapping: Any) -> None:
    register_patch_mapping(mapping)
    model = Model()
    patch_output_recorders(model)
    assert "_can_record_outputs" not in vars(model)
