"""Values that change in place, are replaced by hooks, or lose their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import Net, trace


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
