"""`merge_with_config_defaults`: what a call leaves out, and each fault of transformers' own."""

from __future__ import annotations

import functools
import json
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.capturing import Output, Side, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers

Promise = Callable[[Side], None]
PROMISES: list[Promise] = []
BREAKS: dict[Promise, type[BaseException]] = {}
"""How transformers 5.23.0 breaks each promise."""


def breaks_by(error: type[BaseException]) -> Callable[[Promise], Promise]:
    def note(promise: Promise) -> Promise:
        PROMISES.append(promise)
        BREAKS[promise] = error
        return promise

    return note


def said(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    """A forward that returns what it was given."""
    return Output(
        last_hidden_state=hidden, given=kwargs, causal=getattr(self.config, "is_causal", None)
    )


def given(side: Side, forward: Callable[..., Any] = said, **config: Any) -> Any:
    return make(side, side.merge_with_config_defaults(forward), **config)


@breaks_by(TypeError)
def use_cache_may_be_given_by_position_to_a_captured_forward(side: Side) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor, use_cache: Any = None, **k: Any) -> Output:
        return Output(last_hidden_state=hidden, use_cache=use_cache)

    stacked = side.merge_with_config_defaults(side.capture_outputs(forward))
    model = make(side, stacked, use_cache=True)
    assert model(hidden(), False)["use_cache"] is False
    assert model(hidden())["use_cache"] is True


@breaks_by(TypeError)
def a_forward_is_given_no_argument_it_cannot_take(side: Side) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor) -> Output:
        return Output(last_hidden_state=hidden)

    model = given(side, forward, use_cache=True, vision_feature_layer=-2)
    assert torch.equal(model(hidden())["last_hidden_state"], hidden())


@breaks_by(TypeError)
def is_causal_in_the_config_asks_for_no_keyword(side: Side) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor) -> Output:
        return Output(last_hidden_state=hidden)

    given(side, forward, is_causal=True)(hidden())


@breaks_by(TypeError)
def a_local_variable_is_not_an_argument(side: Side) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor, *, other: Any = None) -> Output:
        use_cache = hidden
        return Output(last_hidden_state=use_cache)

    given(side, forward, use_cache=True)(hidden())


@breaks_by(AttributeError)
def a_forward_may_be_any_callable(side: Side) -> None:
    class Forward:
        def __call__(self, model: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Any:
            return kwargs

    merged = side.merge_with_config_defaults(Forward())
    model = make(side, use_cache=True)
    assert merged(model, hidden())["use_cache"] is True


@breaks_by(AttributeError)
def a_model_needs_no_config(side: Side) -> None:
    merged = side.merge_with_config_defaults(lambda self, hidden, **kwargs: kwargs)
    assert merged(nn.Linear(4, 4), hidden(), use_cache=True) == {"use_cache": True}


@breaks_by(AssertionError)
def a_config_shared_by_threads_says_afterwards_what_it_said_before(side: Side) -> None:
    begun, both, ended = (threading.Event() for _ in range(3))

    def forward(self: nn.Module, hidden: torch.Tensor, order: str, **kwargs: Any) -> Output:
        if order == "first":
            begun.set()
            assert both.wait(120)
        else:
            both.set()
            assert ended.wait(120)
        return Output(last_hidden_state=hidden, given=kwargs)

    model = given(side, forward, is_causal=True)
    first = threading.Thread(target=lambda: model(hidden(), order="first", is_causal=False))
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(model(hidden(), order="second")))
    first.start()
    assert begun.wait(120)
    second.start()
    first.join()
    ended.set()
    second.join()
    assert model.config.is_causal is True
    assert found[0]["given"]["is_causal"] is True


@breaks_by(AttributeError)
def a_config_that_cannot_change_is_left_alone(side: Side) -> None:
    class Fixed(types.SimpleNamespace):
        is_causal = property(lambda self: True)

    merged = side.merge_with_config_defaults(lambda self, hidden, **kwargs: kwargs)
    model = nn.Linear(4, 4)
    model.config = Fixed()
    assert merged(model, hidden()) == {"is_causal": True}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_rankscope_keeps(promise: Promise) -> None:
    promise(ours())


@needs_transformers
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_transformers_breaks(promise: Promise) -> None:
    with pytest.raises(BREAKS[promise]) as raised:
        promise(theirs())
    assert type(raised.value) is BREAKS[promise]


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


@needs_transformers
def test_debug_io_of_transformers_writes_nothing(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaModel(config)(torch.tensor([[1, 2]]), debug_io=True, debug_io_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
