"""Compiled programs of rarer kinds: the compiler left or chosen, optimizers, DDP, random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.phases import Phase
from tests.agent.test_compile import WHOLE, Program, called, network, says_wrapped, wrapped
from tests.unharmed import traced_unharmed


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
    model = network()
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
    model, optimizer = network(), None
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


def test_two_optimizers_of_a_hidden_model_make_one_step(tmp_path: Path) -> None:
    def program() -> Any:
        torch._dynamo.reset()
        model = network()
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
        model = network()
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


def test_a_compile_wrapper_with_the_compiler_off_is_one_node_with_its_inside(
    tmp_path: Path,
) -> None:
    def program() -> Any:
        torch._dynamo.reset()
        model = network()
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
        model = network()
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
    net, cap = network(), 1e-5
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
            ("", "Layered", True),
            ("", "Layered", True),
        ]
        assert {n.path for n in step.walk() if n.phase is Phase.GRADS} >= {"layers.0.a", "head"}
