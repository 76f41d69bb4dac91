"""The digest of one tensor against plain float64 arithmetic, for every dtype, shape and layout."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref

import numpy as np
import pytest
import torch
import xxhash

from rankscope.capture.digest import Digester
from rankscope.capture.measuring import ValueNumbers
from rankscope.layout.placement import Ranges
from rankscope.record.sketchfactors import factors

pytestmark = pytest.mark.usefixtures("way")

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
EIGHT_BITS = [
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
SHAPES = [
    (), (1,), (2,), (7,), (513,), (4097,), (70_001,), (2, 128, 96), (3, 9001),
    (5000, 3), (40_000, 1), (9000, 2, 2),
    (1, 3000), (2, 4, 64, 32), (254, 100), (2, 3, 4, 5, 6, 7, 8), (65, 1, 300), (8200, 64),
]  # fmt: skip


def doubles(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x.to(torch.complex128))
        return x.reshape(1, 2) if x.dim() == 1 else x
    return x.to(torch.float64)


def sketch_of(x: torch.Tensor, ranges: tuple[Ranges, ...] | None = None) -> np.ndarray:
    """Return the sketch by its definition, in float64."""
    y = torch.nan_to_num(doubles(x), 0.0, 0.0, 0.0)
    y = y.reshape(1) if y.dim() == 0 else y
    held = list(ranges or [((0, n),) for n in x.shape]) or [((0, 1),)]
    if x.is_complex():
        held.append(((0, 2),))
    sums = np.broadcast_to(y.numpy(), (8, *y.shape))
    for dim in range(y.dim() - 1, -1, -1):
        weights = factors(dim, held[dim]).astype(np.float64)
        sums = np.einsum("k...i,ki->k...", sums, weights)
    return sums


def check(reading: ValueNumbers, x: torch.Tensor, ranges: tuple[Ranges, ...] | None = None) -> None:
    y = doubles(x).reshape(-1)
    finite = y[torch.isfinite(y)]
    assert reading.count == y.numel()
    assert (reading.nan, reading.posinf, reading.neginf, reading.zero) == (
        int(y.isnan().sum()), int((y == math.inf).sum()), int((y == -math.inf).sum()),
        int((y == 0).sum()),
    )  # fmt: skip
    if finite.numel() == 0:
        assert math.isnan(reading.min)
        assert math.isnan(reading.max)
        assert math.isnan(reading.mean)
        assert reading.l2 == 0.0
        assert not any(reading.sketch)
    else:
        assert (reading.min, reading.max) == (finite.min().item(), finite.max().item())
        assert reading.mean == pytest.approx(
            finite.mean().item(), abs=1e-6 * finite.abs().mean().item() + 1e-300
        )
        assert reading.l2 == pytest.approx(finite.norm().item(), rel=1e-6)
        error = np.abs(np.array(reading.sketch) - sketch_of(x, ranges)).max()
        assert error <= 3e-6 * finite.norm().item() + 1e-300
    if finite.numel() > 1:
        assert reading.std == pytest.approx(
            finite.std().item(), rel=1e-6, abs=1e-9 * finite.abs().max().item()
        )
    else:
        assert math.isnan(reading.std)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_numbers_of_float64_arithmetic(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(shape) * 3 + 1).to(dtype)
        check(Digester().read(x, None, samples=False), x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128, torch.complex32])
@pytest.mark.parametrize("size", [50, 20_000])
def test_floats_of_any_kind_are_exact_with_and_without_nonfinite_elements(
    dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    check(Digester().read(x, None, samples=False), x)
    x[3], x[5], x[6], x[7], x[8] = math.nan, math.inf, -math.inf, 0.0, -0.0
    check(Digester().read(x, None, samples=False), x)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_eight_bit_float_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    for repeats in (1, 64):
        x = torch.arange(256, dtype=torch.uint8).repeat(repeats).view(dtype)
        check(Digester().read(x, None, samples=False), x)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_integers_and_bools_are_digested_as_their_values(dtype: torch.dtype) -> None:
    for size in (40, 20_000):
        x = torch.randint(0, 2 if dtype == torch.bool else 120, (size,)).to(dtype)
        check(Digester().read(x, None, samples=False), x)


@pytest.mark.parametrize("size", [100, 20_000])
def test_values_that_overflow_or_underflow_when_squared_keep_their_numbers(size: int) -> None:
    """A power of two scales a float exactly, so every number of the digest has to scale with it."""
    for exponent, dtype in (
        (100, torch.float32),
        (-100, torch.float32),
        (1000, torch.float64),
        (-900, torch.float64),
    ):
        x = torch.randn(size, dtype=dtype)
        base = Digester().read(x, None, samples=False)
        scaled = Digester().read(x * 2.0**exponent, None, samples=False)
        for name in ("min", "max", "mean", "std", "l2"):
            expected = math.ldexp(getattr(base, name), exponent)
            assert getattr(scaled, name) == pytest.approx(expected, rel=1e-5, abs=0)
        expected_sketch = np.ldexp(base.sketch, exponent)
        assert np.allclose(scaled.sketch, expected_sketch, rtol=0, atol=1e-6 * scaled.l2)


def test_a_small_spread_around_a_large_mean_keeps_its_std() -> None:
    for size in (100, 20_000):
        x = 1000 + torch.randn(size)
        check(Digester().read(x, None, samples=False), x)
    reading = Digester().read(torch.full((30_000,), 0.1), None, samples=False)
    assert reading.std == 0.0
    assert reading.mean == pytest.approx(0.1, rel=1e-7)


def test_empty_tensors_have_counts_of_zero_and_an_empty_sketch() -> None:
    for shape in ((0,), (0, 4), (3, 0, 2)):
        reading = Digester().read(torch.empty(shape), None, samples=True)
        assert reading.count == 0
        assert math.isnan(reading.min)
        assert reading.l2 == 0
        assert not any(reading.sketch)


def test_strided_expanded_transposed_and_negated_tensors_read_as_their_values() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 70)
    z = torch.randn(50, dtype=torch.complex64)
    views = [x.t(), x[::2, 1::3], x[5], x[:, 5], torch.randn(7, 1).expand(7, 3000),
             x.as_strided((4, 5), (0, 3)),
             z.conj(), z.conj().imag,
             torch.randn(800, 700).t(), torch.randn(3, 200, 500).permute(2, 0, 1)]  # fmt: skip
    for view in views:
        reading = Digester().read(view, None, samples=False)
        check(reading, view)
        copy = view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert reading.hash == Digester().read(copy, None, samples=False).hash


def test_a_tensor_larger_than_a_block_and_not_contiguous_is_read_blockwise() -> None:
    x = torch.randn(3, 1300, 500).permute(2, 1, 0)
    reading = Digester().read(x, None, samples=False)
    check(reading, x)
    assert reading.hash == Digester().read(x.contiguous(), None, samples=False).hash


def test_the_hash_is_xxh3_of_the_bytes_and_depends_on_order() -> None:
    x = torch.randn(1000)
    assert Digester().read(x, None, samples=False).hash == xxhash.xxh3_64_intdigest(
        x.numpy().tobytes()
    )
    assert (
        Digester().read(x.flip(0), None, samples=False).hash
        != Digester().read(x, None, samples=False).hash
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [64, 20_000])
def test_signed_zeros_and_nan_payloads_do_not_change_the_hash(
    dtype: torch.dtype, size: int
) -> None:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    plus = torch.ones(size).to(dtype)
    minus = plus.clone()
    bits = 8 * dtype.itemsize
    sign = -(1 << (bits - 1)) if bits > 8 else 0x80
    plus.view(words)[3] = 0
    minus.view(words)[3] = sign
    assert (
        Digester().read(plus, None, samples=False).hash
        == Digester().read(minus, None, samples=False).hash
    )
    plus[9] = math.nan
    minus[9] = math.nan
    minus.view(words)[9] += -1 if dtype == torch.float8_e5m2 else (1 if bits > 8 else 0)
    assert minus.isnan().any() if bits > 8 else True
    assert (
        Digester().read(plus, None, samples=False).hash
        == Digester().read(minus, None, samples=False).hash
    )


def test_ranges_place_a_piece_in_the_whole() -> None:
    whole = torch.randn(12, 3000)
    held = (((2, 4), (8, 11)), ((0, 700), (1100, 2900)))
    index = [torch.cat([torch.arange(*r) for r in dim]) for dim in held]
    piece = whole[index[0]][:, index[1]].contiguous()
    check(Digester().read(piece, held, samples=False), piece, held)


def test_pieces_of_long_dims_beginning_anywhere_add_up() -> None:
    whole = torch.randn(100_000)
    cuts = [0, 1, 700, 33_333, 51_200, 99_999, 100_000]
    pieces = [
        Digester().read(whole[a:b], (((a, b),),), samples=False).sketch
        for a, b in itertools.pairwise(cuts)
    ]
    assert np.allclose(np.sum(pieces, axis=0), sketch_of(whole), atol=1e-5 * whole.norm().item())


@pytest.mark.parametrize(("shape", "batch_dim"), [
    ((4, 50, 64), 0), ((5, 4, 300), 1), ((6, 4), 1), ((4,), 0), ((4, 9, 5), -1),
    ((1, 3, 4, 900), 1), ((1, 5000), 0), ((3, 1, 4000), 0), ((4, 300_000), 0),
    ((3, 250, 7, 200), 0), ((20_000, 3), 1),
])  # fmt: skip
def test_per_sample_rows_recombine_in_any_order(shape: tuple[int, ...], batch_dim: int) -> None:
    x = torch.randn(shape)
    reading = Digester(batch_dim=batch_dim).read(x, None, samples=True)
    dim = batch_dim % x.dim()
    assert reading.samples is not None
    assert reading.samples.shape == (x.shape[dim], 8)
    weights = factors(dim, ((0, x.shape[dim]),)).T
    assert np.allclose(
        (reading.samples * weights).sum(0), reading.sketch, atol=1e-5 * x.norm().item()
    )
    check(reading, x)
    order = torch.randperm(x.shape[dim])
    shuffled = x.index_select(dim, order).contiguous()
    rows = Digester(batch_dim=batch_dim).read(shuffled, None, samples=True).samples
    assert rows is not None
    again = (rows.astype(np.float64) * weights[order.numpy()]).sum(0)
    assert np.allclose(again, reading.sketch, atol=1e-5 * x.norm().item())


def test_samples_are_kept_for_at_most_64() -> None:
    assert Digester().read(torch.randn(64, 3), None, samples=True).samples is not None
    assert Digester().read(torch.randn(65, 3), None, samples=True).samples is None
    assert Digester().read(torch.randn(4, 3), None, samples=False).samples is None
    assert Digester().read(torch.tensor(1.0), None, samples=True).samples is None
    assert Digester(batch_dim=1).read(torch.randn(4), None, samples=True).samples is None


def test_the_same_memory_is_reused_until_its_bytes_change() -> None:
    digester, x = Digester(), torch.randn(5000)
    first = digester.read(x, None, samples=False)
    assert not first.reused
    assert digester.read(x.view(-1), None, samples=False) == first._replace(reused=True)
    x.numpy()[17] = 5.0  # leaves `_version` alone
    changed = digester.read(x, None, samples=False)
    assert (
        not changed.reused and changed.hash != first.hash and changed.max != first.max
    ) or changed.mean != first.mean
    x.add_(1)
    assert not digester.read(x, None, samples=False).reused


def test_nothing_is_reused_across_steps_addresses_and_shapes() -> None:
    digester, x = Digester(), torch.randn(5000)
    digester.read(x, None, samples=False)
    assert not digester.read(x.clone(), None, samples=False).reused
    assert not digester.read(x.view(50, 100), None, samples=False).reused
    assert not digester.read(x, None, samples=True).reused
    digester.end_step()
    assert not digester.read(x, None, samples=False).reused


def test_the_memory_keeps_no_tensor_alive() -> None:
    digester, x = Digester(), torch.randn(5000)
    digester.read(x, None, samples=False)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_inference_tensors_are_read_and_reused() -> None:
    with torch.inference_mode():
        x = torch.randn(300)
        digester = Digester()
        check(digester.read(x, None, samples=False), x)
        assert digester.read(x, None, samples=False).reused


def test_swapped_rows_sign_flips_and_scales_show_in_the_sketch() -> None:
    x = torch.randn(512, 64)
    base = np.array(Digester().read(x, None, samples=False).sketch)
    for i, j in ((0, 1), (3, 400), (510, 511)):
        y = x.clone()
        y[[i, j]] = x[[j, i]]
        assert (
            np.linalg.norm(np.array(Digester().read(y, None, samples=False).sketch) - base)
            > 1e-2 * (x[i] - x[j]).norm()
        )
    double = np.array(Digester().read(2 * x, None, samples=False).sketch)
    assert double @ base / (base @ base) == pytest.approx(2.0, rel=1e-6)


def test_the_sketch_estimates_the_distance_of_two_tensors() -> None:
    torch.manual_seed(1)
    ratios = []
    for shape in ((300, 200), (100_000,), (64, 64, 16)):
        for _ in range(20):
            a, noise = torch.randn(shape), 1e-2 * torch.randn(shape)
            apart = np.subtract(
                Digester().read(a + noise, None, samples=False).sketch,
                Digester().read(a, None, samples=False).sketch,
            )
            ratios.append(np.linalg.norm(apart) / 8**0.5 / noise.norm().item())
    assert 0.8 < np.sqrt(np.mean(np.square(ratios))) < 1.2
    assert min(ratios) > 0.2
    assert max(ratios) < 3


def test_a_dtype_without_a_digest_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="qint8"):
        Digester().read(
            torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), None, samples=False
        )


def test_one_digester_serves_several_threads_at_once() -> None:
    torch.manual_seed(2)
    values = [torch.randn(shape) for shape in ((3,), (40, 50), (5, 513), (200, 300)) * 3]
    alone = [Digester().read(value, None, samples=True) for value in values]
    digester, wrong = Digester(), list[int]()

    def read(first: int) -> None:
        for number in [*range(first, len(values)), *range(first)] * 5:
            found, wanted = digester.read(values[number], None, samples=True), alone[number]
            is_same = found.hash == wanted.hash and found.sketch == wanted.sketch
            if not is_same or not np.array_equal(found.samples, wanted.samples):  # type: ignore[arg-type]  # all have samples
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(3 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
