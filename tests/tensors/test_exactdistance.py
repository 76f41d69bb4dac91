"""Exact distances of full tensors, and rows of one found in another."""

from __future__ import annotations

import math

import pytest
import torch

from rankscope.tree.tensors import rebuild
from rankscope.tree.tensors.rebuild import exact_distance, row_matches


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float8_e4m3fn", "complex64", "int32"])
def test_a_distance_is_that_of_float64_and_names_the_worst_element(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "_CHUNK", 7)
    torch.manual_seed(0)
    a = (torch.randn(5, 6) * 9).to(getattr(torch, dtype))
    b = a.clone()
    b[3, 2] = b[1, 1] = 40
    found = exact_distance(a, b)
    wide = torch.complex128 if a.is_complex() else torch.float64
    one, two = (
        each.float().to(wide) if each.dtype.itemsize == 1 else each.to(wide) for each in (a, b)
    )
    assert found.relative == pytest.approx(float((one - two).norm() / one.norm()), rel=1e-12)
    assert found.unequal == 2
    assert found.at == max([(1, 1), (3, 2)], key=lambda at: float((one - two)[at].abs()))
    assert found.cross == pytest.approx(float((one.conj() * two).real.sum()), rel=1e-12)
    assert exact_distance(a, a).relative == 0.0


def test_the_same_nan_is_equal_and_another_one_is_infinitely_far() -> None:
    a = torch.tensor([0.0, math.nan, math.inf, 3.0])
    b = torch.tensor([-0.0, math.nan, math.inf, 3.0])
    assert (exact_distance(a, b).unequal, exact_distance(a, b).relative) == (0, 0.0)
    b[3] = math.nan
    assert (exact_distance(a, b).relative, exact_distance(a, b).at) == (math.inf, (3,))
    assert exact_distance(torch.zeros(2), torch.ones(2)).relative == math.inf
    assert exact_distance(torch.zeros(0, 2), torch.zeros(0, 2)).relative == 0.0
    with pytest.raises(ValueError, match="differ"):
        exact_distance(torch.zeros(2), torch.zeros(3))


def test_rows_are_found_by_their_bytes_and_equal_ones_keep_their_order() -> None:
    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6]])
    found = row_matches(rows, rows[[3, 0, 1, 2]])
    assert found is not None
    assert found.tolist() == [3, 0, 1, 2]
    assert row_matches(rows, rows[[3, 3, 1, 2]]) is None
    assert row_matches(rows, rows[:3]) is None
