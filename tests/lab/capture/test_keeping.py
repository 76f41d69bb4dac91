"""The bytes of tensors, through bounded buffers and the ring of an accelerator."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.capture.keeping import (
    PIECE_BYTES,
    DeviceStaging,
    byte_pieces,
)
from rankscope.capture.torch_internals.tensors import invisible
from tests.capture.test_keeping import CPU, expected, kept


def test_conjugate_and_negative_bits_are_resolved_whatever_the_strides():
    base = torch.randn(9, 7, dtype=torch.complex64)
    for tensor in (
        base.conj(), base.T.conj(), base.conj()[::2], base.conj().imag, base.T.conj().imag[1:],
        base.conj().T.imag,
    ):  # fmt: skip
        assert tensor.is_conj() or tensor.is_neg()
        assert kept(tensor) == expected(tensor)


def test_a_large_tensor_out_of_order_is_read_through_a_bounded_buffer():
    tensors = [
        torch.ones(4096, 8192).T,
        torch.ones(1).expand(1 << 24),
        torch.ones(16, 1 << 20)[:, ::2],
        torch.ones(2, 2, 1 << 22).permute(2, 0, 1),
        torch.ones(1 << 22, dtype=torch.complex64).conj(),
    ]
    for tensor in tensors:
        assert tensor.numel() * tensor.element_size() >= 3 * PIECE_BYTES
        tracemalloc.start()
        total = 0
        with invisible():
            for piece in byte_pieces(tensor):
                assert piece.nbytes <= PIECE_BYTES
                total += piece.nbytes
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == tensor.numel() * tensor.element_size()
        assert peak < 3 * PIECE_BYTES


def test_staging_resolves_conjugates_and_runs_unseen():
    class Nobody(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    staging = DeviceStaging(CPU, 1 << 20)
    tensor = torch.randn(5, 4, dtype=torch.complex64, requires_grad=True).T.conj()
    with Nobody():
        ticket = staging.stage(tensor)
        arrived = dict(staging.arrived())
    assert ticket is not None and arrived[ticket].tobytes() == expected(tensor)


def test_what_does_not_fit_beside_what_is_on_its_way_is_not_staged():
    staging = DeviceStaging(CPU, 1000)
    assert staging.stage(torch.ones(300)) is None  # never
    first = staging.stage(torch.ones(100))
    second = staging.stage(torch.ones(100))
    assert None not in (first, second)
    assert staging.stage(torch.ones(100)) is None
    assert staging.held_bytes <= 1000
    assert [ticket for ticket, _ in staging.arrived()] == [first, second]
    assert staging.stage(torch.ones(100)) is not None


def test_without_memory_for_the_ring_nothing_is_staged_and_nothing_raised():
    staging = DeviceStaging(CPU, 1 << 60)
    assert staging.stage(torch.ones(3)) is None
    assert staging.stage(torch.ones(3)) is None
    assert staging.held_bytes == 0 and list(staging.arrived(wait=True)) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_never_gives_one_place_to_two(seed):
    chosen = random.Random(seed)
    staging = DeviceStaging(CPU, 10_000)
    waiting: dict[int, bytes] = {}
    refused = seen = 0
    for number in range(3000):
        tensor = torch.full((chosen.randrange(4000),), number % 251, dtype=torch.uint8)
        ticket = staging.stage(tensor)
        assert staging.held_bytes <= 10_000
        if ticket is None:
            refused += 1
        else:
            waiting[ticket] = bytes([number % 251]) * tensor.numel()
        if chosen.random() < 0.4:
            for arrived, data in staging.arrived():
                assert data.tobytes() == waiting.pop(arrived)
                seen += 1
                if chosen.random() < 0.5:
                    break  # the rest comes another time
    assert refused > 100 and seen > 1000
    for arrived, data in staging.arrived(wait=True):
        assert data.tobytes() == waiting.pop(arrived)
    assert not waiting
