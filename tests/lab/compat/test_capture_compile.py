"""Captures in compiled models beside transformers' own, and compiled in other ways."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.compat.capturing import Layer, Output, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers
from tests.compat.test_capture_compile import ASK, Counting, assert_clean, assert_equal, breaking
from tests.compat.test_capture_compile import nothing_compiled as nothing_compiled
from tests.torches import follows_dicts_in_strict_export


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
