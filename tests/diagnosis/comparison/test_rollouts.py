"""A rollout beside the training forward of the same tokens: without a cache, with one, token by
token.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Report
from rankscope.record.phases import Phase

VOCABULARY, WIDTH, TOKENS, SAMPLES = 40, 16, 12, 3


class Attention(nn.Module):
    """One head that sees the past; `cache` holds the keys and values of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if cache is not None:
            if cache:
                keys = torch.cat([cache[0], keys], 1)
                values = torch.cat([cache[1], values], 1)
            cache[:] = [keys, values]
        past = keys.shape[1] - x.shape[1]
        hidden = torch.ones(x.shape[1], keys.shape[1]).triu(past + 1).bool()
        scores = queries @ keys.transpose(1, 2) / math.sqrt(WIDTH)
        return self.o_proj(scores.masked_fill(hidden, -math.inf).softmax(-1) @ values)


class Decoder(nn.Module):
    """Two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: Tensor, start: int = 0, caches: list[list[Tensor]] | None = None
    ) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(start, start + tokens.shape[1])[None])
        for index, layer in enumerate(self.layers):
            x = x + layer(x, None if caches is None else caches[index])
        return self.head(self.norm(x))


def run(folder: Path, lengths: list[int] | None, *, late: int = 0, rounds: int = 1) -> Path:
    """Trace training steps, where `lengths` is None, or rollouts of the same tokens.

    Args:
        folder: of the trace.
        lengths: tokens of each call; one of all tokens is made without a cache.
        late: by how much positions behind the first call are too large.
        rounds: training steps without an update, or rollouts.
    """
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if lengths is None else None
    with rankscope.trace(model, out=folder, steps="all"):
        for number in range(rounds):
            source = torch.Generator().manual_seed(number)
            tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=source)
            if optimizer is not None:
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            assert lengths is not None
            caches: list[list[Tensor]] = [[], []]
            start = 0
            model.eval()
            with torch.no_grad():
                for length in lengths:
                    own = None if len(lengths) == 1 else caches
                    begin = start + late * (start > 0)
                    model(tokens[:, start : start + length], begin, own)
                    start += length
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of two training steps."""
    return run(tmp_path_factory.mktemp("trained") / "t", None, rounds=2)


def steps_told(report: Report) -> str:
    return next(text for what, _, text in report.preflight if what == "steps")


@pytest.mark.parametrize("lengths", [[12], [1] * 12, [5, *[1] * 7]])
def test_a_rollout_of_the_same_tokens_is_clean(
    trained: Path, tmp_path: Path, lengths: list[int]
) -> None:
    report = diff(trained, run(tmp_path / "t", lengths, rounds=2))
    assert report.verdict.value == "clean" and report.findings == ()
    assert report.compared >= 0.8 * report.recorded > 30
    together = " together" if len(lengths) > 1 else ""
    noun = "step" if len(lengths) == 1 else "steps"
    assert steps_told(report) == (
        f"forwards alone: {len(lengths)} eval {noun}{together} beside 1 train step of the "
        "reference, once more"
    )
    assert ("samples", True) in [(what, same) for what, same, _ in report.preflight]


def test_a_rollout_may_be_the_reference(trained: Path, tmp_path: Path) -> None:
    report = diff(run(tmp_path / "t", [4, *[1] * 8]), trained)
    assert report.verdict.value == "clean" and report.findings == ()


def test_two_rollouts_may_be_cut_in_other_calls(tmp_path: Path) -> None:
    whole = run(tmp_path / "a", [12])
    report = diff(whole, run(tmp_path / "b", [3, *[1] * 9]))
    assert report.verdict.value == "clean" and report.findings == ()


@pytest.mark.parametrize("lengths", [[1] * 12, [5, *[1] * 7]])
def test_positions_that_begin_too_late_behind_a_cache_are_a_fault(
    trained: Path, tmp_path: Path, lengths: list[int]
) -> None:
    report = diff(trained, run(tmp_path / "t", lengths, late=1, rounds=2))
    first = report.origins[0]
    assert (first.path, first.slot, first.mode.word, first.step) == (
        ("positions", "input.0", "eval", 0)
    )


def test_several_tokens_at_once_behind_a_cache_are_left_out_and_said(
    trained: Path, tmp_path: Path
) -> None:
    report = diff(trained, run(tmp_path / "t", [5, 4, 3], rounds=2))
    assert report.origins == ()
    reasons = {skipped.reason for skipped in report.skipped}
    assert "several tokens at once behind the first call of the rollout" in reasons


def test_train_steps_of_other_numbers_are_no_partners(trained: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rankscope.trace(model, out=tmp_path / "t", steps="2"):
        for _ in range(3):
            model(torch.zeros(SAMPLES, TOKENS, dtype=torch.long)).sum().backward()
            optimizer.step()
    report = diff(trained, tmp_path / "t")
    assert report.verdict.value == "incomplete" and "no step in common" in report.lacks
    longer, shorter = (run(tmp_path / str(count), [count]) for count in (TOKENS, TOKENS - 1))
    lacks = diff(longer, shorter).lacks
    assert lacks.startswith("eval step 0 worked on samples of 12 and 11 tokens: hand both runs")


def test_hashes_hold_a_forward_to_the_training_forward_of_the_same_tokens(
    trained: Path, tmp_path: Path
) -> None:
    alike = diff(trained, run(tmp_path / "t", [TOKENS], rounds=2), exact=True)
    assert alike.equal is not None
    equal, compared = alike.equal[Phase.FORWARD]
    assert equal == compared > 0
    assert steps_told(alike).startswith("forwards alone: 1 eval step beside 1 train step")
    parts = diff(trained, run(tmp_path / "parts", [1] * TOKENS), exact=True)
    assert "of another size than the reference's" in {each.reason for each in parts.skipped}
