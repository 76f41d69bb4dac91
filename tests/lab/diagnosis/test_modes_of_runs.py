"""A layer in eval mode in one of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankscope


class Mixing(nn.Module):
    """Attention over rows [n, t, 12] that drops weights in training."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(x).chunk(3, -1)
        return F.scaled_dot_product_attention(*parts, dropout_p=0.3 if self.training else 0.0)


def trained(folder: Path, *in_eval_mode: str, seed: int = 5) -> Path:
    """Train two steps with these modules in eval mode."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(7))
    parts = {"stem": stem, "mix": Mixing(), "drop": nn.Dropout(0.2), "head": nn.Linear(12, 3)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    for name in in_eval_mode:
        model.get_submodule(name).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(out=folder, steps="all"):
        for step in range(2):
            rows = torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(seed + step)
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.parametrize(
    ("module", "place"), [("stem", "stem.1"), ("mix", "mix"), ("drop", "drop"), ("", "stem.1")]
)
def test_a_layer_in_eval_mode_in_one_run_is_the_likely_cause(
    tmp_path: Path, module: str, place: str
) -> None:
    both = trained(tmp_path / "a"), trained(tmp_path / "b", module)
    for pair, mode, ref_mode in ((both, "eval", "training"), (both[::-1], "training", "eval")):
        first = rankscope.diff(*pair).origins[0]
        assert (first.path, first.slot, first.step) == (place, "output", 0)
        said = f"its module is in {mode} mode here, and in {ref_mode} mode in the reference"
        assert first.message.endswith(said) and "eval()" in first.advice


def test_layers_in_eval_mode_in_both_runs_and_what_modes_do_not_change_are_not_spoken_of(
    tmp_path: Path,
) -> None:
    frozen = "stem", "mix", "drop"
    pair = trained(tmp_path / "a", *frozen), trained(tmp_path / "b", *frozen, "head", seed=9)
    assert not rankscope.diff(*pair).findings


def test_dropout_in_training_in_both_runs_may_draw_other_numbers(tmp_path: Path) -> None:
    pair = trained(tmp_path / "a", "mix"), trained(tmp_path / "b", "mix", seed=9)
    (warning,) = rankscope.diff(*pair).findings
    assert not warning.is_origin and "other random numbers" in warning.message
