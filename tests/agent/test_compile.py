"""torch.compile: what it compiles stays compiled as it would have been, in as many graphs, and the
tree says what could not be seen; with `compile=eager` everything can.

Facts about torch's compiler stand here as torch 2.13 has them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.call import Mode
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.tree.views import Trace
from tests.agent.programs import Two
from tests.noted import remarks
from tests.unharmed import traced_unharmed

Compiled = Callable[[torch.Tensor], torch.Tensor]
WHOLE = ["", "layers.0", "layers.0.a", "layers.0.b", "layers.1", "layers.1.a", "layers.1.b", "head"]
BELOW = ["layers.1", "layers.1.a", "layers.1.b", "head"]


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(model: Net, backend: Any) -> Compiled:
    return torch.compile(model, backend=backend)


def in_place(model: Net, backend: Any) -> Compiled:
    model.compile(backend=backend)
    return model


def wrapped_layer(model: Net, backend: Any) -> Compiled:
    model.layers[0] = torch.compile(model.layers[0], backend=backend)
    return model


def layer_in_place(model: Net, backend: Any) -> Compiled:
    model.layers[0].compile(backend=backend)
    return model


def inside_a_function(model: Net, backend: Any) -> Compiled:
    return torch.compile(lambda x: model(x), backend=backend)


WAYS = (wrapped, in_place, wrapped_layer, layer_in_place, inside_a_function)


class Program:
    """Trains a compiled model; counts the graphs of each of its runs."""

    def __init__(self, way: Callable[[Net, Any], Compiled], backend: str, steps: int = 3) -> None:
        self.way, self.backend, self.steps = way, backend, steps
        self.graphs: list[int] = []

    def __call__(self) -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter, model = CompileCounterWithBackend(self.backend), Net()
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
    assert (node.class_name, node.wrappers, node.is_opaque) == ("Net", ("compile",), True)
    assert [v.slot for v in node.slots] == ["input.0", "output"]


def says_hidden(found: Trace, step: int) -> None:
    (node,) = found.find("", phase="forward", step=step)
    assert called(found, step) == [""]
    assert (node.class_name, node.status, node.slots) == ("Net", "not_entered", ())


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
    tmp_path: Path, way: Callable[[Net, Any], Compiled], backend: str, steps: str
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
    tmp_path: Path, way: Callable[[Net, Any], Compiled]
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


@pytest.mark.slow
def test_inductor_gives_the_same_numbers_traced(tmp_path: Path) -> None:
    program = Program(wrapped, "inductor", steps=3)
    try:
        found = traced_unharmed(program, tmp_path / "trace", steps="1")
    except torch._inductor.exc.InductorError as error:  # no C++ compiler that works
        pytest.skip(str(error)[:100])
    says_wrapped(found, 1)
    assert program.graphs == [1, 1]


@pytest.mark.parametrize("compile", ["eager", "opaque"])
def test_only_a_run_that_asked_for_eager_is_told_that_its_numbers_are_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compile: str
) -> None:
    """Everywhere else tracing changes no number: who gives that up must read it while it runs."""
    model = Net()
    with rankscope.trace(model, out=tmp_path / "trace", steps="1-2", compile=compile):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            rankscope.step()
        said = capsys.readouterr().err
    assert said.count("not those of the compiled run") == (compile == "eager")
    assert said.count("rankscope:") == (compile == "eager")


def dropout_losses(rate: float, out: Path | None, **settings: Any) -> tuple[list[float], float]:
    """Train five steps compiled by inductor; return the losses and the next random number."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(rate), nn.Linear(32, 4))
    compiled, losses = torch.compile(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(5, 8, 16)
    with contextlib.nullcontext() if out is None else rankscope.trace(model, out=out, **settings):
        for batch in batches:
            loss = compiled(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, torch.rand(1).item()


@pytest.mark.slow
def test_eager_steps_change_rounding_and_with_dropout_the_random_numbers_of_what_follows(
    tmp_path: Path,
) -> None:
    """What the docs say of `compile=eager`, as inductor gives it; `opaque` changes no bit."""
    try:
        plain, dropped = dropout_losses(0.0, None), dropout_losses(0.3, None)
    except torch._inductor.exc.InductorError as error:  # no C++ compiler that works
        pytest.skip(str(error)[:100])
    assert dropout_losses(0.3, tmp_path / "opaque", steps="1") == dropped
    losses, following = dropout_losses(0.0, tmp_path / "plain", steps="1", compile="eager")
    assert losses == pytest.approx(plain[0], rel=1e-5) and following == plain[1]
    losses, following = dropout_losses(0.3, tmp_path / "dropout", steps="1", compile="eager")
    assert losses[0] == dropped[0][0], "before the first traced step nothing differs"
    assert all(abs(a - b) > 1e-4 * b for a, b in zip(losses[1:], dropped[0][1:], strict=True))
    assert following != dropped[1]


def test_a_stance_the_program_chose_meanwhile_is_left_alone(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, optimizer = Net(), None
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with rankscope.trace(out=tmp_path / "trace", steps="0", compile="eager"):
            for step in range(3):
                compiled(torch.ones(2, 8)).sum().backward()
                if step == 0:
                    torch.compiler.set_stance("eager_on_recompile")
                optimizer.step()
            stance = torch._dynamo.eval_frame._stance.stance
        assert stance == "eager_on_recompile"
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


def test_a_model_compiled_as_a_whole_is_said_once_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced_unharmed(Program(in_place, "eager"), tmp_path / "trace")
    said = capsys.readouterr().err
    assert said.count("rankscope:") == 1 and "Net: " in said and "--rs-compile eager" in said
    assert {n.phase for n in found.walk()} == {
        Phase.SETUP, Phase.FORWARD, Phase.GRADS, Phase.PARAMS,
    }  # fmt: skip


def test_a_run_in_which_only_compiled_code_was_called_says_why_it_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    model = Net()
    model.compile(backend="eager")
    with rankscope.trace(out=tmp_path / "trace"), torch.no_grad():
        model(torch.ones(2, 8))
    assert "nothing was traced" in capsys.readouterr().err


def test_two_optimizers_of_a_hidden_model_make_one_step(tmp_path: Path) -> None:
    def program() -> Any:
        torch._dynamo.reset()
        model = Net()
        model.compile(backend="eager")
        first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            first.step()
            second.step()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert [s.step for s in found.steps] == [0, 1, 2]
    for step in range(3):
        assert [n.ordinal for n in found.find("head", phase="params", step=step)] == [1]
        assert [n.ordinal for n in found.find("layers.0.a", phase="params", step=step)] == [0]


def test_optimizer_states_made_before_any_forward_are_no_step(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint makes them: an optimizer step with zeros for gradients."""

    def program() -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Net()
        model.compile(backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert [s.step for s in found.steps] == [0, 1]


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


def test_a_compile_wrapper_with_the_compiler_off_is_one_node_with_its_inside(
    tmp_path: Path,
) -> None:
    def program() -> Any:
        torch._dynamo.reset()
        model = Net()
        compiled = torch.compile(model, backend="eager")
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.randn(4, 8)).sum().backward()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert called(found, 0) == WHOLE


@pytest.mark.parametrize("kind", ["closure", "two steps for one backward"])
def test_what_else_was_compiled_makes_no_step_of_a_model_that_hooks_see(
    tmp_path: Path, kind: str
) -> None:
    double = torch.compile(lambda x: x * 2, backend="eager")

    def program() -> Any:
        assert double(torch.ones(2)).tolist() == [2, 2]
        model = Net()
        x = torch.randn(4, 8)
        if kind == "closure":
            stepper: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        else:
            stepper = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss() -> torch.Tensor:
            stepper.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        for _ in range(2):
            if kind == "closure":
                stepper.step(loss)
            else:
                loss()
                stepper.step()
                stepper.step()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert [s.step for s in found.steps] == [0, 1]
    forwards = [len(found.find("", phase="forward", step=step)) for step in range(2)]
    assert forwards[0] == forwards[1] > 0


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, with a first bucket that holds nothing."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
    dist._DEFAULT_FIRST_BUCKET_BYTES = first


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_compiled_ddp_model_is_one_opaque_node_however_many_buckets_it_has(
    alone: None, tmp_path: Path, is_outside: bool
) -> None:
    """torch compiles one graph for each bucket, and calls them inside modules of its own: they have
    20 inputs without a name, and are not the user's."""
    torch.compiler.reset()
    net, cap = Net(), 1e-5
    if is_outside:
        model: nn.Module = torch.compile(
            DistributedDataParallel(net, bucket_cap_mb=cap), backend="aot_eager"
        )
    else:
        model = DistributedDataParallel(torch.compile(net, backend="aot_eager"), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=tmp_path / "t", steps="0-1") as traced:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = traced.open()
    for step in found.steps:
        calls = [n for n in step.walk() if n.phase in (Phase.FORWARD, Phase.BACKWARD)]
        assert [(n.path, n.class_name, n.is_opaque) for n in calls] == [
            ("", "Net", True),
            ("", "Net", True),
        ]
        assert {n.path for n in step.walk() if n.phase is Phase.GRADS} >= {"layers.0.a", "head"}
