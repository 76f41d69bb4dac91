"""How arguments and results are nested: the form of a call, beside the slots of its tensors."""

from __future__ import annotations

import json
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch

from rankscope.capture.pytree import call_form, form_of, is_tensor, plain_text_of, result_form, walk

T = torch.ones(2, 3)


@dataclass
class Held:
    x: torch.Tensor
    name: str


@dataclass
class Told:
    name: str


class Loud:
    def __repr__(self) -> str:
        raise AssertionError("no line of the program's own code runs")


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (T, {"slot": "output"}),
        ((T, None, "a"), [{"slot": "output.0"}, "None", "'a'"]),
        ({"a": [T], 3: 4}, {"items": {"a": [{"slot": "output.a.0"}], "3": "4"}}),
        (OrderedDict(a=T), {"items": {"a": {"slot": "output.a"}}}),
        (UserDict(a=T), {"items": {"a": {"slot": "output.a"}}}),
        (Held(T, "b"), {"items": {"x": {"slot": "output.x"}, "name": "'b'"}}),
        (torch.Size([2, 3]), ["2", "3"]),
        (list(range(20)), [str(n) for n in range(20)]),
        (T.t(), {"slot": "output", "stride": [1, 3]}),
        (torch.empty(2, device="meta"), {"slot": "output", "device": "meta"}),
        (T.to_sparse(), {"slot": "output"}),
        ((), []),
        ({}, {"items": {}}),
        (torch.float16, "torch.float16"),
    ],
)
def test_a_form_says_how_a_value_is_nested(value: object, form: object) -> None:
    assert form_of("output", value, plain_text_of) == form
    assert json.loads(result_form(value, plain_text_of) or "") == form


def test_the_slots_of_a_form_are_those_under_which_the_tensors_are_recorded() -> None:
    value = {"a": (T, [T, {"b": Held(T, "c")}]), (1, 2): T, "x" * 200: T}
    text = result_form(value, plain_text_of)
    assert text is not None
    for slot, leaf in walk("output", value):
        assert (f'"slot":{json.dumps(slot)}' in text) is is_tensor(leaf), slot


def test_arguments_by_position_and_by_name_are_apart_and_modules_are_counted() -> None:
    assert json.loads(call_form((T, 3), {"0": T}, 2, plain_text_of) or "") == {
        "args": [{"slot": "input.0"}, "3"], "kwargs": {"0": {"slot": "input.0"}}, "modules": 2,
    }  # fmt: skip
    assert json.loads(call_form((T, T), {}, 0, plain_text_of) or "") == {
        "args": [{"slot": "input.0"}, {"slot": "input.1"}], "kwargs": {}, "modules": 0,
    }  # fmt: skip


def test_no_code_of_the_program_runs_for_a_leaf() -> None:
    assert plain_text_of(Loud()).endswith("test_forms.Loud")
    assert plain_text_of(object()) == "<object object at 0xXXXXXXXX>"
    assert plain_text_of(Told("a")).endswith("test_forms.Told")


def test_a_form_that_would_be_too_long_is_left_out_and_a_cycle_ends() -> None:
    assert result_form(["x" * 1000] * 400, plain_text_of) is None
    round_: list[object] = [T]
    round_.append(round_)
    assert form_of("output", round_, plain_text_of)[0] == {"slot": "output.0"}
