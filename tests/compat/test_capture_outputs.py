"""Output capture of plain modules: declarations, recorders, selections, outputs, nesting."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from rankscope.compat import (
    OutputRecorder,
    capture_outputs,
)
from tests.compat.capturing import Layer, Output, hidden, make, ours, through_layers

ASK = {"output_hidden_states": True}


class Attention(nn.Module):
    """Returns a value, one weight for each row, and a third element."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
        return self.query(hidden), hidden.softmax(-1), "third"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.cross_attn = Attention()
        self.mlp = Layer()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.cross_attn(self.self_attn(hidden)[0])[0])


def blocks(**records: Any) -> nn.Module:
    return make(ours(), records=records, layers=lambda: [Block(), Block()])


def recorded(model: nn.Module, key: str) -> tuple[Any, ...]:
    return model(hidden(), **{f"output_{key}": True})[key]


def test_a_class_gives_its_second_element_and_hidden_states_the_first() -> None:
    model = blocks(hidden_states=Block, attentions=Attention)
    assert len(recorded(model, "attentions")) == 4
    assert all(torch.allclose(w.sum(-1), torch.ones(2)) for w in recorded(model, "attentions"))
    assert len(recorded(model, "hidden_states")) == 3


@pytest.mark.parametrize(("index", "kind"), [(0, torch.Tensor), (-1, str), (2, str), (None, tuple)])
def test_a_recorder_chooses_the_element(index: Any, kind: type) -> None:
    found = recorded(blocks(parts=OutputRecorder(Attention, index=index)), "parts")
    assert [type(value) for value in found] == [kind] * 4


@pytest.mark.parametrize(
    ("layer_name", "count"),
    [
        ("self_attn", 2),
        (".cross_attn", 2),
        ("layers.0", 2),
        ("1.self_attn.", 1),
        ("attn", 0),
        ("", 0),
    ],
)
def test_a_layer_name_is_whole_names_of_the_path(layer_name: str, count: int) -> None:
    recorder = OutputRecorder(Attention, index=1, layer_name=layer_name or "none")
    assert len(recorded(blocks(parts=recorder), "parts")) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("self_attn", 2), ("Attention", 4), ("0.cross_attn", 1), ("Layer", 2), ("No", 0)],
)
def test_a_name_is_the_end_of_a_path_or_of_a_class(name: str, count: int) -> None:
    recorder = OutputRecorder(None, index=0, class_name=name)
    assert len(recorded(blocks(parts=recorder), "parts")) == count


def test_a_list_records_each_in_order_of_the_calls() -> None:
    both = [OutputRecorder(Attention, index=0), OutputRecorder(Layer), "query"]
    kinds = recorded(blocks(parts=both), "parts")
    assert len(kinds) == 2 * (2 + 1) + 4


def test_two_elements_of_one_module_are_two_values() -> None:
    both = [OutputRecorder(Attention, index=1), OutputRecorder(Attention, index=2)]
    assert [type(v).__name__ for v in recorded(blocks(parts=both), "parts")] == [
        "Tensor",
        "str",
    ] * 4


def test_the_first_input_can_be_left_out() -> None:
    recorder = OutputRecorder(Block, capture_initial_hidden_state=False)
    assert len(recorded(blocks(hidden_states=recorder), "hidden_states")) == 2


def test_a_recorder_of_transformers_is_read_by_its_fields() -> None:
    class Other:
        target_class, index, layer_name, class_name = Attention, 1, "self_attn", None

    assert len(recorded(blocks(parts=Other()), "parts")) == 2


def test_an_entry_that_is_nothing_of_the_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"_can_record_outputs\['parts'\] is 3"):
        recorded(blocks(parts=3), "parts")


def test_a_wrapper_puts_no_name_into_a_path() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = blocks(parts=OutputRecorder(nn.Linear, layer_name="self_attn.query"))
    for block in model.layers:
        block.self_attn = checkpoint_wrapper(block.self_attn)
    assert len(recorded(model, "parts")) == 2


def test_values_are_the_tensors_the_modules_returned() -> None:
    model, seen = make(ours()), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    first, *states = model(hidden(), **ASK)["hidden_states"]
    assert all(state is output for state, output in zip(states, seen)) and len(states) == 3
    assert torch.equal(first, hidden())


def test_the_last_state_is_the_one_the_forward_gives_unless_told_otherwise() -> None:
    def normed(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        return Output(last_hidden_state=through_layers(self, hidden)["last_hidden_state"] * 2)

    for decorator, config, is_tied in (
        (capture_outputs, {}, True),
        (capture_outputs(tie_last_hidden_states=False), {}, False),
        (capture_outputs, {"tie_last_hidden_states": False}, False),
        (capture_outputs(tie_last_hidden_states=False), {"tie_last_hidden_states": True}, True),
    ):
        outputs = make(ours(), decorator(normed), **config)(hidden(), **ASK)
        is_last = outputs["hidden_states"][-1] is outputs["last_hidden_state"]
        assert is_last is is_tied and len(outputs["hidden_states"]) == 4


@pytest.mark.parametrize(
    ("selected", "kept"),
    [
        (True, "0123"), (0, "0"), (3, "3"), (-1, "3"), (-4, "0"), ([0, -1], "03"), ((1, 2), "12"),
        (range(1, 3), "12"), ([-2, -3], "12"), ([1, -3], "1"), ([], ""), ([9, -9], ""),
        ([0, 9], "0"), (torch.tensor(2), "2"), ([-1, 1, -2], "123"),
    ],
)  # fmt: skip
def test_indices_select_as_from_the_full_list(selected: Any, kept: str) -> None:
    model = make(ours())
    every = model(hidden(), **ASK)["hidden_states"]
    found = model(hidden(), output_hidden_states=selected)["hidden_states"]
    assert len(found) == len(every)
    assert "".join(str(n) for n, state in enumerate(found) if state is not None) == kept
    assert all(state is None or torch.equal(state, every[n]) for n, state in enumerate(found))


@pytest.mark.parametrize("selected", [[0], [-1], [1, -2]])
def test_states_that_are_not_selected_are_not_kept_alive(selected: list[int]) -> None:
    alive: list[int] = []
    references: list[Any] = []

    class Watching(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = super().forward(hidden).clone()
            references.append(weakref.ref(output))
            alive.append(sum(reference() is not None for reference in references))
            return output

    model = make(ours(), layers=lambda: [Watching() for _ in range(8)])
    with torch.no_grad():
        model(hidden(), output_hidden_states=selected)
    assert max(alive) <= len(selected) + 3


@dataclass(frozen=True)
class Frozen:
    last_hidden_state: Any
    hidden_states: Any = None


class Named(NamedTuple):
    last_hidden_state: Any
    hidden_states: Any = None


@pytest.mark.parametrize("kind", [Frozen, Named])
def test_outputs_that_cannot_change_come_back_as_new_ones(kind: Any) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return kind(through_layers(self, hidden)["last_hidden_state"])

    model = make(ours(), forward)
    outputs = model(hidden(), **ASK)
    assert type(outputs) is kind and len(outputs.hidden_states) == 4
    assert isinstance(model(hidden(), return_dict=False, **ASK), tuple)
    with pytest.raises((FrozenInstanceError, AttributeError)):
        outputs.hidden_states = None


@pytest.mark.parametrize("what", ["a tensor", "a tuple", "a dataclass without the field"])
def test_outputs_without_a_place_are_named(what: str) -> None:
    @dataclass
    class Bare:
        last_hidden_state: Any

    def forward(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Any:
        last = through_layers(self, hidden)["last_hidden_state"]
        return {"a tensor": last, "a tuple": (last,)}.get(what, Bare(last))

    model = make(ours(), forward)
    model(hidden())
    with pytest.raises(TypeError, match="Model was asked for hidden_states"):
        model(hidden(), **ASK)


@pytest.mark.parametrize("where", ["call", "config"])
def test_return_dict_false_gives_a_tuple_in_the_order_of_the_output(where: str) -> None:
    model = make(ours(), return_dict=where == "call")
    outputs = model(hidden(), **ASK, return_dict=False if where == "call" else None)
    assert type(outputs) is tuple and len(outputs) == 2
    assert outputs[0].shape == (2, 4) and len(outputs[1]) == 4


def test_an_error_in_a_forward_leaves_no_hook() -> None:
    def failing(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
        through_layers(self, hidden)
        raise KeyboardInterrupt

    model = make(ours(), failing)
    with pytest.raises(KeyboardInterrupt):
        model(hidden(), **ASK)
    assert not any(module._forward_hooks for module in model.modules())
    assert len(make(ours())(hidden(), **ASK)["hidden_states"]) == 4


def _around(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    inner = self.layers[0](self.layers[1](hidden), **(kwargs if self.passes_on else {}))
    return Output(last_hidden_state=inner["last_hidden_state"], inner=inner.get("hidden_states"))


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_model_in_a_model_records_for_itself(passes_on: bool) -> None:
    model = make(ours(), _around, layers=lambda: [make(ours()), Layer()])
    model.passes_on = passes_on
    outputs = model(hidden(), **ASK)
    assert len(outputs["hidden_states"]) == 2  # the outer layer, and what went into it
    assert (outputs["inner"] is not None) == passes_on
    assert not passes_on or len(outputs["inner"]) == 4


def test_a_part_with_a_declaration_of_its_own_goes_by_it() -> None:
    class Part(nn.Module):
        _can_record_outputs: ClassVar = {"parts": OutputRecorder(Attention, index=2)}

        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.attention(hidden)[0]

    records = {"parts": OutputRecorder(Attention, index=1)}
    model = make(ours(), records=records, layers=lambda: [Block(), Part()])
    assert [type(v).__name__ for v in recorded(model, "parts")] == ["Tensor", "Tensor", "str"]


def test_gradients_and_random_numbers_are_those_of_a_plain_call() -> None:
    def train(flags: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = make(ours(), layers=lambda: [Layer(), nn.Dropout(0.5), Layer()]).train()
        torch.manual_seed(3)
        model(hidden(), **flags)["last_hidden_state"].square().sum().backward()
        return [p.grad for p in model.parameters()], torch.get_rng_state()

    (plain, state), (captured, state_after) = train({}), train(ASK)
    assert all(torch.equal(a, b) for a, b in zip(plain, captured))
    assert torch.equal(state, state_after)


def test_transformers_is_not_imported() -> None:
    code = (
        "import sys, torch\n"
        "from rankscope.compat import OutputRecorder, capture_outputs, merge_with_config_defaults\n"
        "class M(torch.nn.Module):\n"
        "    _can_record_outputs = {'hidden_states': torch.nn.Linear}\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.a = torch.nn.Linear(2, 2)\n"
        "    @merge_with_config_defaults\n"
        "    @capture_outputs\n"
        "    def forward(self, x): return {'last_hidden_state': self.a(x)}\n"
        "assert len(M()(torch.ones(1, 2), output_hidden_states=True)['hidden_states']) == 2\n"
        "assert not {'transformers', 'torch._dynamo', 'zmq'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# ---------------------------------------------------------------- decorators that meet in one call


# ------------------------------------------------------------------------------- nothing recorded


def test_a_declaration_that_names_no_module_that_runs_is_said() -> None:
    model = make(ours(), records={"hidden_states": "Attentoin"})
    with pytest.warns(UserWarning, match=r"no module that Model\._can_record_outputs names"):
        assert recorded(model, "hidden_states") == ()


# ------------------------------------------------------------------------------------ TorchScript
