"""Every fault of transformers' output capture: each function keeps a promise with rankscope and
fails with transformers 5.23.0.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

from tests.compat.capturing import Layer, Output, Side, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers
from tests.lab.compat.migrated import pair
from tests.torches import TORCH

ASK = {"output_hidden_states": True}
Promise = Callable[[Side], None]
PROMISES: list[Promise] = []
BREAKS: dict[Promise, type[BaseException]] = {}
"""How transformers 5.23.0 breaks each promise; AssertionError where its numbers do."""


def breaks_by(
    error: type[BaseException], *, before: tuple[int, int] | None = None
) -> Callable[[Promise], Promise]:
    """Note a promise; with `before` a torch from that one on lets transformers keep it."""

    def note(promise: Promise) -> Promise:
        PROMISES.append(promise)
        if before is None or before > TORCH:
            BREAKS[promise] = error
        return promise

    return note


def count(outputs: Any) -> int:
    return len(outputs["hidden_states"])


@breaks_by(AssertionError)
def nothing_is_left_on_the_model(side: Side) -> None:
    model = make(side)
    before = set(vars(model))
    model(hidden(), **ASK)
    assert set(vars(model)) == before
    assert not any(module._forward_hooks for module in model.modules())


@breaks_by(AttributeError)
def a_model_can_be_copied_as_bytes_after_a_capture(side: Side) -> None:
    model = nn.Sequential()
    captured = make(side)
    captured(hidden(), **ASK)
    model.append(captured.layers)
    pickle.dumps(model)


@breaks_by(KeyError)
def index_zero_selects_the_first_state(side: Side) -> None:
    first, *others = make(side, num_hidden_layers=3)(hidden(), output_hidden_states=0)[
        "hidden_states"
    ]
    assert torch.equal(first, hidden()) and others == [None, None, None]


@breaks_by(KeyError)
def an_empty_selection_selects_nothing(side: Side) -> None:
    outputs = make(side, num_hidden_layers=3)(hidden(), output_hidden_states=[])
    assert outputs["hidden_states"] == (None, None, None, None)


@breaks_by(KeyError)
def a_flag_of_none_leaves_it_to_the_config(side: Side) -> None:
    model = make(side, output_hidden_states=True)
    assert count(model(hidden(), output_hidden_states=None)) == 4


@breaks_by(AssertionError)
def a_layer_added_after_a_capture_is_recorded(side: Side) -> None:
    model = make(side)
    model(hidden(), **ASK)
    model.layers.append(Layer())
    assert count(model(hidden(), **ASK)) == 5


@breaks_by(AssertionError)
def a_layer_replaced_after_a_capture_is_recorded(side: Side) -> None:
    model = make(side)
    model(hidden(), **ASK)
    model.layers[1] = Layer()
    assert count(model(hidden(), **ASK)) == 4


@breaks_by(AssertionError)
def negative_indices_count_from_the_states_there_are(side: Side) -> None:
    model = make(side, num_hidden_layers=3)
    model.layers = model.layers[:2]
    *others, last = model(hidden(), output_hidden_states=[-1])["hidden_states"]
    assert last is not None and others == [None, None]


@breaks_by(ValueError)
def negative_indices_need_no_config(side: Side) -> None:
    outputs = make(side)(hidden(), output_hidden_states=-1)
    assert outputs["hidden_states"][-1] is not None


@breaks_by(KeyError)
def classes_of_one_name_keep_their_own_declarations(side: Side) -> None:
    first = make(side, records={"hidden_states": Layer})
    make(side, records={"states": side.OutputRecorder(Layer)})
    assert count(first(hidden(), **ASK)) == 4


@breaks_by(KeyError)
def a_class_renamed_in_place_is_captured(side: Side) -> None:
    model = make(side)
    model.__class__ = type("FSDPModel", (type(model),), {})  # what fully_shard does
    assert count(model(hidden(), **ASK)) == 4


@breaks_by(IndexError)
def layers_may_be_called_by_keyword(side: Side) -> None:
    def by_keyword(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return Output(last_hidden_state=hidden)

    states = make(side, by_keyword)(hidden(), **ASK)["hidden_states"]
    assert len(states) == 4 and torch.equal(states[0], hidden())


@breaks_by(TypeError)
def a_forward_needs_no_keywords_of_its_own(side: Side) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor) -> Output:
        return through_layers(self, hidden)

    assert count(make(side, plain)(hidden(), **ASK)) == 4


@breaks_by(KeyError)
def a_flag_may_be_given_by_position(side: Side) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor, output_hidden_states: bool = False) -> Output:
        return through_layers(self, hidden)

    assert count(make(side, plain)(hidden(), True)) == 4


@dataclass
class Plain:
    last_hidden_state: Any = None
    hidden_states: Any = None


@breaks_by(TypeError)
def a_forward_may_return_a_plain_dataclass(side: Side) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Plain:
        return Plain(through_layers(self, hidden)["last_hidden_state"])

    model = make(side, plain)
    assert len(model(hidden(), **ASK).hidden_states) == 4
    assert len(model(hidden(), return_dict=False, **ASK)) == 2


@breaks_by(AttributeError)
def a_plain_dict_becomes_a_tuple(side: Side) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return dict(through_layers(self, hidden))

    (last,) = make(side, plain)(hidden(), return_dict=False)
    assert last.shape == (2, 4)


@breaks_by(AssertionError)
def a_plain_dict_has_its_last_state_tied(side: Side) -> None:
    def normed(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"last_hidden_state": through_layers(self, hidden)["last_hidden_state"] * 2}

    outputs = make(side, normed)(hidden(), **ASK)
    assert outputs["hidden_states"][-1] is outputs["last_hidden_state"]


@breaks_by(AttributeError)
def a_tuple_stays_a_tuple(side: Side) -> None:
    def plain(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor]:
        return (through_layers(self, hidden)["last_hidden_state"],)

    assert len(make(side, plain)(hidden(), return_dict=False)) == 1


class ListLayer(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        return [self.linear(hidden), "other"]


def _through_lists(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    for layer in self.layers:
        hidden = layer(hidden)[0]
    return Output(last_hidden_state=hidden)


@breaks_by(AssertionError)
def an_element_of_a_returned_list_is_recorded(side: Side) -> None:
    model = make(side, _through_lists, layers=lambda: [ListLayer(), ListLayer()])
    assert all(isinstance(s, torch.Tensor) for s in model(hidden(), **ASK)["hidden_states"])


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


def _holders_of_one_layer() -> list[nn.Module]:
    layer = Layer()
    return [Holder(layer), Holder(layer)]


@breaks_by(AssertionError)
def a_module_held_twice_is_recorded_once_a_call(side: Side) -> None:
    assert count(make(side, layers=_holders_of_one_layer)(hidden(), **ASK)) == 3


class Derived(Layer):
    pass


@breaks_by(AssertionError)
def a_module_of_two_named_classes_is_recorded_once_a_call(side: Side) -> None:
    model = make(side, records={"hidden_states": [Layer, Derived]}, layers=lambda: [Derived()])
    assert count(model(hidden(), **ASK)) == 2


@breaks_by(KeyError)
def a_name_with_output_in_it_is_kept_whole(side: Side) -> None:
    recorder = side.OutputRecorder(Layer)
    model = make(side, records={"layer_output_norms": recorder})
    assert len(model(hidden(), output_layer_output_norms=True)["layer_output_norms"]) == 3


@breaks_by(AssertionError)
def a_class_is_found_by_its_name(side: Side) -> None:
    assert count(make(side, records={"hidden_states": "Layer"})(hidden(), **ASK)) == 4


class Alone(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        return (self.linear(hidden),)


@breaks_by(IndexError)
def an_element_that_is_not_there_ends_no_forward(side: Side) -> None:
    model = make(side, _through_lists, records={"attentions": Alone}, layers=lambda: [Alone()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outputs = model(hidden(), output_attentions=True)
    assert "attentions: element 1" in str(said[-1].message)
    assert outputs["attentions"] == ()


@breaks_by(KeyError)
def cross_attentions_have_a_flag_of_their_own(side: Side) -> None:
    model = make(side, records={"cross_attentions": side.OutputRecorder(Layer)})
    assert len(model(hidden(), output_cross_attentions=True)["cross_attentions"]) == 3


@breaks_by(AssertionError)
def a_submodel_captured_first_is_recorded_once_a_call(side: Side) -> None:
    inner = make(side)

    def around(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return self.layers[0](hidden, **kwargs)

    outer = make(side, around, layers=lambda: [inner])
    inner(hidden(), **ASK)
    outer(hidden(), **ASK)
    assert count(inner(hidden(), **ASK)) == 4


@breaks_by(AssertionError)
def an_empty_last_state_replaces_nothing(side: Side) -> None:
    def empty(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return Output(vision_hidden_states=None, **through_layers(self, hidden))

    assert make(side, empty)(hidden(), **ASK)["hidden_states"][-1] is not None


@breaks_by(AssertionError)
def a_backward_inside_a_forward_records_nothing_again(side: Side) -> None:
    def with_gradient(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        start = hidden = hidden.requires_grad_()
        for layer in self.layers:
            hidden = torch.utils.checkpoint.checkpoint(_scaled, layer, hidden, use_reentrant=False)
        torch.autograd.grad(hidden.sum(), start)
        return Output(last_hidden_state=hidden)

    assert count(make(side, with_gradient)(hidden(), **ASK)) == 4


def _scaled(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden).exp()


@breaks_by(Unsupported, before=(2, 15))
def layers_compiled_whole_run_after_a_capture(side: Side) -> None:
    torch.compiler.reset()
    model = make(side)
    model(hidden(), **ASK)
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert model(hidden())["last_hidden_state"].shape == (2, 4)


@breaks_by(Unsupported, before=(2, 15))
def layers_compiled_whole_are_recorded(side: Side) -> None:
    torch.compiler.reset()
    model = make(side)
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    model(hidden())
    assert count(model(hidden(), **ASK)) == 4


@breaks_by(Unsupported)
def a_first_capture_may_be_compiled_in_one_graph(side: Side) -> None:
    torch.compiler.reset()
    model = make(side)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert count(compiled(hidden(), **ASK)) == 4


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_rankscope_keeps(promise: Promise) -> None:
    promise(ours())


@needs_transformers
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_transformers_breaks(promise: Promise) -> None:
    if promise not in BREAKS:
        promise(theirs())
        return
    with pytest.raises(BREAKS[promise]) as raised:
        promise(theirs())
    assert type(raised.value) is BREAKS[promise]


@needs_transformers
def test_the_last_state_of_an_unequal_decoder_is_the_last_one() -> None:
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=48, num_mel_bins=8, encoder_layers=2, decoder_layers=4, d_model=32,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs_, ours_ = pair("whisper", "WhisperModel", config)
    inputs = {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": torch.tensor([[1, 2]])}
    last = [
        [
            state is not None
            for state in model(**inputs, output_hidden_states=[-1]).decoder_hidden_states
        ]
        for model in (theirs_, ours_)
    ]
    assert last[1] == [False, False, False, False, True]
    assert last[0] == [False, False, True, False, False]


def test_copies_of_a_captured_model_are_captured_on_their_own() -> None:
    model = make(ours())
    model(hidden(), **ASK)
    twin = copy.deepcopy(model)
    twin.layers.append(Layer())
    assert (count(model(hidden(), **ASK)), count(twin(hidden(), **ASK))) == (4, 5)
