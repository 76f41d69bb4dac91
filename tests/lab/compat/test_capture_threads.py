"""Captures on several threads of one model: each gets its own values and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.capturing import Layer, Output, make, ours

ASK = {"output_hidden_states": True}


class Meeting(Layer):
    """A layer in which as many threads as were agreed on wait for each other."""

    barrier: threading.Barrier

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.barrier.wait(120)
        return super().forward(hidden)


def _together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def _model(threads: int) -> nn.Module:
    model = make(ours(), layers=lambda: [Meeting(), Meeting(), Layer()])
    for layer in model.layers[:2]:
        layer.barrier = threading.Barrier(threads)
    return model


def test_captures_that_overlap_never_see_each_other() -> None:
    asked = [True, False, [0, -1], True, 1]
    inputs = [torch.full((1, 4), float(n)) for n in range(len(asked))]
    alone = _model(1)
    model = _model(len(asked))
    model.load_state_dict(alone.state_dict())
    expected = [alone(x, output_hidden_states=ask) for x, ask in zip(inputs, asked)]
    for _ in range(10):
        calls = [lambda x=x, a=a: model(x, output_hidden_states=a) for x, a in zip(inputs, asked)]
        for found, alone_ in zip(_together(calls), expected):
            assert list(found) == list(alone_)
            for state, wanted in zip(
                found.get("hidden_states", ()), alone_.get("hidden_states", ())
            ):
                assert (state is None) == (wanted is None)
                assert state is None or torch.equal(state, wanted)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_first_capture_on_many_threads_records_every_layer_once() -> None:
    for _ in range(10):
        model = _model(6)
        calls = [lambda m=model: m(torch.ones(1, 4), **ASK)] * 6
        assert [len(found["hidden_states"]) for found in _together(calls)] == [4] * 6


def test_a_thread_that_runs_a_layer_of_a_model_under_capture_adds_nothing() -> None:
    model = make(ours())

    def also_elsewhere(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        hidden = self.layers[0](hidden)
        _together([lambda: self.layers[1](torch.zeros(1, 4))])
        return Output(last_hidden_state=self.layers[1](hidden))

    model = make(ours(), also_elsewhere)
    assert len(model(torch.ones(1, 4), **ASK)["hidden_states"]) == 3


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_captures_on_two_threads_get_their_own_values(fullgraph: bool) -> None:
    torch.compiler.reset()
    model = make(ours())
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    inputs = [torch.full((2, 4), float(n)) for n in range(2)]
    expected = [model(x, **ASK)["hidden_states"] for x in inputs]
    compiled(inputs[0], **ASK)

    def many(x: torch.Tensor) -> list[Any]:
        return [compiled(x, **ASK)["hidden_states"] for _ in range(50)]

    for found, wanted in zip(_together([lambda x=x: many(x) for x in inputs]), expected):
        for states in found:
            assert len(states) == 4 and all(torch.equal(a, b) for a, b in zip(states, wanted))


class Leaving(Layer):
    """A layer that another thread calls once, at the moment when torch has listed the hooks to run
    and the capture takes its own off.
    """

    found: list[torch.Tensor]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            known = dict(self._forward_hooks_with_kwargs)
            thread = threading.Thread(target=lambda: self.found.append(self(hidden)))
            thread.start()
            thread.join(120)
            self._forward_hooks_with_kwargs.update(known)
        else:
            self._forward_hooks_with_kwargs.clear()
        return super().forward(hidden)


def test_a_hook_that_goes_while_another_thread_is_about_to_run_it_does_no_harm() -> None:
    model = make(ours(), layers=lambda: [Leaving()])
    model.layers[0].found = []
    recorded = model(torch.ones(1, 4), **ASK)["hidden_states"]
    assert len(model.layers[0].found) == 1, "the other thread's call returned"
    assert len(recorded) == 2
