"""The one setting that changes a run: inputs off by a rounding, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.errors import SettingError
from rankscope.settings import settings_from

EPSILON = torch.finfo(torch.float32).eps


class Tokens(nn.Module):
    """Is given integers: its first floating value comes out of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return checkpoint(self.fc, x, use_reentrant=False)


def seen(module: nn.Module) -> list[Tensor]:
    """Return a list that fills with the floating values that a module is given or makes."""
    found: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    return found


def off(given: Tensor, plain: Tensor) -> Tensor:
    """Return by how many roundings elements are off, of those that are not zero."""
    known = plain != 0
    return ((given - plain).abs() / plain.abs())[known] / EPSILON


@pytest.mark.parametrize("roundings", [1, 4])
def test_floating_inputs_are_off_by_roundings_up_and_down(tmp_path: Path, roundings: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    given, inner = seen(model[0]), seen(model[1])
    x = torch.randn(4, 8)
    with rankscope.trace(model, out=tmp_path / "t", steps="all", perturb=roundings):
        model(x)
    model(x)
    changed, plain = given
    assert off(changed, plain).max() <= roundings + 1
    assert off(changed, plain).min() >= roundings / 2 - 0.5
    assert {-1.0, 1.0} == set(((changed - plain) * plain).sign().unique().tolist())
    assert torch.equal(inner[0], model[0](changed)), "only what the outermost call is given"


def test_of_integers_the_first_floating_output_is_off_and_can_be_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens()
    given = seen(model.fc)
    tokens = torch.randint(16, (4,))
    state = torch.get_rng_state()
    with rankscope.trace(model, out=tmp_path / "t", steps="all", perturb=1) as handle:
        model(tokens).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < off(given[0], model.embed(tokens)).max() <= 2
    gradient = model.embed.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0
    assert handle.open().run["settings"]["perturb"] == "1"


def test_without_the_setting_nothing_is_changed_and_nonsense_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    given = seen(model)
    x = torch.randn(4, 8)
    with rankscope.trace(model, out=tmp_path / "t", steps="all"):
        model(x)
    assert torch.equal(given[0], x)
    with pytest.raises(SettingError, match="write 0 to 16 roundings"):
        settings_from({"perturb": 99})


def test_the_hooks_are_gone_behind_the_block(tmp_path: Path) -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    with rankscope.trace(out=tmp_path / "t", perturb=1):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == before
