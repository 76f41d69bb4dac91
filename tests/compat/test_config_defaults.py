"""`merge_with_config_defaults`: what a call leaves out, and each fault of transformers' own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.capturing import Output, Side, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers


def said(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    """A forward that returns what it was given."""
    return Output(
        last_hidden_state=hidden, given=kwargs, causal=getattr(self.config, "is_causal", None)
    )


def given(side: Side, forward: Callable[..., Any] = said, **config: Any) -> Any:
    return make(side, side.merge_with_config_defaults(forward), **config)


SIDES = [pytest.param(ours, id="ours"), pytest.param(theirs, id="theirs", marks=needs_transformers)]


@pytest.mark.parametrize("side", SIDES)
def test_what_a_call_gives_stands_and_what_it_leaves_out_comes_from_the_config(side: Any) -> None:
    config = {
        "use_cache": True, "vision_feature_layer": -2, "vision_aspect_ratio": "pad",
        "vision_feature_select_strategy": "full",
    }  # fmt: skip
    model = given(side(), **config)
    assert model(hidden())["given"] == config
    changed = model(hidden(), use_cache=False, vision_feature_layer=None)["given"]
    assert changed == {**config, "use_cache": False}


@pytest.mark.parametrize("side", SIDES)
def test_an_unknown_strategy_is_refused(side: Any) -> None:
    with pytest.raises(ValueError, match="sideways"):
        given(side())(hidden(), vision_feature_select_strategy="sideways")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.filterwarnings("ignore:use_cache")
def test_gradient_checkpointing_turns_the_cache_off_in_training_alone(side: Any) -> None:
    model = given(side(), use_cache=True)
    model.gradient_checkpointing = True
    assert model(hidden())["given"]["use_cache"] is True
    assert model.train()(hidden())["given"]["use_cache"] is False


@pytest.mark.parametrize("side", SIDES)
def test_is_causal_of_a_call_stands_in_the_config_while_it_runs(side: Any) -> None:
    for before in ({}, {"is_causal": True}):
        model = given(side(), other=1, **before)
        outputs = model(hidden(), is_causal=False)
        assert outputs["causal"] is False and outputs["given"]["is_causal"] is False
        assert getattr(model.config, "is_causal", None) is before.get("is_causal")
        assert hasattr(model.config, "is_causal") == bool(before)


@pytest.mark.parametrize("side", SIDES)
def test_the_config_is_as_before_after_an_error(side: Any) -> None:
    def failing(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        raise ArithmeticError

    model = given(side(), failing, is_causal=True)
    with pytest.raises(ArithmeticError):
        model(hidden(), is_causal=False)
    assert model.config.is_causal is True


def test_a_model_inside_sees_what_the_call_around_it_put_into_their_config() -> None:
    inner = given(ours())

    def around(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return self.layers[0](hidden)

    model = make(ours(), ours().merge_with_config_defaults(around), layers=lambda: [inner], x=1)
    inner.config = model.config
    assert model(hidden(), is_causal=False)["given"]["is_causal"] is False
    assert not hasattr(model.config, "is_causal")


def test_a_dict_is_a_config() -> None:
    model = given(ours(), functools.partial(lambda self, hidden, **kwargs: kwargs))
    model.config = {"use_cache": True, "is_causal": True}
    assert model(hidden()) == {"use_cache": True, "is_causal": True}


def test_is_causal_is_merged_in_one_graph() -> None:
    torch.compiler.reset()

    def forward(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        outputs = through_layers(self, hidden)
        return Output(
            last_hidden_state=outputs["last_hidden_state"] * (2 if self.config.is_causal else 1)
        )

    merged = ours().merge_with_config_defaults(ours().capture_outputs(forward))
    models = [make(ours(), merged, is_causal=True, use_cache=True) for _ in range(2)]
    compiled = torch.compile(models[1], backend="eager", fullgraph=True)
    for flags in ({}, {"is_causal": False}, {"is_causal": False, "output_hidden_states": True}):
        expected, found = models[0](hidden(), **flags), compiled(hidden(), **flags)
        assert torch.equal(found["last_hidden_state"], expected["last_hidden_state"])
        assert models[1].config.is_causal is True


def test_debug_io_writes_what_the_call_did(tmp_path: Path) -> None:
    merged = ours().merge_with_config_defaults(ours().capture_outputs(through_layers))
    model = make(ours(), merged, use_cache=True)
    fired: list[int] = []
    model.register_forward_hook(lambda *_: fired.append(1))
    outputs = model(hidden(), debug_io=True, debug_io_dir=str(tmp_path), output_hidden_states=True)
    assert len(outputs["hidden_states"]) == 4 and len(fired) == 1
    summary = json.loads((tmp_path / "Model_debug_tree_SUMMARY.json").read_text())
    assert [child["module_path"] for child in summary["children"]] == [
        "Model.layers.0", "Model.layers.1", "Model.layers.2",
    ]  # fmt: skip
