"""How shapes are folded: bounded products, bounded copies, every element once."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.capture.fold import (
    BLOCK_ELEMENTS,
    BLOCK_ROWS,
    MULTIPLY_ELEMENTS,
    contiguous_runs,
    make_plan,
    multiply_rows,
    sum_width,
)

SHAPES = [
    (8,),
    (2, 128, 512),
    (4096, 3),
    (1 << 20,),
    (3, 100_001),
    (128, 32_000),
    (7, 11, 13, 2),
    (50_000, 2, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_product_is_large_enough_for_openblas_to_start_threads(shape: tuple[int, ...]) -> None:
    for segment in make_plan(shape, None, 0).segments:
        assert segment.multiply_rows * segment.inner <= MULTIPLY_ELEMENTS
        rows = min(segment.rows, BLOCK_ROWS)
        assert multiply_rows(rows, segment.inner) * segment.inner <= MULTIPLY_ELEMENTS
        width = sum_width(rows, segment.inner)
        assert rows * segment.inner % width == 0
        assert width < 10_000


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_dim", [None, 0])
def test_segments_cover_every_element_once(shape: tuple[int, ...], batch_dim: int | None) -> None:
    seen = np.zeros(shape, dtype=np.int8)
    for segment in make_plan(shape, None, batch_dim).segments:
        box = seen[segment.where] if segment.where is not None else seen
        assert box.size == segment.rows * segment.inner
        box += 1
    assert seen.min() == seen.max() == 1


def test_weights_of_a_few_rows_are_a_part_of_all_weights() -> None:
    segment = make_plan((9, 5, 700), None, None).segments[0]
    whole = segment.weights(0, segment.rows)
    assert whole.shape == (45, 8)
    assert np.array_equal(segment.weights(7, 20), whole[7:20])
    many = make_plan((20_000, 300), None, None).segments[0]
    assert np.array_equal(many.weights(15_000, 15_010), many.outer[0].T[15_000:15_010])


def test_runs_of_a_strided_array_are_row_major_and_bounded() -> None:
    whole = np.arange(900 * 1400).reshape(900, 1400)
    for view in (whole, whole.T, whole[::2, 5:], np.broadcast_to(whole[0], (600, 1400))):
        runs = list(contiguous_runs(view))
        assert np.array_equal(np.concatenate(runs), view.reshape(-1))
        assert len(runs) == 1 or max(run.size for run in runs) <= BLOCK_ELEMENTS


def test_plans_of_empty_tensors_have_nothing_to_fold() -> None:
    assert make_plan((0, 3), None, 0).segments == ()
    assert make_plan((), None, None).shape == (1,)
    assert make_plan((4,), None, None, is_complex=True).shape == (4, 2)
