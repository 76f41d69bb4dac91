"""Choices in `diff`: a token between two experts may go to the other one, and no other may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Finding, Report, Severity

EXPERTS, CHOSEN, WIDTH = 8, 2, 32


class TopK(nn.Module):
    """Chooses experts for each token: its output are weights and indices."""

    def __init__(self, *, is_least: bool) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, EXPERTS, bias=False)
        self._is_least = is_least

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = self.logits(x).softmax(-1).topk(CHOSEN, largest=not self._is_least)
        return weights / weights.sum(-1, keepdim=True), indices


class Experts(nn.Module):
    """Takes the choice as an input: nothing in its name says what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        each = torch.einsum("bti,eio->bteo", x, self.weight)
        own = each.gather(2, indices[..., None].expand(*indices.shape, WIDTH))
        return (own * weights[..., None]).sum(2)


class Mixture(nn.Module):
    """A block whose choice a module of its own makes, or its own forward."""

    def __init__(self, *, is_inline: bool, is_least: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.pick = TopK(is_least=is_least)
        self.mixed = Experts()
        self._is_inline = is_inline

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if self._is_inline:
            logits = self.pick.logits(x)
            weights, indices = logits.softmax(-1).topk(CHOSEN, largest=not self.pick._is_least)
            return x + self.mixed(x, weights, indices)
        return x + self.mixed(x, *self.pick(x))


class Masked(nn.Module):
    """Keeps what is above a threshold that is computed."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.fc, self.keep = nn.Linear(WIDTH, WIDTH), Keep(is_turned=is_turned)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x * self.keep(x)


class Keep(nn.Module):
    """Its output is a mask."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self._is_turned = is_turned

    def forward(self, x: Tensor) -> Tensor:
        return x < 0 if self._is_turned else x > 0


def run(
    folder: Path, made: type[nn.Module], dtype: torch.dtype = torch.float32, **how: bool
) -> str:
    """Trace one training step."""
    torch.manual_seed(0)
    model = made(**how).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=folder, steps="all"):
        torch.manual_seed(1)
        model(torch.randn(4, 256, WIDTH).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return str(folder)


def first(report: Report) -> Finding:
    (found,) = [f for f in report.findings if f.is_origin or f.severity is Severity.WARNING][:1]
    return found


@pytest.mark.parametrize("is_inline", [False, True])
def test_tokens_between_two_experts_may_go_to_the_other_one(
    tmp_path: Path, is_inline: bool
) -> None:
    how = {"is_inline": is_inline, "is_least": False}
    ref = run(tmp_path / "a", Mixture, **how)
    report = diff(ref, run(tmp_path / "b", Mixture, torch.bfloat16, **how))
    assert report.origins == ()
    (warning,) = report.findings
    place = ("mixed", "input.2") if is_inline else ("pick", "output.1")
    assert (warning.path, warning.slot) == place
    assert "as rounding can flip them" in warning.message
    assert 0 < warning.evidence["flips"] < 0.1 * warning.evidence["choices"] == 0.1 * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_inline", [False, True])
def test_a_router_that_takes_the_least_is_a_fault(
    tmp_path: Path, is_inline: bool, dtype: torch.dtype
) -> None:
    ref = run(tmp_path / "a", Mixture, is_inline=is_inline, is_least=False)
    report = diff(ref, run(tmp_path / "b", Mixture, dtype, is_inline=is_inline, is_least=True))
    found = first(report)
    assert (found.path, found.slot) == (("mixed", "input.2") if is_inline else ("pick", "output.1"))
    assert found.severity is Severity.FAULT
    assert found.evidence["flips"] > 0.2 * found.evidence["choices"]


@pytest.mark.parametrize("is_turned", [False, True])
def test_elements_of_a_mask_are_counted(tmp_path: Path, is_turned: bool) -> None:
    ref = run(tmp_path / "a", Masked, is_turned=False)
    report = diff(ref, run(tmp_path / "b", Masked, torch.bfloat16, is_turned=is_turned))
    found = first(report)
    assert (found.path, found.slot) == ("keep", "output")
    assert found.severity is (Severity.FAULT if is_turned else Severity.WARNING)
    assert found.evidence["choices"] == 4 * 256 * WIDTH
    share = found.evidence["flips"] / found.evidence["choices"]
    assert share == pytest.approx(1.0, abs=0.1) if is_turned else 0 < share < 0.02
