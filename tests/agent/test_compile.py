"""torch.compile: what it compiles stays compiled as it would have been, in as many graphs, and the
tree says what could not be seen; with `compile=eager` everything can.

Facts about torch's compiler stand here as torch 2.13 has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import rankscope
from rankscope.record.call import Mode
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.tree.views import Trace
from tests.models import Layered, Two
from tests.noted import remarks
from tests.unharmed import traced_unharmed

Compiled = Callable[[torch.Tensor], torch.Tensor]
WHOLE = ["", "layers.0", "layers.0.a", "layers.0.b", "layers.1", "layers.1.a", "layers.1.b", "head"]
BELOW = ["layers.1", "layers.1.a", "layers.1.b", "head"]


def network() -> Layered:
    return Layered([Two(), Two()], nn.Linear(8, 3))


def wrapped(model: Layered, backend: Any) -> Compiled:
    return torch.compile(model, backend=backend)


def in_place(model: Layered, backend: Any) -> Compiled:
    model.compile(backend=backend)
    return model


def wrapped_layer(model: Layered, backend: Any) -> Compiled:
    model.layers[0] = torch.compile(model.layers[0], backend=backend)
    return model


def layer_in_place(model: Layered, backend: Any) -> Compiled:
    model.layers[0].compile(backend=backend)
    return model


def inside_a_function(model: Layered, backend: Any) -> Compiled:
    return torch.compile(lambda x: model(x), backend=backend)


WAYS = (wrapped, in_place, wrapped_layer, layer_in_place, inside_a_function)


class Program:
    """Trains a compiled model; counts the graphs of each of its runs."""

    def __init__(
        self, way: Callable[[Layered, Any], Compiled], backend: str, steps: int = 3
    ) -> None:
        self.way, self.backend, self.steps = way, backend, steps
        self.graphs: list[int] = []

    def __call__(self) -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter, model = CompileCounterWithBackend(self.backend), network()
        call = self.way(model, counter)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(self.steps):
            loss = call(torch.randn(4, 8)).square().mean()
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        assert not torch._dynamo.utils.counters["graph_break"]
        self.graphs.append(counter.frame_count)
        return model, optimizer, losses


def called(found: Trace, step: int) -> list[str]:
    return [n.path for n in found.find("*", phase="forward", step=step)]


def says_wrapped(found: Trace, step: int) -> None:
    (node,) = found.find("", phase="forward", step=step)
    assert called(found, step) == [""]
    assert (node.class_name, node.wrappers, node.is_opaque) == ("Layered", ("compile",), True)
    assert [v.slot for v in node.slots] == ["input.0", "output"]


def says_hidden(found: Trace, step: int) -> None:
    (node,) = found.find("", phase="forward", step=step)
    assert called(found, step) == [""]
    assert (node.class_name, node.status, node.slots) == ("Layered", "not_entered", ())


def says_layer(found: Trace, step: int) -> None:
    assert sorted(called(found, step)) == sorted(["", "layers.0", *BELOW])
    (node,) = found.find("layers.0", phase="forward", step=step)
    assert (node.class_name, node.wrappers, node.is_opaque) == ("Two", ("compile",), True)
    assert node.value("output") is not None


def says_hidden_layer(found: Trace, step: int) -> None:
    assert sorted(called(found, step)) == sorted(["", "layers.0", *BELOW])
    (node,) = found.find("layers.0", phase="forward", step=step)
    assert (node.class_name, node.status, node.is_opaque) == ("Two", "not_entered", True)
    assert not node.slots and not node.children


SAYS = dict(
    zip(WAYS, (says_wrapped, says_hidden, says_layer, says_hidden_layer, says_hidden), strict=True)
)


@pytest.mark.parametrize(
    ("way", "backend", "steps"),
    [
        *((way, "eager", "0-1") for way in WAYS),
        *((way, "eager", "1-2") for way in (wrapped, layer_in_place)),
        *((way, "aot_eager", "all") for way in (wrapped, in_place)),
    ],
)
def test_a_compiled_region_stays_one_graph_and_is_one_node(
    tmp_path: Path, way: Callable[[Layered, Any], Compiled], backend: str, steps: str
) -> None:
    program = Program(way, backend)
    found = traced_unharmed(program, tmp_path / "trace", steps=steps)
    plain, traced = program.graphs
    assert plain == 1
    # compiled while hooks were on it is compiled once more when they are gone, and stays so
    assert traced == (
        2 if steps == "0-1" and way in (wrapped, wrapped_layer, layer_in_place) else 1
    )
    expected = {"all": [0, 1, 2], "1-2": [1, 2], "0-1": [0, 1]}[steps]
    assert [s.step for s in found.steps if s.mode is Mode.TRAIN] == expected
    for step in expected:
        SAYS[way](found, step)
        owners = [n.path for n in found.find("*", phase="grads", step=step)]
        assert [p for p in owners if p in WHOLE] == [
            p for p in WHOLE if p in owners
        ] and "head" in owners
        assert len(found.find("head", phase="params", step=step)) == 1
    assert found.is_complete and not found.completeness["ranks"][0]["errors"]


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)
def test_asked_for_traced_steps_run_as_written_and_the_others_compiled(
    tmp_path: Path, way: Callable[[Layered, Any], Compiled]
) -> None:
    program = Program(way, "eager", steps=4)
    found = traced_unharmed(program, tmp_path / "trace", steps="0,2", compile="eager")
    assert program.graphs == [1, 1], "untraced steps were compiled"
    assert [s.step for s in found.steps] == [0, 2]
    for step in (0, 2):
        assert called(found, step) == WHOLE
        assert len(found.find("head", phase="params", step=step)) == 1, "each step by itself"
        assert not any(n.is_opaque for n in found.find("*", phase="forward", step=step))
    assert found.run["settings"]["compile"] == "eager"
    kinds = [[each.note.kind for each in remarks(step)] for step in found.steps]
    assert kinds == [[NoteKind.RUN_EAGERLY]] * len(found.steps)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_model_compiled_as_a_whole_is_said_once_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced_unharmed(Program(in_place, "eager"), tmp_path / "trace")
    said = capsys.readouterr().err
    assert said.count("rankscope:") == 1 and "Layered: " in said and "--rs-compile eager" in said
    assert {n.phase for n in found.walk()} == {
        Phase.SETUP, Phase.FORWARD, Phase.GRADS, Phase.PARAMS,
    }  # fmt: skip


def test_a_run_in_which_only_compiled_code_was_called_says_why_it_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    model = network()
    model.compile(backend="eager")
    with rankscope.trace(out=tmp_path / "trace"), torch.no_grad():
        model(torch.ones(2, 8))
    assert "nothing was traced" in capsys.readouterr().err


def test_where_warnings_are_errors_a_compiled_module_runs_traced(tmp_path: Path) -> None:
    """torch 2.13 warns where a compiled module is called while global hooks are on."""
    program = Program(wrapped, "eager")
    program()  # torch's imports add filters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program()  # in torch 2.8 each compilation adds one
        before = list(warnings.filters)
        found = traced_unharmed(program, tmp_path / "trace")
        assert list(warnings.filters) == before
    assert len(found.steps) == 3
