"""Each fault of transformers' own `merge_with_config_defaults`, which fails there and not here."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.capturing import Output, Side, hidden, make, ours, theirs
from tests.compat.peer import needs_transformers
from tests.compat.test_config_defaults import given

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


@needs_transformers
def test_debug_io_of_transformers_writes_nothing(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaModel(config)(torch.tensor([[1, 2]]), debug_io=True, debug_io_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
