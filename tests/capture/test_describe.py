"""What is said of every kind of tensor, and which of them may be digested."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rankscope.capture.describe import Described, Describer, placement_of
from rankscope.capture.digest import Digester
from rankscope.capture.torch_internals.distributed import shard_order
from rankscope.layout.placement import LayoutSource, PlacementKind


def describe(tensor: torch.Tensor) -> Described:
    return Describer(0).describe(tensor)[0]


def test_a_plain_tensor_has_an_unknown_layout_and_may_be_digested() -> None:
    described, local = Describer(0).describe(
        x := torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    )
    assert local is x
    meta = described.meta
    assert (meta.dtype, meta.device, meta.shape, meta.note) == ("bfloat16", "cpu", (2, 3), None)
    assert (meta.global_shape, meta.ranges, meta.layout.source) == (
        None,
        None,
        LayoutSource.UNKNOWN,
    )
    assert described.can_digest
    assert described.requires_grad
    assert described.allows_samples


def test_values_of_one_kind_share_one_description() -> None:
    describer = Describer(0)
    assert describer.describe(torch.zeros(3))[0] is describer.describe(torch.ones(3))[0]
    assert describer.describe(torch.zeros(3))[0] is not describer.describe(torch.zeros(4))[0]
    assert (
        describer.describe(torch.zeros(3))[0]
        is not describer.describe(torch.zeros(3, requires_grad=True))[0]
    )
    assert describer.describe_other("a") is describer.describe_other("a")


def strange() -> list[tuple[torch.Tensor, str]]:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    return [
        (torch.ones(3, 3).to_sparse(), "layout sparse_coo"),
        (torch.ones(3, 3).to_sparse_csr(), "layout sparse_csr"),
        (torch.ones(3, device="meta"), "on the meta device"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ""),
        (jagged, "NestedTensor"),
        (fake, "FakeTensor"),
        (freed, "its memory is freed"),
        (torch.nn.parameter.UninitializedParameter(), ""),
        (torch.ones(4).to_mkldnn(), "layout _mkldnn"),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_digested_is_described_with_the_reason() -> None:
    for tensor, reason in strange():
        described = describe(tensor)
        assert not described.can_digest, reason
        assert described.meta.note is not None
        assert reason in described.meta.note


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_described_and_not_digested() -> None:
    described = describe(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    assert not described.can_digest
    assert described.meta.note == "quantized"


def test_tensors_inside_a_functorch_transform_are_not_read() -> None:
    seen: list[Described] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(describe(x))
        return (x * x).sum()

    torch.func.vmap(torch.func.grad(function))(torch.randn(3, 2))
    torch.func.functionalize(function)(torch.randn(2))
    assert len(seen) == 2
    assert not any(described.can_digest for described in seen)


def test_subclasses_with_plain_memory_are_digested_as_tensors() -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.ones(4).as_subclass(Marked)
    described, local = Describer(0).describe(x)
    assert described.can_digest
    assert Digester().read(local, None, samples=False).mean == 1.0


def test_python_values_are_described_by_a_bounded_note() -> None:
    meta = Describer(0).describe_other({"a": 1}).meta
    assert (meta.dtype, meta.note) == ("python", "dict of 1")


def test_negative_dims_are_counted_from_the_front_and_unknown_placements_keep_their_words() -> None:
    from torch.distributed.tensor import Shard

    class Odd(Shard):
        pass

    assert placement_of(Shard(-1), 3).dim == 2
    odd = placement_of(Odd(0), 3)
    assert odd.kind is PlacementKind.OTHER
    assert not odd.is_composable
    assert "Odd(dim=0)" in str(odd)


def test_an_order_of_shards_other_than_the_meshs_is_noticed() -> None:
    class Entry:
        def __init__(self, *axes: int) -> None:
            self.mesh_dims = axes

    class Spec:
        shard_order = (Entry(1, 0),)

    assert shard_order(Spec()) == (1, 0)
    Spec.shard_order = (Entry(0, 1),)
    assert shard_order(Spec()) is None


def test_a_description_keeps_no_tensor_alive() -> None:
    describer, x = Describer(0), torch.ones(5)
    described, _ = describer.describe(x)
    alive = weakref.ref(x)
    del x, _
    gc.collect()
    assert alive() is None
    assert described.meta.shape == (5,)
