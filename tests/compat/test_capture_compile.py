"""Captures in compiled models: whole, in parts, in one graph, exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.compat.capturing import Output, hidden, make, ours

ASK = {"output_hidden_states": True}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def assert_equal(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    assert len(found["hidden_states"]) == len(expected["hidden_states"])
    for ours_, theirs_ in zip(found["hidden_states"], expected["hidden_states"]):
        assert (ours_ is None) == (theirs_ is None)
        assert ours_ is None or torch.equal(ours_, theirs_)


def assert_clean(model: nn.Module, tables: list[int]) -> None:
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in model.modules())
    assert [id(m._forward_hooks) for m in model.modules()] == tables


@pytest.mark.parametrize("before", ["nothing", "a plain call", "a capture outside the graph"])
def test_a_capture_is_one_graph_whatever_ran_before(before: str) -> None:
    model, backend = make(ours()), Counting()
    expected = make(ours())(hidden(), **ASK)
    tables = [id(m._forward_hooks) for m in model.modules()]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    if before == "a plain call":
        compiled(hidden())
    elif before == "a capture outside the graph":
        model(hidden(), **ASK)
    already = backend.graphs
    for _ in range(3):
        assert_equal(compiled(hidden(), **ASK), expected)
    assert backend.graphs == already + 1
    assert_clean(model, tables)


def test_hooks_of_others_still_act_and_come_first() -> None:
    def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    models = [make(ours()), make(ours())]
    for model in models:
        model.layers[1].register_forward_hook(doubled)
    expected = models[0](hidden(), **ASK)
    compiled = torch.compile(models[1], backend="eager", fullgraph=True)
    for _ in range(2):
        assert_equal(compiled(hidden(), **ASK), expected)
    assert list(models[1].layers[1]._forward_hooks.values()) == [doubled]


def breaking(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    for layer in self.layers:
        hidden = layer(hidden)
        torch._dynamo.graph_break()
    return Output(last_hidden_state=hidden)


def test_a_forward_that_breaks_the_graph_is_recorded_all_the_same() -> None:
    model = make(ours(), breaking)
    expected = make(ours())(hidden(), **ASK)
    tables = [id(m._forward_hooks) for m in model.modules()]
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        assert_equal(compiled(hidden(), **ASK), expected)
    assert_clean(model, tables)
