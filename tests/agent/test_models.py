"""Whatever people call a model: each program runs plain and traced, the numbers are bitwise the
same, and the tree says what happened.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from rankscope.record.phases import Phase
from rankscope.tree.views import Trace
from tests.agent import programs
from tests.agent.programs import step_through
from tests.models import Failing, Net, Two, paths, trace, train
from tests.unharmed import traced_unharmed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is deprecated:DeprecationWarning", "ignore:.*nested.*:UserWarning"
)
PACKAGE = Path(rankscope.__file__).parent


def called(
    found: Trace, phase: str = "forward", *, step: int = 0, mode: str = "train"
) -> list[str]:
    """Return path and ordinal of the calls of one step, in order."""
    nodes = found.find("*", phase=phase, step=step, mode=mode)
    return [f"{n.path}#{n.ordinal}" if n.ordinal else n.path for n in nodes]


def steps(found: Trace) -> list[str]:
    return [f"{s.mode.word} {s.step}" for s in found.steps]


def says_evaluation(found: Trace) -> None:
    assert steps(found) == ["train 0", "train 1", *(f"eval {i}" for i in range(4))]
    assert called(found, mode="eval", step=3) == ["", "a", "b"]


def says_teacher(found: Trace) -> None:
    assert steps(found) == ["train 0", "train 1", "eval 0", "eval 1"]
    assert called(found, step=1) == ["@Linear"], "the student is the smaller root"
    assert called(found, mode="eval", step=0) == ["", "a", "b"], "frozen parameters: no gradients"


def says_gan(found: Trace) -> None:
    assert steps(found) == [f"train {i}" for i in range(4)], "each optimizer step ends a step"
    assert called(found) == [
        "", "0", "1", "2",
        *("@Sequential", "@Sequential.0", "@Sequential.1", "@Sequential.2") * 2,
    ]  # fmt: skip
    assert [n.micro_batch for n in found.find("@Sequential", phase="forward", step=0)] == [0, 1]
    assert "@Sequential.0" in called(found, "params", step=0), "the critic's optimizer ends it"
    assert "0" in called(found, "params", step=1), "the generator's"
    assert "2" in called(found, "backward", step=0), "the generator's gradients: of its own forward"


def says_direct(found: Trace) -> None:
    for step in (0, 1):
        assert called(found, step=step) == ["a", "b", "", "a#1", "b#1"] or called(
            found, step=step
        ) == ["a", "a#1", "b", "b#1", ""]
        assert {n.micro_batch for n in found.find("*", phase="forward", step=step)} == {0}


def says_added(found: Trace) -> None:
    assert called(found, step=0) == ["", "0", "1"]
    assert called(found, step=1) == ["", "0", "1", "2"]
    assert called(found, step=2) == ["", "0", "0.0", "1", "2"]
    assert "0.0" in called(found, "params", step=2) and "2" in called(found, "params", step=1)


def says_tied(found: Trace) -> None:
    for phase, slot in (("params", "param:weight"), ("grads", "grad:weight")):
        holders = [n.path for n in found.find("*", phase=phase, step=0) if n.value(slot)]
        assert holders == ["embedding", "inner"], "a tied weight stands under its first name"


def says_copy(found: Trace) -> None:
    assert {n.path for n in found.find("*", phase="forward")} >= {"", "a", "@Two", "@Two.a"}


def says_parts(found: Trace) -> None:
    expected = {"", *(f"parts.{i}{rest}" for i in range(3) for rest in ("", ".a", ".b"))}
    for phase in ("forward", "backward"):
        assert set(called(found, phase, step=1)) == expected
        assert len(called(found, phase, step=1)) == len(expected)
    assert steps(found) == ["train 0", "train 1"]


def says_threads(found: Trace) -> None:
    nodes = found.find("", phase="forward", step=1)
    assert [n.micro_batch for n in nodes] == [0, 1, 2, 3]
    assert all([child.path for child in n.children] == ["a", "b"] for n in nodes)
    assert steps(found) == ["train 0", "train 1"]


def says_thousands(found: Trace) -> None:
    assert len(called(found)) == 1502 and called(found)[-1] == "1500"


def says_odd(found: Trace) -> None:
    assert {"proud.a", "slotted.b", "delegating", "doubling", "keeping.named.a b/c"} <= set(
        called(found)
    )
    owners = {n.path: [v.slot for v in n.slots] for n in found.find("*", phase="params", step=0)}
    assert owners["keeping.mapped"] == ["param:q/é"] and owners["keeping.listed"] == ["param:0"]
    assert "keeping.named.__metadata__" in owners


def says_lazy(found: Trace) -> None:
    assert called(found) == ["", "0", "1", "2"] * 2
    assert found.value("0", "param:weight", phase="params", step=0).per_rank[0] is not None


def says_parametrized(found: Trace) -> None:
    assert "0.parametrizations.weight" in called(found)
    owners = [n.path for n in found.find("*", phase="grads", step=0)]
    assert "0.parametrizations.weight" in owners


def says_recurrent(found: Trace) -> None:
    (node,) = found.find("cell", phase="forward", step=0)
    assert [v.slot for v in node.slots] == ["input.0", "output.0", "output.1"]
    first, packed = found.find("lstm", phase="forward", step=0)
    assert [v.slot for v in first.slots if v.slot.startswith("output")] == [
        "output.0", "output.1.0", "output.1.1",
    ]  # fmt: skip
    assert packed.value("output.0.data") is not None


def says_transformer(found: Trace) -> None:
    inside = "inner.decoder.layers.0.multihead_attn"
    assert inside in called(found) and inside in called(found, "backward")


def says_fast_path(found: Trace) -> None:
    assert steps(found) == ["eval 0"]
    assert called(found, mode="eval") == ["", "layers.0", "layers.1"]


def says_in_place(found: Trace) -> None:
    before = found.value("0", "output", step=0).per_rank[0]
    taken = found.value("1", "input.0", step=0).per_rank[0]
    after = found.value("1", "output", step=0).per_rank[0]
    assert before and taken and after
    assert before.hash == taken.hash != after.hash, "an input as it was before it was overwritten"


def says_nested(found: Trace) -> None:
    first, second = found.find("", phase="forward", step=0)
    assert [v.slot for v in first.slots if v.slot.startswith("input")] == [
        "input.0.x", "input.0.deep.list.0", "input.0.deep.list.1.0", "input.0.deep.list.1.1",
        "input.0.deep.list.1.2", "input.flag",
    ]  # fmt: skip
    assert {"input.0.x", "input.0.extra.mask", "input.mask", "output.y"} <= {
        v.slot for v in second.slots
    }


def says_inputs(found: Trace) -> None:
    (node,) = found.find("", phase="forward", step=0)
    assert sum(v.slot.startswith("input.0.k") for v in node.slots) == 5000
    digest = node.value("input.0.k4321").per_rank[0]
    assert digest is not None and digest.mean == 4321


def says_hooks(found: Trace) -> None:
    slots = {n.path: [v.slot for v in n.slots] for n in found.find("*", phase="forward", step=1)}
    assert slots[""] == ["input.0", "output", "returned"], "a clone is another value"
    assert slots["0"] == ["input.0", "output", "returned"]
    assert slots["2"] == ["input.0", "output", "returned"], (
        "a hook that came during the step before"
    )
    assert slots["3"] == ["input.0", "output"], "a hook that returns nothing replaces nothing"
    assert set(called(found, "backward", step=1)) == {"", "0", "1", "2", "3"}


def says_global_hooks(found: Trace) -> None:
    assert called(found, step=1) == ["", "a", "b"]


def says_functional(found: Trace) -> None:
    nodes = [n for n in found.walk() if n.path == "a" and n.phase is Phase.FORWARD]
    assert len(nodes) == 6, "each call is there, under functorch by its structure alone"
    values = [n.value("output") for n in nodes]
    assert all(v is not None and v.dtype == "float32" for v in values)
    assert [v.per_rank[0] is not None for v in values if v] == [*[False] * 5, True]


def says_graphs(found: Trace) -> None:
    nodes = {n.path: n for n in found.find("*", phase="forward", step=0)}
    assert [path for path, n in nodes.items() if n.is_opaque] == ["forms.traced", "forms.scripted"]
    assert {nodes[path].class_name for path in ("forms.traced", "forms.scripted")} == {"Two"}
    # fx calls the modules it kept, which have their names from where they were called first
    assert [n.path for n in nodes["forms.fx"].children] == ["@Two.a", "@Two.b"]
    assert not any(path.startswith("forms.scripted.") for path in nodes)
    assert steps(found) == ["train 0", "train 1", "eval 0"], (
        "writing a graph down is no step; jit.trace then runs the module once to compare"
    )


SAYS: dict[Callable[[], Any], Callable[[Trace], None]] = {
    programs.evaluation_between_steps: says_evaluation,
    programs.teacher_and_student: says_teacher,
    programs.generator_and_discriminator: says_gan,
    programs.submodules_called_directly: says_direct,
    programs.modules_added_and_replaced: says_added,
    programs.tied_weights: says_tied,
    programs.a_copy_in_the_middle: says_copy,
    programs.parts_in_threads: says_parts,
    programs.whole_forwards_in_threads: says_threads,
    programs.thousands_of_children: says_thousands,
    programs.odd_classes: says_odd,
    programs.lazy_modules: says_lazy,
    programs.parametrized: says_parametrized,
    programs.recurrent: says_recurrent,
    programs.transformer: says_transformer,
    programs.transformer_in_inference: says_fast_path,
    programs.in_place: says_in_place,
    programs.nested_inputs: says_nested,
    programs.thousands_of_inputs: says_inputs,
    programs.hooks_of_the_user: says_hooks,
    programs.global_hooks_of_the_user: says_global_hooks,
    programs.functional_calls: says_functional,
    programs.other_graphs: says_graphs,
}


@pytest.mark.parametrize("program", SAYS, ids=lambda program: program.__name__)
def test_the_numbers_are_the_same_and_the_tree_says_what_happened(
    tmp_path: Path, program: Callable[[], Any]
) -> None:
    found = traced_unharmed(program, tmp_path / "trace")
    SAYS[program](found)
    assert found.is_complete
    assert not found.completeness["ranks"][0]["errors"]
    assert all(n.status == "returned" and not n.errors for n in found.walk())


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ValueError, "raised"),
        (StopIteration, "raised"),
        (KeyboardInterrupt, "abandoned"),
        (SystemExit, "abandoned"),
        (GeneratorExit, "abandoned"),
    ],
)
def test_an_exception_in_forward_reaches_the_program_as_it_is_and_its_node_says_so(
    tmp_path: Path, kind: type[BaseException], status: str
) -> None:
    def program() -> Any:
        error = kind("at 0x7f12ab34cd56")
        model = nn.Sequential(nn.Linear(8, 8), Failing(error))
        with pytest.raises(kind) as caught:
            model(torch.randn(3, 8))
        assert caught.value is error and error.__context__ is None and error.__cause__ is None
        frames = traceback.extract_tb(error.__traceback__)
        assert not any(Path(frame.filename).is_relative_to(PACKAGE) for frame in frames)
        error.__traceback__ = None
        # torch itself calls a module with any hook through a frame of its own
        return [frame.name for frame in frames if frame.name != "inner"], step_through(model)

    found = traced_unharmed(program, tmp_path / "trace")
    (node,) = (n for n in found.find("1", phase="forward", step=0) if n.micro_batch == 0)
    assert node.status == status
    assert [child.path for child in node.children] == ["1.linear"]
    if status == "raised":
        (outcome,) = node.outcomes
        assert outcome.error.startswith(kind.__name__) and "7f12" not in outcome.error
    later = [n for n in found.walk() if n.phase is Phase.FORWARD and n is not node]
    assert [n.status for n in later if n.head.step].count("returned") == 4


def test_fake_values_are_recorded_by_their_structure(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body() -> None:
        with FakeTensorMode(), torch.no_grad():
            Two()(torch.randn(3, 8))

    found = trace(tmp_path, body)
    value = found.value("a", "output")
    assert value.dtype == "float32" and value.per_rank[0] is None


def test_forward_called_directly_is_invisible_and_modules_inside_it_are_not(tmp_path: Path) -> None:
    """What torch's hooks cannot see, held here so that a change of it is noticed."""
    model = Net()
    found = trace(tmp_path, lambda: train(model, steps=1))
    assert "" in paths(found, "forward")
    found = trace(tmp_path / "direct", lambda: model.forward(torch.ones(2, 8)).sum().backward())
    assert "Net" not in {n.class_name for n in found.walk()}
    assert "up" in paths(found, "forward")


@pytest.mark.parametrize("is_first_alone", [True, False])
def test_the_model_that_is_named_is_the_root_wherever_else_it_is_called(
    is_first_alone: bool, tmp_path: Path
) -> None:
    """Its paths are those that the user has in mind, and the same in every order of calls."""
    model = Two()
    outer = nn.Sequential(nn.Linear(8, 8), model)
    order = (model, outer) if is_first_alone else (outer, model)
    found = trace(tmp_path, lambda: evaluate(order), model, steps="all")
    assert paths_of(found, "Two") == {""} and paths_of(found, "Sequential") == {"@Sequential"}


def evaluate(models: tuple[nn.Module, ...]) -> None:
    with torch.no_grad():
        for model in models:
            model(torch.randn(3, 8))


def paths_of(found: Trace, class_name: str) -> set[str]:
    return {node.path for node in found.walk() if node.class_name == class_name}
