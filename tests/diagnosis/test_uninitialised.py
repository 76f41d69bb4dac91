"""A layer that nobody initialised, beside siblings that show what it should look like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.finding import Finding, Severity
from tests.diagnosis.paper import judged, numbers, setup, told
from tests.tree.ranks_on_paper import PaperRank

LAYERS = 4


def weights(odd: dict[str, np.ndarray], size: float = 0.02) -> dict[str, np.ndarray]:
    """Blocks as they are initialised, but for what `odd` says."""
    found = {"embed.weight": numbers(90) * 1000}
    for n in range(LAYERS):
        found |= {
            f"layers.{n}.up.weight": numbers(n) * np.float32(size),
            f"layers.{n}.up.bias": np.zeros(6, np.float32),
            f"layers.{n}.norm.weight": np.ones(6, np.float32),
            f"layers.{n}.lora_b.weight": np.zeros((4, 6), np.float32),
        }
    return found | odd


def findings(folder: Path, odd: dict[str, np.ndarray], size: float = 0.02) -> list[Finding]:
    def write(rank: PaperRank) -> None:
        setup(rank, weights(odd, size), wrappers=["DDP"])

    return list(judged(folder, 2, write).findings)


def zero_block(number: int) -> dict[str, np.ndarray]:
    block = weights({})
    return {name: value * 0 for name, value in block.items() if f"layers.{number}." in name}


@pytest.mark.parametrize("factor", [1e12, 1e-36], ids=["huge", "denormal"])
def test_garbage_beside_siblings_of_one_size_is_told_at_setup(tmp_path: Path, factor: float):
    odd = {"layers.1.up.weight": numbers(5) * np.float32(factor)}
    (found,) = findings(tmp_path, odd)
    assert told(found) == ("scale-error", "setup", "layers.1.up", "param:weight", (0, 1))
    assert "reset_parameters" in found.advice


def test_a_layer_that_is_zero_with_its_norm_is_a_fault(tmp_path: Path):
    found = findings(tmp_path, zero_block(1))
    assert [told(f)[2] for f in found] == ["layers.1.up"]
    assert found[0].severity is Severity.FAULT


def test_one_zero_weight_in_a_layer_that_has_others_is_a_warning(tmp_path: Path):
    (found,) = findings(tmp_path, {"layers.1.up.weight": np.zeros((4, 6), np.float32)})
    assert (found.path, found.severity) == ("layers.1.up", Severity.WARNING)


def test_a_layer_that_holds_what_is_not_finite_is_told_by_that_alone(tmp_path: Path):
    garbage = numbers(5) * np.float32(1e30)
    garbage[0, 0] = np.nan
    assert [f.kind.value for f in findings(tmp_path, {"layers.1.up.weight": garbage})] == [
        "nonfinite-origin"
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"layers.3.up.weight": np.zeros((4, 6), np.float32)},
        {f"layers.{n}.up.weight": np.zeros((4, 6), np.float32) for n in (1, 3)},
        {"layers.1.up.weight": numbers(5) * np.float32(1e-4)},
        {"layers.1.up.bias": numbers(5, 6)},
        {f"layers.{n}.up.weight": np.zeros((4, 6), np.float32) for n in range(LAYERS)},
        {"layers.1.up.weight": np.zeros((0, 6), np.float32)},
    ],
    ids=["usual", "last-zero", "added-blocks", "tiny", "one-bias", "all-zero", "empty-shard"],
)
def test_odd_beginnings_that_are_meant_are_left_alone(tmp_path: Path, odd: dict[str, np.ndarray]):
    assert not findings(tmp_path, odd)


def test_tiny_weights_everywhere_are_left_alone(tmp_path: Path):
    assert not findings(tmp_path, {}, size=1e-9)
