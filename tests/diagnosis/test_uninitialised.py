"""A layer that nobody initialised, beside siblings that show what it should look like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.record.finding import Finding, Severity
from tests.diagnosis.paper import judged, numbers, setup, told
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
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


class Block(nn.Module):
    """What a transformer's layer is made of, as far as its initial values go."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 16)
        self.down = nn.Linear(16, width)


class Towers(nn.Module):
    """Several stacks of blocks; only what they begin with matters."""

    def __init__(self, **towers: list[nn.Module]) -> None:
        super().__init__()
        for name, blocks in towers.items():
            self.add_module(name, nn.ModuleDict({"layers": nn.ModuleList(blocks)}))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(x))


def blocks(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [Block().to(dtype) for _ in range(LAYERS)]


def begun(towers: Towers, out: str) -> None:
    """Trace what a model begins with."""
    with rankscope.trace(out=out, steps="all"), torch.no_grad():
        towers(torch.ones(2, 8))


def left_empty(fills: dict[str, float], out: str) -> None:
    """One block of each stack comes from `to_empty` and holds what that memory held before."""
    torch.manual_seed(0)
    towers = {name: blocks() for name in fills}
    for name, fill in fills.items():
        with torch.device("meta"):
            block = Block()
        block.to_empty(device="cpu")
        for parameter in block.parameters():
            if fill:
                nn.init.normal_(parameter)
            else:
                nn.init.ones_(parameter)
            parameter.detach().mul_(fill)
        towers[name][1] = block
    begun(Towers(**towers), out)


def begun_oddly_on_purpose(out: str) -> None:
    """Models of which some parameters begin with zero or with another size, as their authors
    want."""
    torch.manual_seed(0)
    residual, lora, scaled, gated, wide = (blocks() for _ in range(5))
    for block in residual:
        nn.init.zeros_(block.down.weight)
        nn.init.zeros_(block.down.bias)
    for block in lora:
        block.lora_a = nn.Linear(8, 2, bias=False)
        block.lora_b = nn.Linear(2, 16, bias=False)
        nn.init.zeros_(block.lora_b.weight)
    for block in scaled:
        nn.init.normal_(block.up.weight, std=0.02)
        nn.init.normal_(block.down.weight, std=0.02 / (2 * LAYERS) ** 0.5)
        nn.init.zeros_(block.up.bias)
    for block in gated:
        block.gate = nn.Parameter(torch.zeros(8))
    wide[0] = Block(24)
    padded: list[nn.Module] = [nn.Embedding(5, 8, padding_idx=0) for _ in range(LAYERS)]
    begun(
        Towers(
            residual=residual,
            lora=lora,
            scaled=scaled,
            gated=gated,
            wide=wide,
            padded=padded,
            fp16=blocks(torch.float16),
            bf16=blocks(torch.bfloat16),
        ),
        out,
    )


def test_a_layer_left_as_to_empty_made_it_is_named_at_setup(
    ranks: RankPool, tmp_path: Path
) -> None:
    fills = {"zeros": 0.0, "huge": 1e20, "denormal": 1e-39}
    report = report_of(ranks, left_empty, fills, folder=tmp_path)
    found = [f for f in report.findings if f.severity is Severity.FAULT]
    assert {(f.kind.value, f.phase.word) for f in found} == {("scale-error", "setup")}
    for name in fills:
        inside = f"{name}.layers.1."
        assert {f.path for f in found if f.path.startswith(name)} >= {
            f"{inside}up",
            f"{inside}down",
        }
    assert all(".layers.1." in f.path for f in found)


def test_models_that_begin_with_zeros_or_other_sizes_on_purpose_are_left_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    # twin of the job above: residual branches that begin as nothing, LoRA, GPT-2's scaled
    # projections, gates, one wider layer, a padding row, two bytes an element
    assert not report_of(ranks, begun_oddly_on_purpose, folder=tmp_path).findings
