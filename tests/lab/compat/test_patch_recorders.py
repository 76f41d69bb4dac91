"""Recorders of one model in terms of replaced classes; every other model keeps its own."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import torch
from torch import nn

from rankscope.compat import (
    OutputRecorder,
    capture_outputs,
    clear_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
)
from tests.compat.test_patch_recorders import Attention, Fused, Layer, Model, Other
from tests.compat.test_patch_recorders import class_unchanged as class_unchanged


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = Model()
        self.right = Model()


def test_models_made_before_and_after_keep_the_recorders_of_their_class() -> None:
    register_patch_mapping({"Attention": Fused})
    before, model = Model(), Model()
    patch_output_recorders(model)
    assert before._can_record_outputs is Model._can_record_outputs
    assert Model()._can_record_outputs is Model._can_record_outputs
    clear_patch_mapping()
    assert model._can_record_outputs["by_name"] is Fused


def test_submodels_are_patched_each_on_its_own_and_a_parent_has_none() -> None:
    register_patch_mapping({"^Layer$": Fused})
    pair = Pair()
    patch_output_recorders(pair)
    for model in (pair.left, pair.right):
        assert model._can_record_outputs["hidden_states"] is Fused
        assert "_can_record_outputs" in vars(model)
    assert not hasattr(pair, "_can_record_outputs")


class Wrapper(nn.Module):
    """Answers for what it wraps, as the modules of torch.compile, FSDP1 and PEFT do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_a_wrapper_that_answers_for_its_model_is_no_model_of_its_own() -> None:
    register_patch_mapping({"Attention": Fused})
    wrapper = Wrapper(Model())
    patch_output_recorders(wrapper)
    assert "_can_record_outputs" not in vars(wrapper)
    assert vars(wrapper.inner)["_can_record_outputs"]["by_name"] is Fused


def test_calling_it_again_changes_nothing_even_where_a_replacement_is_itself_replaced() -> None:
    register_patch_mapping({"Attention": Fused, "Fused": Other})
    model = Model()
    for _ in range(3):
        patch_output_recorders(model)
        assert model._can_record_outputs["by_name"] is Fused


def test_a_patched_model_is_copied_pickled_saved_and_freed_as_before() -> None:
    register_patch_mapping({"Attention": Fused})
    model = Model()
    names = list(model.state_dict())
    patch_output_recorders(model)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert copied._can_record_outputs == model._can_record_outputs
    stored = io.BytesIO(pickle.dumps(model))
    assert pickle.load(stored)._can_record_outputs["by_name"] is Fused
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Tower(nn.Module):
    """Captures by the decorator of this package, and needs nothing of transformers."""

    _can_record_outputs: Any = {  # noqa: RUF012
        "hidden_states": OutputRecorder(Layer),
        "attentions": Attention,
    }

    def __init__(self, layer: type[nn.Linear], attention: type[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(2, 2) for _ in range(3))
        self.attention = attention(2, 2)

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": self.attention(x)}


def counts(model: nn.Module) -> tuple[int, int]:
    asked = model(torch.ones(1, 2), output_hidden_states=True, output_attentions=True)
    return len(asked["hidden_states"]), len(asked["attentions"])


def test_a_captured_model_follows_whether_it_has_captured_before_or_not() -> None:
    register_patch_mapping({"^Layer$": Fused, "^Attention$": Other})
    plain = Tower(Layer, Attention)
    assert counts(plain) == (4, 1)
    used, unused = Tower(Fused, Other), Tower(Fused, Other)
    assert counts(used) == (0, 0)
    for model in (used, unused):
        patch_output_recorders(model)
        assert counts(model) == (4, 1)
    clear_patch_mapping()
    assert counts(used) == counts(unused) == counts(plain) == counts(Tower(Layer, Attention))
