"""Output capture of plain modules: replicas, decorations, TorchScript, and what is said of gaps."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from rankscope.compat import (
    OutputRecorder,
    capture_outputs,
    merge_with_config_defaults,
    select_hidden_states,
)
from tests.compat.capturing import Layer, Output, hidden, make, ours, through_layers
from tests.compat.test_capture_outputs import ASK, Attention, recorded


def test_a_declaration_of_one_instance_holds_for_it_alone() -> None:
    model, other = make(ours()), make(ours())
    model._can_record_outputs = {"hidden_states": OutputRecorder(nn.Linear)}
    model(hidden(), **ASK)
    model._can_record_outputs["hidden_states"].target_class = nn.ReLU
    assert model(hidden(), **ASK)["hidden_states"] == ()
    assert len(other(hidden(), **ASK)["hidden_states"]) == 4


def test_a_method_asks_its_models_for_the_states_it_needs_alone() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make(ours())

        @select_hidden_states("layer")
        def by_argument(self, hidden: torch.Tensor, layer: int = -2, **kwargs: Any) -> Any:
            return self.model(hidden, **kwargs)["hidden_states"]

        @select_hidden_states(lambda self: [0])
        def by_function(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
            return self.model(hidden, **kwargs)["hidden_states"]

    uses = Uses()
    assert [s is not None for s in uses.by_argument(hidden())] == [False, False, True, False]
    assert [s is not None for s in uses.by_argument(hidden(), 1)] == [False, True, False, False]
    assert [s is not None for s in uses.by_function(hidden())] == [True, False, False, False]
    assert None not in uses.by_function(hidden(), **ASK)


def test_a_replica_of_data_parallel_threads_is_captured() -> None:
    model = make(ours())
    replica = model._replicate_for_data_parallel()
    replica.layers = model.layers
    assert len(replica(hidden(), **ASK)["hidden_states"]) == 4


class Stack(nn.Module):
    """Decorated once; its subclasses decorate again."""

    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": Layer}

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.config = config

    @capture_outputs
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return through_layers(self, hidden)


class Twice(Stack):
    forward = capture_outputs(capture_outputs(through_layers))


class Thrice(Stack):
    @capture_outputs
    @merge_with_config_defaults
    @capture_outputs
    @capture_outputs
    def forward(self, hidden: torch.Tensor) -> Output:
        return through_layers(self, hidden)


class Keeping(Stack):
    """Does not hand its flags on."""

    @capture_outputs
    def forward(self, hidden: torch.Tensor) -> Output:
        return super().forward(hidden)


class Handing(Stack):
    @capture_outputs
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return super().forward(hidden, **kwargs)


class Choosing(Stack):
    """Asks for states of its own."""

    @capture_outputs
    def forward(self, hidden: torch.Tensor) -> Output:
        inner = super().forward(hidden, output_hidden_states=[0])["hidden_states"]
        assert [state is not None for state in inner] == [True, False, False, False]
        return super().forward(hidden)


class Calling(Stack):
    """Calls itself: that call is one of its own."""

    @capture_outputs
    def forward(self, hidden: torch.Tensor, is_inner: bool = False) -> Output:
        if not is_inner:
            inner = self(hidden, is_inner=True, output_hidden_states=True, return_dict=True)
            assert len(inner["hidden_states"]) == 4
        return through_layers(self, hidden)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", [Twice, Thrice, Keeping, Handing, Calling])
def test_a_forward_decorated_again_records_as_decorated_once(
    kind: type[Stack], is_compiled: bool
) -> None:
    torch.manual_seed(0)
    expected = Stack()
    model = kind()
    model.load_state_dict(expected.state_dict())
    states = expected(hidden(), **ASK)["hidden_states"]
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        found = run(hidden(), **ASK)["hidden_states"]
        assert len(found) == len(states) == 4
        assert all(torch.equal(a, b) for a, b in zip(found, states))
        assert "hidden_states" not in run(hidden())
        model.config["return_dict"] = False
        assert len(run(hidden(), **ASK)) == 2  # of a tuple
        assert isinstance(run(hidden(), **ASK), tuple)


def test_a_forward_that_asks_its_base_for_states_of_its_own_gets_them() -> None:
    found = Choosing()(hidden(), **ASK)["hidden_states"]
    assert len(found) == 7  # its base ran twice
    assert all(state is not None for state in found)


def test_what_a_captured_model_inside_gave_stays_where_the_one_around_records_nothing() -> None:
    def around(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return self.layers[0](hidden, **kwargs)

    inner = make(ours())
    outer = make(ours(), around, layers=lambda: [inner])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(outer(hidden(), **ASK)["hidden_states"]) == 4


class WithoutWeights(Attention):
    """As attention by a fused kernel, which computes no weights."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden)[0], None


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "returned None$"),
        ({"_attn_implementation": "sdpa"}, "'sdpa' computes no weights, attn_impl"),
    ],
)
def test_outputs_of_which_nothing_was_recorded_are_said_once(
    config: dict[str, str], reason: str, is_compiled: bool
) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return Output(last_hidden_state=hidden)

    records = {"attentions": WithoutWeights, "cross_attentions": "nowhere"}
    model = make(ours(), forward, records=records, layers=lambda: [WithoutWeights()], **config)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    with pytest.warns(UserWarning, match=f"recorded for attentions: .*{reason}") as said:
        found = run(hidden(), output_attentions=True)
    assert len([each for each in said if each.category is UserWarning]) == 1
    assert (found["attentions"], found["cross_attentions"]) == ((), ())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # as Python begins
        for _ in range(3):
            model(hidden(), output_attentions=True)
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["traced", "scripted"])
@pytest.mark.parametrize("by", ["class", "base", "path"])
def test_a_torchscript_module_is_recorded_as_any_other(way: str, by: str) -> None:
    plain = make(ours())
    script: Any = {
        "traced": lambda layer: torch.jit.trace(layer, hidden()),
        "scripted": torch.jit.script,
    }[way]
    made = [script(layer) for layer in plain.layers]
    spec = {"class": type(made[0]), "base": torch.jit.ScriptModule, "path": "layers.0"}[by]
    model = make(ours(), by_keyword, records={"hidden_states": spec}, layers=lambda: made)
    expected = plain(hidden(), **ASK)["hidden_states"]
    found = recorded(model, "hidden_states")
    assert len(found) == (2 if by == "path" else 4)
    assert torch.equal(found[0], hidden())  # the first layer's input
    assert by == "path" or all(torch.allclose(a, b) for a, b in zip(found, expected))
    assert not any(module._forward_hooks for module in model.modules())


def by_keyword(self: nn.Module, hidden: torch.Tensor) -> Output:
    for layer in self.layers:
        hidden = layer(hidden=hidden)
    return Output(last_hidden_state=hidden)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_inside_a_torchscript_module_is_said_to_record_nothing() -> None:
    made = torch.jit.script(nn.Sequential(Layer()))
    model = make(ours(), records={"hidden_states": "layers.0.0"}, layers=lambda: [made])
    with pytest.warns(UserWarning, match="inside a TorchScript module"):
        assert recorded(model, "hidden_states") == ()


def test_a_forward_written_in_c_can_be_recorded() -> None:
    class Relu(nn.Module):
        forward = staticmethod(torch.relu)

    model = make(ours(), records={"hidden_states": Relu}, layers=lambda: [Relu()])
    assert len(recorded(model, "hidden_states")) == 2
