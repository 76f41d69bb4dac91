"""The values of a trace are those of the tensors, taken when they were what they were."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.record.call import Mode
from tests.models import Net, paths, trace, train


def test_inputs_by_position_and_keyword_are_recorded_under_their_names(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net()))
    (node,) = found.find("layers.0", phase="forward", step=0)
    assert [view.slot for view in node.slots] == ["input.0", "input.scale", "output"]
    assert node.slots[1].dtype == "python"


def test_digests_are_those_of_the_tensors(tmp_path: Path) -> None:
    model, kept = Net(), []
    model.layers[1].up.register_forward_hook(
        lambda module, args, output: kept.append(output.detach().clone())
    )
    found = trace(tmp_path, lambda: train(model, steps=1))
    digest = found.value("layers.1.up", "output").per_rank[0]
    assert digest is not None
    assert digest.mean == pytest.approx(kept[0].double().mean().item(), rel=1e-6)
    assert digest.std == pytest.approx(kept[0].double().std().item(), rel=1e-6)
    assert digest.l2 == pytest.approx(kept[0].double().norm().item(), rel=1e-6)
    assert (digest.min, digest.max) == (kept[0].min().item(), kept[0].max().item())


def test_gradients_of_activations_and_parameters_are_the_real_ones(tmp_path: Path) -> None:
    model, gradients = Net(), {}

    def body() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        hidden = model(x)
        hidden.retain_grad()
        hidden.square().sum().backward()
        gradients.update(output=hidden.grad, x=x.grad)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients["weight"] = model.head.weight.grad.clone()
        optimizer.step()

    found = trace(tmp_path, body)
    for slot, phase, path in (("grad_output", "backward", ""), ("grad_input.0", "backward", "")):
        digest = found.value(path, slot, phase=phase).per_rank[0]
        truth = gradients["output" if slot == "grad_output" else "x"]
        assert digest is not None and digest.l2 == pytest.approx(
            truth.double().norm().item(), rel=1e-6
        )
    digest = found.value("head", "grad:weight", phase="grads").per_rank[0]
    assert digest is not None and digest.l2 == pytest.approx(
        gradients["weight"].double().norm().item(), rel=1e-6
    )


def test_setup_holds_parameters_and_buffers_as_they_were_before_the_first_forward(
    tmp_path: Path,
) -> None:
    model = Net()
    before = model.head.weight.detach().clone()
    found = trace(tmp_path, lambda: train(model), steps="1")
    digest = found.value("head", "param:weight", phase="setup").per_rank[0]
    assert digest is not None and digest.l2 == pytest.approx(
        before.double().norm().item(), rel=1e-6
    )
    assert found.value("layers.0", "buffer:mask", phase="setup").per_rank[0] is not None
    assert [(s.mode, s.step) for s in found.steps] == [(Mode.TRAIN, 1)], (
        "setup is recorded whatever the steps"
    )


@dataclass
class Result:
    """An output as a dataclass."""

    logits: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


def test_any_nesting_of_outputs_is_walked(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any]) -> Any:
            y = self.linear(batch["x"])
            return Result(y, {"states": [y, y + 1]}), OrderedDict(a=y)

    found = trace(tmp_path, lambda: Nested()({"x": torch.ones(2, 4), "flag": True}))
    (node,) = found.find("", phase="forward")
    assert [view.slot for view in node.slots] == [
        "input.0.x", "input.0.flag", "output.0.logits", "output.0.extra.states.0",
        "output.0.extra.states.1", "output.1.a",
    ]  # fmt: skip


def test_an_in_place_forward_does_not_change_the_input_that_was_recorded(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
            return x.mul_(0) + y.add_(1) * self.scale

    x, y = torch.full((3, 4), 5.0), torch.full((3, 4), 7.0)
    found = trace(tmp_path, lambda: InPlace()(x, y=y))
    first, second = found.value("", "input.0").per_rank[0], found.value("", "input.y").per_rank[0]
    assert first is not None and first.mean == 5.0
    assert second is not None and second.mean == 7.0


def test_what_a_modules_own_hooks_replace_is_seen_on_both_sides(tmp_path: Path) -> None:
    model = Net()
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 3,))
    model.head.register_forward_hook(lambda module, args, output: output * 0 + 9)
    found = trace(tmp_path, lambda: train(model, steps=2))
    for step in (0, 1):
        read = {
            slot: found.value("head", slot, step=step).per_rank[0]
            for slot in ("input.0", "output", "returned")
        }
        assert read["input.0"] is not None and read["input.0"].mean == 3
        assert read["returned"] is not None and read["returned"].mean == 9
        assert read["output"] is not None and read["output"].mean != 9


def test_a_value_changed_in_place_without_a_new_version_is_seen_again(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            y.detach().numpy()[:] = 42  # no version counts this
            return self.b(y)

    found = trace(tmp_path, lambda: Shared()(torch.ones(2, 4)))
    before, after = found.value("a", "output").per_rank[0], found.value("b", "input.0").per_rank[0]
    assert before is not None and after is not None
    assert after.mean == 42 and before.hash != after.hash


def test_structure_alone_keeps_calls_and_no_values(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net()), digest="none")
    assert paths(found, "forward")[:2] == ["", "layers.0"]
    assert not any(node.slots for node in found.walk())


def test_gradients_around_an_in_place_operation_are_told_apart(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    torch.manual_seed(1)
    x, kept = torch.randn(4, 8), {}

    def body() -> None:
        hidden = torch.relu(model[0](x)).detach().requires_grad_()
        model[2](hidden).square().sum().backward()
        kept["after"] = hidden.grad
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().sum().backward()

    found = trace(tmp_path, body, phases="forward,backward")
    last = found.steps[-1].step
    digest = found.value("2", "grad_input.0", phase="backward", step=last).per_rank[0]
    assert digest is not None
    assert digest.l2 == pytest.approx(kept["after"].double().norm().item(), rel=1e-6)
    digest = found.value("1", "grad_output", phase="backward", step=last).per_rank[0]
    assert digest is not None
    assert digest.l2 == pytest.approx(kept["after"].double().norm().item(), rel=1e-6)
