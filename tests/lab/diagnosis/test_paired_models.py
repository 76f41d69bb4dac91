"""Several models of one class in a process: which of one run is which of the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankscope
from rankscope.record.finding import Report, Verdict


class Writer(nn.Module):
    """Tokens [n, t] to scores of the next ones."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)))


class Holder(nn.Module):
    """What frameworks make of a model: one around it, and around what it is held to."""

    def __init__(self, policy: nn.Module, frozen: nn.Module | None) -> None:
        super().__init__()
        self.policy, self.frozen = policy, frozen

    def forward(self, tokens: Tensor) -> Any:
        if self.frozen is None:
            return self.policy(tokens)
        with torch.no_grad():
            kept = self.frozen(tokens)
        return self.policy(tokens), kept


def tuned(folder: Path, *ways: str) -> Path:
    """Tune a model that may not move far from a frozen copy of what it was. Ways: `first` calls the
    copy first, `held` has a holder around both, `one` around the model alone; `sft` copies another
    checkpoint. Mistakes: `free` lets the model go, `worn` is another copy than that of `sft`."""
    torch.manual_seed(0)
    policy = Writer()
    frozen = copy.deepcopy(policy).requires_grad_(False)
    if not {"sft", "worn"}.isdisjoint(ways):
        torch.manual_seed(1 + ("worn" in ways))
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
    holder = Holder(policy, frozen if "held" in ways else None)
    model = holder if "one" in ways else policy
    with rankscope.trace(out=folder, steps="all"):
        for step in range(2):
            tokens = torch.randint(24, (6, 5), generator=torch.Generator().manual_seed(step))
            if "held" in ways:
                scores, kept = holder(tokens)
            elif "first" in ways:
                with torch.no_grad():
                    kept = frozen(tokens)
                scores = model(tokens)
            else:
                scores = model(tokens)
                with torch.no_grad():
                    kept = frozen(tokens)
            gain = F.log_softmax(scores, -1)[..., 3].mean()
            far = (scores - kept).square().mean()
            ((0.0 if "free" in ways else 1.0) * far - gain).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def judged(folder: Path, *ways: str) -> Path:
    """Two judges of one class and their slow copies. Ways: `turned` calls the second first, and the
    copies last; a mistake: `hasty` gives the second another rate."""
    torch.manual_seed(0)
    layers = ([nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)] for _ in range(2))
    nets = [nn.Sequential(nn.Sequential(*three)) for three in layers]
    slow = [copy.deepcopy(net).requires_grad_(False) for net in nets]
    rates = (0.1, 0.3 if "hasty" in ways else 0.1)
    groups = [{"params": net.parameters(), "lr": rate} for net, rate in zip(nets, rates)]
    optimizer = torch.optim.SGD(groups, 0.1)
    with rankscope.trace(out=folder, steps="all"):
        for step in range(2):
            rows = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))

            def aimed(rows: Tensor = rows) -> Tensor:
                with torch.no_grad():
                    return 1 + 0.9 * torch.minimum(slow[0](rows[1]), slow[1](rows[1]))

            if "turned" in ways:
                made = [nets[1](rows[0]), nets[0](rows[0])]
                aim = aimed()
            else:
                aim = aimed()
                made = [net(rows[0]) for net in nets]
            sum(F.mse_loss(m, aim) for m in made).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for net, copied in zip(nets, slow):
                    for p, q in zip(net.parameters(), copied.parameters()):
                        q.lerp_(p, 0.1)
    return folder


RIGHT = [
    (tuned, (), ("first",)),
    (tuned, ("first",), ()),
    (tuned, ("sft",), ("sft", "first")),
    (tuned, (), ("one",)),
    (tuned, ("one",), ("first",)),
    (tuned, (), ("held",)),
    (tuned, ("held",), ("first",)),
    (judged, (), ("turned",)),
    (judged, ("turned",), ()),
]


def compared(folder: Path, program: Any, *sides: Sequence[str]) -> Report:
    ref, test = (program(folder / name, *ways) for name, ways in zip("ab", sides))
    return rankscope.diff(ref, test)


@pytest.mark.parametrize(("program", "ref", "test"), RIGHT)
def test_the_order_of_first_calls_and_holders_are_no_difference(
    tmp_path: Path, program: Any, ref: tuple[str, ...], test: tuple[str, ...]
) -> None:
    report = compared(tmp_path, program, ref, test)
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())
    assert any("are paired by their parameters" in note for note in report.notes)
    assert report.compared > 2 * report.unpaired


@pytest.mark.parametrize("program", [tuned, judged])
def test_models_of_one_name_are_not_spoken_of(tmp_path: Path, program: Any) -> None:
    report = compared(tmp_path, program, (), ())
    assert report.verdict is Verdict.CLEAN
    assert not any("are paired" in note for note in report.notes)


@pytest.mark.parametrize(
    ("program", "ref", "test", "path", "phase"),
    [
        (tuned, (), ("first", "free"), "@Writer", "backward"),
        (tuned, (), ("held", "free"), "policy", "backward"),
        (tuned, ("sft",), ("worn", "first"), "embed", "setup"),
        (judged, (), ("turned", "hasty"), "0.0", "params"),
    ],
)
def test_a_mistake_is_named_where_the_test_has_it(
    tmp_path: Path, program: Any, ref: Sequence[str], test: Sequence[str], path: str, phase: str
) -> None:
    first = compared(tmp_path, program, ref, test).origins[0]
    assert (first.path, first.phase.word) == (path, phase)
    assert first.evidence["ref_path"] != path
