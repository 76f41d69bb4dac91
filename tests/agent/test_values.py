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
from tests.agent.models import Net, paths, trace, train


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


def test_an_input_replaced_by_the_roots_own_hook_is_read_again_and_keeps_its_place(
    tmp_path: Path,
) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x + y)

    model = Root()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 3, args[1]))
    found = trace(tmp_path, lambda: model(torch.ones(2, 4), torch.zeros(2, 4)))
    (node,) = found.find("", phase="forward")
    assert [view.slot for view in node.slots] == ["input.0", "input.1", "output"]
    digest = found.value("", "input.0").per_rank[0]
    assert digest is not None
    assert digest.mean == 4


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


def test_a_fused_optimizer_step_is_seen_although_it_counts_no_version(tmp_path: Path) -> None:
    model, truth = Net(), []

    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            truth.append(model.head.weight.detach().double().norm().item())

    found = trace(tmp_path, body)
    digests = [
        found.value("head", "param:weight", phase="params", step=s).per_rank[0] for s in range(3)
    ]
    assert [d.l2 for d in digests if d is not None] == pytest.approx(truth, rel=1e-6)
    assert len({d.hash for d in digests if d is not None}) == 3


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


def test_memory_taken_from_under_a_tensor_is_not_read(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *freed: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    whole, shrunk = torch.ones(100), torch.ones(100)
    view = whole[10:]
    whole.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(16)
    found = trace(tmp_path, lambda: Takes()(torch.ones(2, 4), view, shrunk))
    for slot in ("input.1", "input.2"):
        assert found.value("", slot).per_rank[0] is None
    assert found.value("", "input.0").per_rank[0] is not None


def test_the_gradient_of_a_view_that_was_written_in_place_is_said_to_be_unseen(
    tmp_path: Path,
) -> None:
    """torch 2.13 gives such a tensor another place in its graph, and a hook on it never fires.

    Without a view the hook stays where the value was, and fires.
    """

    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.view, self.plain = nn.Unflatten(1, (2, 4)), nn.Softplus()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            kept = self.view(x * 2)
            kept.add_(1)
            out = self.plain(kept)
            out.mul_(3)
            return out

    def body() -> None:
        x = torch.randn(3, 8, requires_grad=True)
        model = Overwritten()
        with torch.no_grad():
            model(x)
        model(x).sum().backward()

    found = trace(tmp_path, body)
    nodes = {n.path: n for n in found.find("*", phase="backward", step=0)}
    (unseen,) = (v for v in nodes["view"].slots if v.slot == "grad_output")
    assert "unseen" in unseen.folds[0].flags and unseen.folds[0].digest is None
    assert nodes["view"].value("grad_input.0").per_rank[0] is not None
    fired = nodes["plain"].value("grad_output").per_rank[0]
    assert fired is not None and fired.mean == 3, "before the in-place product"


def test_a_leaf_written_in_place_between_two_calls_keeps_no_hook(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                x.add_(1)
        optimizer.step()

    found = trace(tmp_path, body)
    assert len(found.steps) == 1
    assert not x._backward_hooks
