"""When steps begin and end, and which of them are taken: real models and sessions, the tree read
back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from tests.models import Net, paths, trace, train


def test_a_training_step_has_every_phase_in_the_order_it_ran(tmp_path: Path) -> None:
    model = Net()
    found = trace(tmp_path, lambda: train(model))
    assert [n.path for n in found.steps[0].nodes] == ["", "", "", ""]
    assert [n.phase for n in found.steps[0].nodes] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.GRADS,
        Phase.PARAMS,
    ]
    forward = [
        "",
        "layers.0",
        "layers.0.up",
        "layers.0.down",
        "layers.1",
        "layers.1.up",
        "layers.1.down",
        "head",
    ]
    assert paths(found, "forward") == forward
    assert sorted(paths(found, "backward")) == sorted(forward)
    assert found.is_complete


def test_micro_batches_of_an_accumulated_step_are_told_apart(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net(), steps=2, micro_batches=3))
    assert [n.micro_batch for n in found.find("head", phase="forward", step=0)] == [0, 1, 2]
    assert len(found.steps) == 2
    assert [n.micro_batch for n in found.find("head", phase="grads", step=1)] == [None]


def test_a_loss_module_is_recorded_and_counts_as_no_micro_batch(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net(), micro_batches=2, loss=nn.MSELoss()))
    losses = found.find("@MSELoss", phase="forward", step=1)
    assert [n.micro_batch for n in losses] == [0, 1]
    assert [n.micro_batch for n in found.find("", phase="forward", step=1)] == [0, 1]


def test_evaluation_is_counted_apart_and_closes_no_step(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 8))
                model(torch.ones(2, 8))
            optimizer.step()

    found = trace(tmp_path, body)
    steps = [(step.mode, step.step) for step in found.steps]
    assert [s for s in steps if s[0] is Mode.TRAIN] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    assert [s for s in steps if s[0] is Mode.EVAL] == [(Mode.EVAL, i) for i in range(4)]
    assert found.find("head", phase="grads", step=1, mode="train")


def test_inference_without_an_optimizer_counts_every_root_forward(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        with torch.inference_mode():
            for _ in range(3):
                model(torch.ones(2, 8))

    assert [(s.mode, s.step) for s in trace(tmp_path, body).steps] == [
        (Mode.EVAL, i) for i in range(3)
    ]


class Adapters(nn.Module):
    """A network beside a frozen model: the layers it adapts call it, and it is never called."""

    def __init__(self, host: nn.Sequential) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in host)
        for layer, part in zip(host, self.parts):
            layer.forward = self.beside(layer.forward, part)  # type: ignore[method-assign]

    @staticmethod
    def beside(original: Callable[[Tensor], Tensor], part: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: original(x) + part(x)


class Measured(nn.Module):
    """Its constructor runs a part of it to learn a width, and has a weight parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        width = self.body(torch.zeros(1, 8)).shape[1]
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_what_a_constructor_runs_is_no_step(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Measured(), steps=2))
    assert [(step.mode, step.step) for step in found.steps] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    assert "head" in paths(found, "forward")


@pytest.mark.parametrize("traced", ["0-3", "2"])
def test_a_network_that_a_frozen_model_calls_is_a_root_of_its_own(
    tmp_path: Path, traced: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    network = Adapters(model)

    def body() -> None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    found = trace(tmp_path, body, steps=traced)
    steps = [step.step for step in found.steps if step.mode is Mode.TRAIN]
    assert steps == ([0, 1, 2, 3] if traced == "0-3" else [2])
    assert found.find("1", phase="forward", step=2, mode="train")
    for path in ("@Adapters.parts.0", "@Adapters.parts.1"):
        (gradients,) = found.find(path, phase="grads", step=2)
        assert [value.slot for value in gradients.slots] == ["grad:weight", "grad:bias"]
        assert found.find(path, phase="forward", step=2, mode="train")
        assert found.find(path, phase="params", step=2)
        assert found.find(path, phase="setup")
        if traced != "2":
            assert found.find(path, phase="grads", step=0), "though its forward was taken for eval"


def test_several_optimizers_make_one_step_with_an_event_each(tmp_path: Path) -> None:
    model = Net(blocks=1)

    def body() -> None:
        first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            first.step()
            second.step()

    found = trace(tmp_path, body)
    assert [(s.mode, s.step) for s in found.steps] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    heads = [n.ordinal for n in found.find("head", phase="params", step=1)]
    blocks = [n.ordinal for n in found.find("layers.0.up", phase="params", step=1)]
    assert (blocks, heads) == ([0], [1]), "each optimizer's event holds its own parameters"


def test_only_the_steps_paths_phases_and_slots_asked_for_are_taken(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        lambda: train(Net(), steps=4),
        steps="1,3",
        paths="layers.*",
        phases="forward",
        slots="output",
    )
    assert [s.step for s in found.steps] == [1, 3]
    nodes = list(found.walk())
    assert {n.phase for n in nodes} == {Phase.FORWARD}
    assert all(n.path.startswith("layers.") for n in nodes)
    assert {view.slot for n in nodes for view in n.slots} == {"output"}


def test_a_step_can_be_closed_by_hand(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            model(torch.ones(2, 8)).sum().backward()
            rankscope.step()

    found = trace(tmp_path, body)
    steps = [s.step for s in found.steps]
    assert len(steps) == 4, "the first step closes by the rule, the others by hand"


def test_an_untraced_step_runs_without_a_module_hook_after_its_first_call(tmp_path: Path) -> None:
    from torch.nn.modules import module as hooks

    seen: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks))
            return x

    trace(tmp_path, lambda: train(nn.Sequential(Net(), Spy()), steps=4), steps="1")
    assert seen == [0, 2, 0, 0]


def test_an_optimizer_step_that_raises_does_not_stop_the_counting_of_steps(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def broken() -> float:
            raise LookupError("no loss")

        for step in range(4):
            model(torch.ones(2, 8)).sum().backward()
            if step == 1:
                with pytest.raises(LookupError):
                    optimizer.step(broken)
            optimizer.step()

    assert [s.step for s in trace(tmp_path, body).steps] == [0, 1, 2, 3]
