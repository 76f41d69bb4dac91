"""What a tensor is, without its numbers: dtype, shapes, layout, whether it has a digest, and the
marks by which frameworks say how it lies.

Descriptions are cached by what they are made of: the same kind of value is described once and is
then known by its identity. Everything about a DTensor is read off its local tensor and its spec; no
collective is issued, nothing is waited for. A value that a collective may still be writing is
`pending`. Marks are read off plain attributes, without importing a framework or running code of the
program's (`layout/layoutfile.py` says what is made of them).
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final

import torch

from rankscope.capture.dtypestorage import storage_of
from rankscope.capture.pytree import describe_leaf
from rankscope.capture.torch_internals.distributed import (
    async_collective_result,
    dtensor_parts,
    group_ranks,
    is_async_collective,
    is_dtensor,
    mesh_ranks,
    placement_class,
    shard_order,
    sharded_originals,
)
from rankscope.capture.torch_internals.tensors import (
    dispatch_bits,
    invisible_operations,
    is_functorch_wrapper,
    loaded_class,
    overrides_dispatch,
)
from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import FSDP1_AXIS, LayoutMark
from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    Placement,
    PlacementKind,
    Ranges,
    global_ranges,
)
from rankscope.record.value import ValueMeta

_MOST_TEXT: Final = 120
_MOST_CACHED: Final = 1 << 16
_MOST_REPEATED: Final = 1 << 24
_REPETITIONS: Final = 8
"""A view that shows its memory more often than this, and has more elements, is not read."""
_UNKNOWN: Final = Layout(source=LayoutSource.UNKNOWN)


class _TensorKind(enum.Enum):
    PLAIN = enum.auto()
    DTENSOR = enum.auto()
    ASYNC = enum.auto()
    OPAQUE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    """A description, one object for all values that share it: compared and hashed by identity."""

    meta: ValueMeta
    requires_grad: bool = False
    can_digest: bool = False
    """`capture.digest` may read the value; if nothing may, `meta.note` says why."""
    can_digest_on_device: bool = False
    """`capture.device` may read it: it is in accelerator memory."""
    is_pending: bool = False
    """A collective may still be writing it: such a value is never waited for, never read."""
    allows_samples: bool = False
    """False where samples would only repeat those of a peer."""


class _MeshTable:
    """The meshes seen so far. It keeps none alive: a mesh holds process groups."""

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[weakref.ref[Any], int, Mesh]] = {}
        self._numbers: dict[Mesh, int] = {}

    def find(self, device_mesh: Any) -> tuple[int, Mesh]:
        """Return a number that stands for this mesh, and its record; equal meshes share both."""
        entry = self._meshes.get(id(device_mesh))
        # by identity and a weak reference: `==` of meshes compares all their ranks, and every value
        # has one
        if entry is not None and entry[0]() is device_mesh:
            return entry[1], entry[2]
        with invisible_operations():
            ranks = mesh_ranks(device_mesh)
        shape = tuple(int(size) for size in device_mesh.shape)
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(shape)))
        mesh = Mesh(axes=tuple(str(name) for name in names), shape=shape, ranks=ranks)
        number = self._numbers.setdefault(mesh, len(self._numbers) + 1)
        self._meshes[id(device_mesh)] = weakref.ref(device_mesh), number, mesh
        return number, mesh


class Describer:
    """Describes the tensors of one rank. Call it inside `invisible()`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._meshes = _MeshTable()
        self._kinds: dict[type, _TensorKind] = {
            torch.Tensor: _TensorKind.PLAIN,
            torch.nn.Parameter: _TensorKind.PLAIN,
        }
        self._descriptions: dict[object, Described] = {}

    def describe(self, tensor: torch.Tensor) -> tuple[Described, torch.Tensor]:
        """Return the description, and the tensor to digest: a DTensor's local one, else itself.
        Never raises: what cannot be described gets its class name as a note."""
        kind = self._kinds.get(type(tensor)) or self._kind(type(tensor))
        try:
            if kind is _TensorKind.PLAIN:
                # the dispatch keys stand for device, layout and wrapping: cheaper than asking for
                # each
                key = (tensor.dtype, tensor.shape, tensor.requires_grad, dispatch_bits(tensor))
                described = self._descriptions.get(key)
                if described is None:
                    described = self._plain(tensor, key)
                if described.can_digest or described.can_digest_on_device:
                    # asked each time, cached or not: FSDP frees the memory under a tensor that is
                    # still the same
                    problem = _problem_of_memory(tensor)
                    if problem is not None:
                        described = self._unread(tensor, key, problem)
                return described, tensor
            if kind is _TensorKind.DTENSOR:
                inner, memory = self.describe(dtensor_parts(tensor)[0])
                return self._around(tensor, inner), memory
        except RuntimeError:
            # nested, lazy and functorch tensors refuse to tell their shape or memory
            return self._structure(tensor, describe_leaf(tensor)), tensor
        if kind is _TensorKind.ASYNC:
            result, is_done = async_collective_result(tensor)
            if is_done:
                return self.describe(result)
            note = "a collective may still be writing it"
            return self._structure(tensor, note, is_pending=True), tensor
        return self._structure(tensor, f"tensor subclass {describe_leaf(tensor)}"), tensor

    def describe_result(self, tensor: torch.Tensor) -> tuple[Described, torch.Tensor] | None:
        """Describe what a pending value will be, as `describe` does, without looking at its memory.
        It may be digested once no collective is outstanding; None where it cannot be told."""
        is_distributed = self._kinds.get(type(tensor)) is _TensorKind.DTENSOR
        waiting = dtensor_parts(tensor)[0] if is_distributed else tensor
        result, _ = async_collective_result(waiting)
        if result is waiting:
            return None
        inner, memory = self.describe(result)
        return self._around(tensor, inner) if is_distributed else inner, memory

    def describe_other(self, value: object) -> Described:
        """Return the description of a value that is no tensor: its bounded repr as a note."""
        return self.describe_text(describe_leaf(value))

    def describe_text(self, note: str) -> Described:
        """Return the description of a value that is no tensor, in these words."""
        key = ("python", note)
        return self._descriptions.get(key) or self._keep(
            key, Described(meta=_meta("python", "", (), note))
        )

    def _kind(self, kind: type) -> _TensorKind:
        tensor_kind = _TensorKind.PLAIN
        if is_dtensor(kind):
            tensor_kind = _TensorKind.DTENSOR
        elif is_async_collective(kind):
            tensor_kind = _TensorKind.ASYNC
        elif overrides_dispatch(kind):
            tensor_kind = _TensorKind.OPAQUE
        self._kinds[kind] = tensor_kind
        return tensor_kind

    def _keep(self, key: object, described: Described) -> Described:
        if len(self._descriptions) >= _MOST_CACHED:
            self._descriptions.clear()
        self._descriptions[key] = described
        return described

    def _plain(self, tensor: torch.Tensor, key: object) -> Described:
        device, reason = str(tensor.device), _why_not(tensor)
        full_key = (key, device, reason)
        described = self._descriptions.get(full_key)
        if described is not None:
            return described
        is_on_host = tensor.device.type == "cpu"
        described = Described(
            meta=_meta(dtype_name(tensor.dtype), device, tuple(tensor.shape), reason),
            requires_grad=tensor.requires_grad,
            can_digest=reason is None and is_on_host,
            can_digest_on_device=reason is None and not is_on_host,
            allows_samples=reason is None and tensor.dim() > 0,
        )
        # accelerators of one kind differ by index, compressed sparse layouts in nothing that the
        # short key holds
        return self._keep(key if described.can_digest else full_key, described)

    def _unread(self, tensor: torch.Tensor, key: object, problem: str) -> Described:
        described = self._descriptions.get((problem, key))
        return described or self._keep((problem, key), self._structure(tensor, problem))

    def _structure(self, tensor: torch.Tensor, note: str, is_pending: bool = False) -> Described:
        """Return a description without a digest, of whatever a strange tensor is ready to tell."""
        try:
            shape, requires_grad = tuple(int(n) for n in tensor.shape), bool(tensor.requires_grad)
            dtype, device = dtype_name(tensor.dtype), str(tensor.device)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            # symbolic sizes (jagged tensors) and classes that refuse
            shape, requires_grad, dtype, device = (), False, "unknown", "unknown"
        note = note[:_MOST_TEXT]
        key = ("structure", shape, requires_grad, dtype, device, note, is_pending)
        described = self._descriptions.get(key)
        if described is not None:
            return described
        meta = _meta(dtype, device, shape, note)
        return self._keep(
            key, Described(meta=meta, requires_grad=requires_grad, is_pending=is_pending)
        )

    def _around(self, tensor: torch.Tensor, inner: Described) -> Described:
        _, spec = dtensor_parts(tensor)
        number, mesh = self._meshes.find(spec.mesh)
        placements = tuple(p if placement_class(p) else describe_leaf(p) for p in spec.placements)
        shape = tensor.shape if spec.tensor_meta is None else spec.tensor_meta.shape
        # `inner` is cached itself, so its identity stands for all that it says
        key = (number, placements, shape, id(inner), tensor.requires_grad, shard_order(spec))
        return self._descriptions.get(key) or self._keep(
            key, self._with_layout(inner, mesh, spec, tuple(shape), tensor.requires_grad)
        )

    def _with_layout(
        self, inner: Described, mesh: Mesh, spec: Any, shape: tuple[int, ...], requires_grad: bool
    ) -> Described:
        placements = tuple(placement_of(p, len(shape)) for p in spec.placements)
        coordinate = mesh.coordinate(self._rank)
        ranges: tuple[Ranges, ...] | None = None
        problem: str | None = "this rank is not in the mesh"
        if coordinate is not None:
            ranges, problem = _ranges(
                shape, mesh, coordinate, placements, shard_order(spec), inner.meta.shape
            )
        meta = replace(
            inner.meta,
            global_shape=shape,
            layout=Layout(source=LayoutSource.DTENSOR, mesh=mesh, placements=placements),
            ranges=ranges,
            note=inner.meta.note or problem,
        )
        # one of the replicas keeps samples: the others would only repeat them
        is_first = coordinate is not None and not any(
            index
            for index, p in zip(coordinate, placements, strict=True)
            if p.kind is PlacementKind.REPLICATE
        )
        allows_samples = inner.allows_samples and is_first
        return replace(inner, meta=meta, requires_grad=requires_grad, allows_samples=allows_samples)


def _meta(dtype: str, device: str, shape: tuple[int, ...], note: str | None) -> ValueMeta:
    return ValueMeta(
        dtype=dtype, device=device, shape=shape, global_shape=None, layout=_UNKNOWN, ranges=None,
        note=note,
    )  # fmt: skip


def placement_of(placement: Any, dims: int) -> Placement:
    """Return the record of a torch placement; of any but torch's own exact classes its words.

    Subclasses such as the masked partial of a vocabulary-parallel embedding reduce in a way of
    their own: they never compose.
    """
    kind = PlacementKind.of_torch_class(placement_class(placement))
    if kind.facts is not None:
        values: dict[str, Any] = {n: getattr(placement, n) for n in kind.facts.arguments}
        if "reduce_op" in values:
            values["reduce_op"] = str(values["reduce_op"])
        if "dim" in values:
            values["dim"] = int(values["dim"]) + (dims if values["dim"] < 0 else 0)
        if 0 <= values.get("dim", 0) < max(dims, 1):
            return Placement(kind=kind, **values)
    return Placement(kind=PlacementKind.OTHER, text=_words(placement))


def _words(placement: object) -> str:
    """Return the class and its plain attributes, never a `__repr__` that may print tensors."""
    kind = type(placement)
    attributes = {
        name: getattr(placement, name, None)
        for name in ("dim", "reduce_op", "norm_type", "offset_dim", "offset_shape")
    }
    inside = ", ".join(
        f"{name}={describe_leaf(value)}" for name, value in attributes.items() if value is not None
    )
    return f"{kind.__qualname__}({inside})"[:_MOST_TEXT]


def _ranges(
    shape: tuple[int, ...],
    mesh: Mesh,
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tuple[int, ...] | None,
    local_shape: tuple[int, ...],
) -> tuple[tuple[Ranges, ...] | None, str | None]:
    """Return the global indices held, or None and the reason."""
    axes = list(range(len(placements)))
    if order is not None:
        axes = [*(a for a in axes if a not in order), *order]
    try:
        ranges = global_ranges(
            shape,
            [mesh.shape[a] for a in axes],
            [coordinate[a] for a in axes],
            [placements[a] for a in axes],
        )
    except LayoutError as error:
        return None, str(error)[:_MOST_TEXT]
    lengths = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
    # the shape of an empty shard means nothing: FSDP2 over a zero-width shard has shape (0, 0)
    if lengths != local_shape and (0 not in local_shape or 0 not in lengths):
        return None, f"local shape {list(local_shape)}, but its placements say {list(lengths)}"
    return ranges, None


def _problem_of_memory(tensor: torch.Tensor) -> str | None:
    """Return what speaks against reading the memory of a strided tensor, None for nearly all.

    A storage may have been freed or shrunk under it, as FSDP does; and a view that repeats a few
    elements (`expand`) may have more of them than any memory could hold.
    """
    count = tensor.numel()
    if not count:
        return None
    if tensor.is_contiguous():  # asked for every value: nearly all are
        spanned = count
    else:
        spanned = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if count > _MOST_REPEATED and count > _REPETITIONS * spanned:
            return "a view that repeats its memory too often to be read"
    extent = (tensor.storage_offset() + spanned) * tensor.element_size()
    if not tensor.data_ptr() or extent > tensor.untyped_storage().nbytes():
        return "its memory is freed"
    return None


def _why_not(tensor: torch.Tensor) -> str | None:
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return "quantized"
    if tensor.device.type == "meta":
        return "on the meta device"
    if tensor.device.type == "mps":
        return "mps has no float64, in which a digest is computed"
    if is_functorch_wrapper(tensor):
        return "inside a torch.func transform"
    if storage_of(tensor.dtype) is None:
        return f"dtype {dtype_name(tensor.dtype)} is not digested"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


_WHOLE: Final = Placement(kind=PlacementKind.REPLICATE)
_RUN: Final = Placement(kind=PlacementKind.SHARD, dim=0)


class ParameterMarks:
    """Marks of frameworks on the parameters of some modules.

    * Megatron-core and Transformer Engine mark what is cut over the tensor-parallel ranks with
      `tensor_model_parallel`, `partition_dim` and `partition_stride`. A parameter that has
      `sequence_parallel`, or `tensor_model_parallel = False`, is whole on all of them.
      `allreduce = False` marks an expert's, whose axis is another one.
    * FSDP1 with `use_orig_params=True` keeps of each parameter a run of its elements on each rank.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._flat: dict[int, LayoutMark] = {}
        for parameter, group in sharded_originals(modules):
            members = group_ranks(group)
            if members is not None:
                mark = LayoutMark(axis=FSDP1_AXIS, placement=_RUN, members=members)
                self._flat[id(parameter)] = mark

    def of(self, module: torch.nn.Module, parameter: torch.Tensor) -> LayoutMark | None:
        """Return the marks on a parameter of this module, None if there are none."""
        return self._flat.get(id(parameter)) or _megatron(module, parameter)


def _megatron(module: torch.nn.Module, parameter: torch.Tensor) -> LayoutMark | None:
    tags: dict[str, Any] = getattr(parameter, "__dict__", {})
    is_cut = tags.get("tensor_model_parallel")
    is_expert = tags.get("allreduce") is False
    if is_cut is True:
        placement = _cut(
            tags.get("partition_dim"), tags.get("partition_stride", 1), parameter.dim()
        )
    elif is_expert or (is_cut is not False and not isinstance(tags.get("sequence_parallel"), bool)):
        return None
    else:
        placement = _WHOLE
    if placement is None:
        return None
    members = None
    group = module.__dict__.get("tp_group")
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        members = group_ranks(group)
    return LayoutMark(axis="etp" if is_expert else "tp", placement=placement, members=members)


def _cut(dim: object, stride: object, dims: int) -> Placement | None:
    """Return the placement of a cut along a dim, which cuts each of `stride` blocks."""
    if type(dim) is not int or type(stride) is not int or not 0 <= dim < dims or stride < 1:
        return None
    if stride == 1:
        return Placement(kind=PlacementKind.SHARD, dim=dim)
    return Placement(kind=PlacementKind.STRIDED_SHARD, dim=dim, split_factor=stride)


_TP_STYLES: Final = "transformers.distributed.tensor_parallel"
_OF_STYLE: Final[dict[str, dict[str, str]]] = {
    "ColwiseParallel": {"input.0": "input_layouts", "output": "output_layouts"},
    "RowwiseParallel": {"input.0": "input_layouts", "output": "output_layouts"},
    "EmbeddingParallel": {"input.0": "", "output": ""},
    "AllReduceParallel": {"output": ""},
}
"""{class of transformers: {slot: attribute that names the placement, "" for a whole value}}. Other
classes leave placements to the module."""


def activation_marks(module: torch.nn.Module) -> Iterator[tuple[str, LayoutMark]]:
    """Yield (slot, mark) for the first input and the output of a module under transformers'
    `tp_plan`.

    Where the plan is applied, it replaces the `forward` of the module: what a call is handed and
    hands out is what the style says. Style and mesh are read where the new `forward` has them: they
    are those that were applied, whatever the plan says. An older transformers hooks the module
    instead: nothing is yielded, because a value may be read before its hook.
    """
    style_classes = getattr(sys.modules.get(_TP_STYLES), "__dict__", {})
    forward = module.__dict__.get("forward")
    # by the module whose function it is: a user's own wrapper may have the same names inside
    if type(forward) is not FunctionType or forward.__globals__ is not style_classes:
        return
    try:
        inside = [cell.cell_contents for cell in forward.__closure__ or ()]
    except ValueError:  # a cell is empty
        return
    variables: dict[str, Any] = dict(zip(forward.__code__.co_freevars, inside))
    style: Any = variables.get("self")
    mesh: Any = variables.get("mesh")
    slots = next(
        (slots for name, slots in _OF_STYLE.items() if style_classes.get(name) is type(style)), {}
    )
    is_mesh = type(mesh) is loaded_class("torch.distributed.device_mesh", "DeviceMesh")
    if not slots or not is_mesh or mesh.ndim != 1:
        return
    with invisible_operations():
        members = mesh_ranks(mesh)
    axis = str((mesh.mesh_dim_names or ("tp",))[0])
    for slot, attribute in slots.items():
        layout: Any = style.__dict__.get(attribute)
        kind = placement_class(layout) if attribute else "Replicate"
        is_last = kind == "Shard" and layout.dim == -1
        if kind == "Replicate":
            placement = _WHOLE
        elif kind == "Shard" and type(layout.dim) is int and layout.dim >= -1:
            placement = Placement(kind=PlacementKind.SHARD, dim=max(layout.dim, 0))
        else:
            continue
        mark = LayoutMark(axis=axis, placement=placement, is_of_last_dim=is_last, members=members)
        yield slot, mark
