"""Ordinary and odd tensors in every place of a module: described right, read right, unharmed."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.tree.views import Trace, Value
from tests.unharmed import traced_unharmed

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
            torch.uint32, torch.uint64)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
                 "float8_e8m0fnu")
    if hasattr(torch, name)
)  # fmt: skip
SPECIAL = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-42, 3e38]


def mapped(folder: Path) -> torch.Tensor:
    path = folder / "mapped"
    path.write_bytes(np.arange(24, dtype=np.float32).tobytes())
    return torch.from_file(str(path), size=24, dtype=torch.float32).reshape(4, 6)


def aliases_anonymous_memory() -> torch.Tensor:
    memory = mmap.mmap(-1, 4096)
    memory.write(np.arange(8, dtype=np.float64).tobytes())
    return torch.frombuffer(memory, dtype=torch.float64, count=8)


def readable(folder: Path) -> dict[str, torch.Tensor]:
    """Return tensors that have a digest, by name."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    found = {f"{dtype}".removeprefix("torch."): normal(6, 5, dtype=dtype) for dtype in FLOATS}
    for dtype in EIGHT_BITS:
        found[f"{dtype}".removeprefix("torch.")] = (
            torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
        )
    for dtype in INTEGERS:
        ends = torch.iinfo(dtype)
        found[f"{dtype}".removeprefix("torch.")] = (
            torch.tensor([ends.min, 0, 1, ends.max]).to(dtype)
            if dtype is not torch.uint64
            else torch.tensor([0, 0, 1, 2**64 - 1], dtype=dtype)
        )
    wide = normal(8, 12)
    return found | {
        "bool": torch.tensor([[True, False], [True, True]]),
        "complex64": torch.complex(normal(3, 4), normal(3, 4)),
        "complex128": torch.complex(normal(3, 4).double(), normal(3, 4).double()),
        "complex32": torch.complex(normal(3, 4).half(), normal(3, 4).half()),
        "conjugated": torch.complex(normal(3, 4), normal(3, 4)).conj(),
        "negated": torch.complex(normal(3, 4), normal(3, 4)).conj().imag,
        "both": torch.complex(normal(3, 4), normal(3, 4)).conj().mT.imag.mT,
        "empty": torch.empty(0, 4),
        "empty inside": torch.empty(3, 0, 2),
        "scalar": torch.tensor(2.5),
        "special": torch.tensor(SPECIAL),
        "special bfloat16": torch.tensor(SPECIAL, dtype=torch.bfloat16),
        "nothing finite": torch.tensor([math.nan, math.inf]),
        "denormal": torch.tensor([1e-42, -3e-45, 0.0]),
        "huge numbers": torch.tensor([1e300, -1e300, 1e-300, 3e299], dtype=torch.float64),
        "transposed": wide.t(),
        "every other": wide[::2, 1::3],
        "expanded": normal(3, 1, 2).expand(3, 4, 2),
        "one everywhere": torch.tensor(1.5).expand(5, 7),
        "overlapping": torch.arange(16.0).as_strided((5, 6), (2, 1), 1),
        "windows": torch.arange(20.0).unfold(0, 6, 2),
        "strides of one": torch.arange(6.0).reshape(1, 6).as_strided((1, 6), (77, 1)),
        "many dims": normal(*[1] * 62, 2, 3),
        "shared": normal(5, 3).share_memory_(),
        "mapped": mapped(folder),
        "anonymous": aliases_anonymous_memory(),
        "numpy": torch.from_numpy(np.asfortranarray(np.arange(12.0).reshape(3, 4))),
        "channels last": normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


class Wrapped(torch.Tensor):
    """A subclass that holds another tensor: what looks like its memory means nothing."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on it")


def freed() -> torch.Tensor:
    tensor = torch.ones(1024)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.ones(1024)[512:]
    tensor.untyped_storage().resize_(1024)
    return tensor


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(3), torch.tensor([True, False, True]))  # type: ignore[no-untyped-call]


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3)


UNREADABLE: dict[str, tuple[Callable[[], torch.Tensor], str, tuple[int, ...], str]] = {
    # made by, dtype, shape, and what the note has to say
    "coo": (lambda: torch.eye(3).to_sparse(), "float32", (3, 3), "layout sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "float32", (3, 3), "layout sparse_csr"),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), "float32", (3, 3), "layout sparse_csc"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "float32", (4, 4), "layout sparse_bsr"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "float32", (3, 3), "layout _mkldnn"),
    "meta": (lambda: torch.empty(3, 4, device="meta"), "float32", (3, 4), "meta device"),
    "quantized": (quantized, "qint8", (2, 3), "quantized"),
    "wrapped": (lambda: Wrapped(torch.ones(2)), "float32", (2,), "subclass"),
    "fake": (fake, "float32", (2, 3), "subclass"),
    "masked": (masked, "float32", (3,), "subclass"),
    "freed": (freed, "float32", (1024,), "freed"),
    "shrunk": (shrunk, "float32", (512,), "freed"),
    "endless": (lambda: torch.zeros(1).expand(10**12), "float32", (10**12,), "repeats"),
    "endless rows": (
        lambda: torch.ones(2**10).expand(2**20, 2**10), "float32", (2**20, 2**10), "repeats",
    ),
    "float4": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "float4_e2m1fn_x2", (4,), "not digested",
    ),
}  # fmt: skip


class Passes(nn.Module):
    """Hands on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        return dict(values)


def doubles(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements torch sees, as float64; a complex one as two."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.complex32:
        plain = plain.to(torch.complex64)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype is torch.uint64:
        return torch.tensor([float(x) for x in plain.flatten().tolist()], dtype=torch.float64)
    return plain.to(torch.float32 if plain.dtype.itemsize == 1 else plain.dtype).double().flatten()


def check(value: Value, tensor: torch.Tensor) -> None:
    """Hold a digest to torch's own float64 numbers."""
    digest = value.per_rank[0]
    assert digest is not None
    x = doubles(tensor)
    finite = x[x.isfinite()]
    assert digest.count == x.numel()
    counts = (digest.nan, digest.posinf, digest.neginf, digest.zero)
    assert counts == tuple(int(n.sum()) for n in (x.isnan(), x == math.inf, x == -math.inf, x == 0))
    if not finite.numel():
        assert digest.l2 == 0.0
        return
    assert (digest.min, digest.max) == (finite.min().item(), finite.max().item())
    scale = finite.abs().max().item() or 1.0
    about = {"rel": 1e-6, "abs": 1e-6 * scale}
    assert digest.mean == pytest.approx((finite / scale).mean().item() * scale, **about)
    assert digest.l2 == pytest.approx((finite / scale).norm().item() * scale, rel=1e-6)
    if finite.numel() > 1:
        assert digest.std == pytest.approx((finite / scale).std().item() * scale, **about)


def passed(values: dict[str, Any], folder: Path) -> Trace:
    """Trace a module that is handed the values and hands them on."""

    def program() -> Any:
        with torch.no_grad():
            out = Passes()(values)
        return [type(value).__name__ for value in out.values()]

    return traced_unharmed(program, folder, steps="all")


def slots(found: Trace, slot: str) -> list[Any]:
    (node,) = found.find("", phase="forward")
    return [view for view in node.slots if view.slot == slot]


def errors(found: Trace) -> list[Any]:
    of_ranks = [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    return of_ranks + [node.errors for node in found.walk() if node.errors]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_readable_tensor_has_the_numbers_of_torch(tmp_path: Path) -> None:
    values = readable(tmp_path)
    before = {name: value.detach().clone() for name, value in values.items()}
    found = passed(values, tmp_path / "trace")
    assert not errors(found)
    for name, tensor in values.items():
        for slot in (f"input.0.{name}", f"output.{name}"):
            value = found.value("", slot)
            assert value.dtype == str(tensor.dtype).removeprefix("torch."), name
            check(value, tensor)
        assert torch.equal(doubles(tensor).nan_to_num(7), doubles(before[name]).nan_to_num(7))


def test_unreadable_tensors_are_described_with_the_reason(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {name: make() for name, (make, *_) in UNREADABLE.items()}
    found = passed(values, tmp_path / "trace")
    assert not errors(found)
    for name, (_, dtype, shape, note) in UNREADABLE.items():
        for kind in ("input.0", "output"):
            (view,) = slots(found, f"{kind}.{name}")
            (fold,) = view.folds
            assert view.dtype == dtype, name
            assert fold.shape == shape, name
            assert fold.note is not None and note in fold.note, (name, fold.note)
            assert "structure_only" in fold.flags


class Ragged(nn.Module):
    """Owns a bit of everything."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for number, value in enumerate(values.values()):
            self.register_buffer(f"b{number}", value)
            if value.is_floating_point() or value.is_complex():
                self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=False))
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse CSR")
def test_parameters_and_buffers_of_every_kind_are_recorded_before_and_after_a_step(
    tmp_path: Path,
) -> None:
    values = readable(tmp_path)
    values |= {name: UNREADABLE[name][0]() for name in ("coo", "csr", "meta", "endless")}

    def program() -> Any:
        model = Ragged(values)
        optimizer = torch.optim.SGD([model.one], lr=0.1)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return model.one

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    for number, (name, tensor) in enumerate(values.items()):
        kinds = ["buffer:b"]
        if tensor.is_floating_point() or tensor.is_complex():
            kinds.append("param:p")
        for kind in kinds:
            for phase in ("setup", "params"):
                value = found.value("", f"{kind}{number}", phase=phase)
                if name in UNREADABLE:
                    assert value.per_rank[0] is None, name
                else:
                    check(value, tensor)
