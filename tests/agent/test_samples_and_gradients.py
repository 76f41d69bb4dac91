"""Sketches of single samples, and gradients under recomputation, held to their definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from rankscope.record.sketchfactors import factors
from rankscope.tree.views import Trace
from tests.unharmed import traced_unharmed


def rows_of(x: torch.Tensor, batch_dim: int = 0) -> np.ndarray:
    """Return [samples, 8] by the definition: every factor but the batch dim's own."""
    y = x.detach().double().numpy()
    sums = np.broadcast_to(y, (8, *y.shape))
    for dim in reversed(range(y.ndim)):
        if dim != batch_dim:
            weights = factors(dim, ((0, y.shape[dim]),)).astype(np.float64)
            weights = weights.reshape(8, *(n if d == dim else 1 for d, n in enumerate(y.shape)))
            sums = sums * weights
    axes = tuple(d + 1 for d in range(y.ndim) if d != batch_dim)
    return sums.sum(axes).T


class Kept(nn.Module):
    """Two layers; keeps what it saw, gradients included."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        self.kept |= {"input": x, "hidden": hidden, "output": out}
        for tensor in (hidden, out):
            tensor.retain_grad()
        return out


@pytest.mark.parametrize(("shape", "batch_dim"), [((4, 6), 0), ((3, 4, 6), 1), ((7, 2, 6), -2)])
def test_every_sample_has_the_sketch_of_its_own_elements(
    tmp_path: Path, shape: tuple[int, ...], batch_dim: int
) -> None:
    kept: dict[str, torch.Tensor] = {}

    def program() -> Any:
        model = Kept()
        loss = model(torch.randn(shape)).square().sum()
        loss.backward()
        kept.update(model.kept)
        return model, loss

    found = traced_unharmed(program, tmp_path / "trace", batch_dim=batch_dim)
    dim = batch_dim % len(shape)
    for path, slot, phase, x in (
        ("", "input.0", "forward", kept["input"]),
        ("", "output", "forward", kept["output"]),
        ("last", "input.0", "forward", kept["hidden"]),
        ("", "grad_output", "backward", kept["output"].grad),
        ("last", "grad_input.0", "backward", kept["hidden"].grad),
    ):
        assert x is not None
        value = found.value(path, slot, phase=phase)
        samples, digest = value.samples[0], value.per_rank[0]
        assert digest is not None
        assert samples.dim == dim
        rows = np.array(samples.rows)
        assert np.allclose(rows, rows_of(x, dim), rtol=0, atol=1e-5 * digest.l2), slot
        whole = (rows * factors(dim, ((0, x.shape[dim]),)).T).sum(0)
        assert np.allclose(whole, digest.sketch, rtol=0, atol=1e-5 * digest.l2), slot


def test_no_samples_are_kept_of_many_nor_of_parameters(tmp_path: Path) -> None:
    def program() -> Any:
        model = nn.Linear(3, 4)
        model(torch.randn(65, 3)).sum().backward()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert not found.value("", "output").samples
    assert not found.value("", "param:weight", phase="setup").samples


# ---------------------------------------------------------------- recomputation


class Deep(nn.Module):
    """Blocks that may be recomputed in backward."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6))
            for _ in range(2)
        )
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.run(block, x)
        return x


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_to_the_end(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda block, x: block(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "to the end": recompute_to_the_end,
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_products),
    ),
}


def gradients(found: Trace) -> dict[tuple[str, str, int], tuple[float, int]]:
    """Return norm and hash of every gradient of an activation."""
    return {
        (node.path, view.slot, node.ordinal): (digest.l2, digest.hash)
        for node in found.find(phase="backward")
        for view in node.slots
        if (digest := view.per_rank()[0]) is not None
    }


def test_gradients_of_recomputed_modules_are_those_without_recomputation(tmp_path: Path) -> None:
    seen: dict[str, dict[tuple[str, str, int], tuple[float, int]]] = {}
    for way, run in WAYS.items():

        def program(run: Callable[..., torch.Tensor] = run) -> Any:
            model = Deep(run)
            x = torch.randn(4, 6, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().sum()
            loss.backward()
            return model, loss, x.grad

        found = traced_unharmed(program, tmp_path / way.replace(" ", "-"))
        seen[way] = gradients(found)
        assert bool(found.find(phase="recompute")) == (way != "plain")
    inside = {key for key in seen["plain"] if key[0].count(".") == 2}
    assert len(inside) > 8
    for way, found_gradients in seen.items():
        assert found_gradients == seen["plain"], f"{way}: not the same gradients, bit by bit"
