"""The factors of the sketch: what makes shards add up, and swaps and copies visible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rankscope.record.sketchfactors import (
    RADIX,
    block_factors,
    factors,
    product_factors,
)

MANY = ((0, 100_000),)
PINNED = [
    [-1.0, -1.0, 1.0],
    [-1.0, 1.0, 1.0],
    [1.0, -1.0, -1.0],
    [1.0, -1.0, 1.0],
    [0.24642123, 1.1006417, -0.74874973],
    [-0.43782282, -1.1643103, -0.004981797],
    [1.5293505, 0.4485286, 0.85830903],
    [-1.2263693, -0.7315257, 2.0029297],
]


def test_every_factor_has_zero_mean_and_unit_variance() -> None:
    for dim in range(5):
        values = factors(dim, MANY).astype(np.float64)
        assert values.shape == (8, 100_000)
        assert factors(dim, MANY).dtype == np.float32
        assert np.abs(values[:, :RADIX].mean(axis=1)).max() < 4.5 / np.sqrt(RADIX)
        assert np.abs(values.mean(axis=1)).max() < 4.5 / np.sqrt(100_000 / RADIX)
        assert np.allclose((values**2).mean(axis=1), 1.0, atol=0.15)


def test_half_of_the_projections_are_signs_and_half_are_continuous() -> None:
    values = factors(1, ((0, RADIX),))
    assert set(np.unique(values[:4])) == {-1.0, 1.0}
    assert np.abs(values[4:]).max() <= np.float32(3**0.5)
    assert all(len(np.unique(row)) == RADIX for row in values[4:])


def test_no_swap_of_two_rows_below_512_is_invisible() -> None:
    for dim in range(4):
        columns = factors(dim, ((0, 512),)).T
        assert len(np.unique(columns, axis=0)) == 512
        signs = [tuple(c[:4]) for c in columns]
        blind = sum(a == b for a, b in itertools.combinations(signs, 2))
        assert blind > 0, "signs alone are expected to miss swaps: that is why half is continuous"


def test_factors_of_different_dims_and_projections_are_uncorrelated() -> None:
    n = 4096
    rows = np.concatenate([factors(dim, ((0, n),)) for dim in range(6)]).astype(np.float64)
    correlation = rows @ rows.T / n
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 5 / np.sqrt(n) + 0.25 / np.sqrt(n / RADIX)


def test_indices_that_share_a_block_offset_are_uncorrelated() -> None:
    """Indices i and i + 512 have the same low part; the high part has to tell them apart."""
    low, next_block = factors(0, ((0, RADIX),)), factors(0, ((RADIX, 2 * RADIX),))
    ratio = next_block / low
    assert np.allclose(ratio, ratio[:, :1], rtol=1e-5)
    high = block_factors(0, 0, 20_000)[:, 1:].astype(np.float64)
    assert np.abs(high.mean(axis=1)).max() < 0.03
    assert np.allclose((high**2).mean(axis=1), 1.0, atol=0.03)


def test_a_piece_has_the_same_factors_as_its_place_in_the_whole() -> None:
    whole = factors(2, ((0, 3000),))
    pieces = np.concatenate([whole[:, 100:200], whole[:, 700:1800]], axis=1)
    assert np.array_equal(factors(2, ((100, 200), (700, 1800))), pieces)
    assert factors(2, ()).shape == (8, 0)


def test_block_factors_times_low_factors_are_the_factors() -> None:
    low, high = factors(3, ((0, RADIX),)), block_factors(3, 5, 2)
    expected = (high[:, :, None] * low[:, None, :]).reshape(8, -1)
    assert np.allclose(factors(3, ((5 * RADIX, 7 * RADIX),)), expected, rtol=1e-6)
    assert np.array_equal(block_factors(3, 0, 1), np.ones((8, 1)))


def test_products_run_over_dims_in_row_major_order() -> None:
    product = product_factors([(0, ((0, 3),)), (1, ((2, 6),))])
    a, b = factors(0, ((0, 3),)), factors(1, ((2, 6),))
    assert np.allclose(product.reshape(8, 3, 4), a[:, :, None] * b[:, None, :])
    assert np.array_equal(product_factors([]), np.ones((8, 1)))


def test_values_never_change_between_versions() -> None:
    """Traces taken by different versions are compared: the generator is part of the format."""
    sample = factors(1, ((0, 2), (1000, 1001)))
    assert np.allclose(sample, PINNED, rtol=1e-6)


def test_cached_factors_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        factors(0, ((0, 4),))[0, 0] = 5.0


def test_factors_are_kept_but_of_a_dim_too_long_for_that_and_are_the_same() -> None:
    assert factors(0, ((3, 8),)) is factors(0, ((3, 8),))
    vocabulary = factors(0, ((0, 50_000),))
    for length in range(300):  # as beside sequences of any length
        factors(1, ((0, length),))
    assert factors(0, ((0, 50_000),)) is vocabulary
    long = factors(0, ((0, 300_000),))
    assert factors(0, ((0, 300_000),)) is not long and np.array_equal(
        long[:, 3:8], factors(0, ((3, 8),))
    )
