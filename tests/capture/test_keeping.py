"""The bytes of tensors, as they were at the call, read without being seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import _TYPES as SAFETENSORS_TYPES
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.capture.describe import Describer
from rankscope.capture.dtypestorage import storage_of
from rankscope.capture.keeping import (
    DeviceStaging,
    byte_pieces,
    own_bytes,
    why_not_stored,
)
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.value import STORED_TYPES

STORED = [getattr(torch, name) for name in STORED_TYPES if hasattr(torch, name)]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits (bools are 0 or 1)."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def kept(tensor: torch.Tensor) -> bytes:
    """What would be stored of it."""
    with invisible():
        whole = own_bytes(tensor)
        return b"".join(p.tobytes() for p in (byte_pieces(tensor) if whole is None else (whole,)))


def expected(tensor: torch.Tensor) -> bytes:
    """The same by torch's own operations."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


SHAPES = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:, ::2, 3:],
    "one column": lambda t: t[:, :, 1],
    "expanded": lambda t: t[:1, :, :1].expand(5, t.shape[1], 7),
    "scalar": lambda t: t[1, 1, 1],
    "empty": lambda t: t[:0],
    "empty strided": lambda t: t[:, 2:2].transpose(0, 1),
    "unaligned": lambda t: t.reshape(-1)[1:],
    "channels last": lambda t: t[None].to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_bytes_are_those_torch_would_give(dtype, shape):
    tensor = SHAPES[shape](some(dtype, 6, 8, 10))
    assert kept(tensor) == expected(tensor)


def test_every_dtype_of_safetensors_for_torch_is_known_under_its_name():
    """A newer safetensors may know more: then they belong in the table."""
    ours = {STORED_TYPES[n].name: getattr(torch, n, None) for n in STORED_TYPES}
    assert {name: ours.get(name) for name in SAFETENSORS_TYPES} == dict(SAFETENSORS_TYPES)
    for dtype in STORED:
        stored = STORED_TYPES[str(dtype).removeprefix("torch.")]
        assert storage_of(dtype) is not None and stored.item_bytes == dtype.itemsize


def test_reading_runs_no_torch_operation():
    class Nobody(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    tensors = [make(some(torch.bfloat16, 6, 8, 10)) for make in SHAPES.values()]
    tensors.append(torch.randn(4, 4, dtype=torch.complex64).T.conj())
    with Nobody():
        assert all(isinstance(kept(tensor), bytes) for tensor in tensors)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3, 3).to_sparse(), "sparse"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "sparse_csr"),
        (quantized, "quantized"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ""),
        (lambda: torch.ones(3, dtype=torch.complex128), "safetensors knows no complex128"),
        (lambda: torch.ones(3).to(torch.complex32), "safetensors knows no complex32"),
        (lambda: torch.ones((1,) * 65), "64 dims"),
    ],
    ids=["coo", "csr", "quantized", "meta", "nested", "complex128", "complex32", "dims"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_stored_has_a_reason(make, reason):
    with invisible():
        described, _ = Describer(0).describe(make())
    can_read = described.can_digest or described.can_digest_on_device
    said = why_not_stored(described.meta, can_read=can_read)
    assert said is not None and reason in said


def test_a_tensor_whose_memory_was_freed_has_a_reason():
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with invisible():
        described, _ = Describer(0).describe(tensor)
    assert why_not_stored(described.meta, can_read=described.can_digest) == "its memory is freed"


# ------------------------------------------------------------------ staging

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_staged_bytes_are_those_of_the_call_whatever_comes_after(dtype):
    staging = DeviceStaging(CPU, 1 << 20)
    tensors = [make(some(dtype, 6, 8, 10)) for make in SHAPES.values()]
    wanted = [expected(tensor) for tensor in tensors]
    tickets = [staging.stage(tensor) for tensor in tensors]
    for tensor in tensors:
        raw = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(raw).fill_(1)
    tensors.clear()
    arrived = {ticket: data.tobytes() for ticket, data in staging.arrived()}
    assert arrived == dict(zip(tickets, wanted, strict=True))
    staging.close()
    assert staging.held_bytes == 0


@pytest.mark.gpu
def test_on_an_accelerator_the_value_at_the_call_arrives_without_a_synchronize():
    device = torch.device("cuda", torch.cuda.current_device())
    staging = DeviceStaging(device, 64 << 20)
    tensors = [torch.randn(1 << 18, device=device) for _ in range(8)]
    wanted = [expected(tensor.cpu()) for tensor in tensors]
    staging.stage(torch.ones(1, device=device))  # pins the ring
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets = [staging.stage(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrived = {ticket: data.tobytes() for ticket, data in staging.arrived(wait=True)}
    assert [arrived[ticket] for ticket in tickets] == wanted
