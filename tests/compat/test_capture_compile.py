"""Captures in compiled models: whole, in parts, in one graph, exported."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.compat.capturing import Layer, Output, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers
from tests.torches import follows_dicts_in_strict_export

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


@needs_transformers
@pytest.mark.parity
def test_transformers_manages_one_graph_after_a_capture_outside_it() -> None:
    model = make(theirs())
    expected = model(hidden(), **ASK)
    assert_equal(torch.compile(model, backend="eager", fullgraph=True)(hidden(), **ASK), expected)


@needs_transformers
@pytest.mark.parity
def test_no_graph_breaks_where_transformers_breaks_three() -> None:
    breaks = []
    for side in (theirs(), ours()):
        torch.compiler.reset()
        counters.clear()
        torch.compile(make(side), backend="eager")(hidden(), **ASK)
        breaks.append(sum(counters["graph_break"].values()))
    assert breaks[0] > 0 and breaks[1] == 0


def test_indices_are_selected_in_a_graph() -> None:
    expected = make(ours())(hidden(), output_hidden_states=[0, -2])
    compiled = torch.compile(make(ours()), backend="eager", fullgraph=True)
    assert_equal(compiled(hidden(), output_hidden_states=[0, -2]), expected)


def test_gradients_flow_through_captured_values_of_a_graph() -> None:
    grads = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)):
        model = make(ours())
        wrap(model)(hidden(), **ASK)["hidden_states"][1].square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 2  # of the first layer; a graph gives the others zeros
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert not any(zero.any() for zero in grads[1][2:])


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


def test_a_model_in_a_model_records_for_itself_in_one_graph() -> None:
    def around(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        inner = self.layers[0](self.layers[1](hidden), **kwargs)
        return Output(
            last_hidden_state=inner["last_hidden_state"], inner=inner.get("hidden_states")
        )

    for asked in (ASK, {}):
        models = [make(ours(), around, layers=lambda: [make(ours()), Layer()]) for _ in range(2)]
        compiled = torch.compile(models[1], backend="eager", fullgraph=True)
        expected, found = models[0](hidden(), **asked), compiled(hidden(), **asked)
        assert list(found) == list(expected)
        if asked:
            assert_equal(found, expected)
            assert len(found["inner"]) == 4 and len(found["hidden_states"]) == 2


def breaking(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    for layer in self.layers:
        hidden = layer(hidden)
        torch._dynamo.graph_break()
    return Output(last_hidden_state=hidden)


def test_other_models_do_not_have_a_broken_graph_compiled_again() -> None:
    compiled = torch.compile(make(ours(), breaking), backend="eager")
    for _ in range(3):
        compiled(hidden(), **ASK)
    frames = counters["frames"]
    before = frames["total"]
    for _ in range(3):
        make(ours())(hidden(), **ASK)
        gc.collect()
        compiled(hidden(), **ASK)
    assert before and frames["total"] == before


def test_a_forward_that_breaks_the_graph_is_recorded_all_the_same() -> None:
    model = make(ours(), breaking)
    expected = make(ours())(hidden(), **ASK)
    tables = [id(m._forward_hooks) for m in model.modules()]
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        assert_equal(compiled(hidden(), **ASK), expected)
    assert_clean(model, tables)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "wrapped"])
def test_layers_compiled_one_by_one_are_recorded(in_place: bool) -> None:
    expected, model = make(ours())(hidden(), **ASK), make(ours())
    backend = Counting()
    for number, layer in enumerate(model.layers):
        if in_place:
            layer.compile(backend=backend, fullgraph=True)
        else:
            model.layers[number] = torch.compile(layer, backend=backend, fullgraph=True)
    model(hidden())
    already = backend.graphs
    for _ in range(12):
        assert_equal(model(hidden(), **ASK), expected)
    assert backend.graphs == already


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + 1


def test_a_module_inside_a_compiled_layer_is_recorded() -> None:
    models = [make(ours(), layers=lambda: [Pair(), Pair()]) for _ in range(2)]
    expected = models[0](hidden(), **ASK)
    for layer in models[1].layers:
        layer.compile(backend="eager")
    for number in range(12):
        assert_equal(models[1](hidden(), **ASK), expected)
        if number % 3 == 0:
            assert "hidden_states" not in models[1](hidden())


def test_code_compiled_before_a_first_capture_is_said_to_record_nothing() -> None:
    model = make(ours(), layers=lambda: [Pair(), Pair()])
    for layer in model.layers:
        layer.compile(backend="eager")
    model(hidden())
    with pytest.warns(UserWarning, match=r"hidden_states: layers\.0 was compiled before"):
        assert model(hidden(), **ASK)["hidden_states"] == ()


def test_an_error_in_a_compiled_forward_leaves_nothing_behind() -> None:
    def failing(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        outputs = through_layers(self, hidden)
        if hidden.shape[0] == 3:
            raise ValueError("three rows")
        return outputs

    model = make(ours(), failing)
    tables = [id(m._forward_hooks) for m in model.modules()]
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="three rows"):
        compiled(hidden(3), **ASK)
    assert len(compiled(hidden(), **ASK)["hidden_states"]) == 4
    assert_clean(model, tables)


@pytest.mark.parametrize("strict", [True, False])
def test_a_capture_can_be_exported(strict: bool) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return dict(through_layers(self, hidden))

    expected = make(ours(), plain)(hidden(), **ASK)
    if strict and not follows_dicts_in_strict_export():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="attributes of type `dict`"):
            torch.export.export(make(ours(), plain), (hidden(),), ASK, strict=True)
        return
    program = torch.export.export(make(ours(), plain), (hidden(),), ASK, strict=strict)
    assert_equal(program.module()(hidden(), **ASK), expected)
