"""Operators of torch on tensors of the device: what is known at once, and what waits.

Shape, strides and dtype of a result are known when the operator is called: they are asked of the
same operator on the meta device. The numbers come from the same operator on the CPU, when the entry
runs. A view shares its memory at once. An operator whose result has a shape, or is a Python number,
that only the numbers tell, has to wait: `item`, `nonzero`, `equal`, an index by a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from tests.lab.lateaccelerator.memory import allocate, block_of, on_host
from tests.lab.lateaccelerator.streams import current_stream, run_to, stream_of, synchronizing

__all__ = ["register", "rng_state", "seed", "set_rng_state"]

_CPU_KEY: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_aten: Final = torch.ops.aten
_WAITING_TAGS: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WRAPPED: Final = {torch.float64, torch.int64, torch.complex128, torch.bool}
"""Dtypes in which torch hands a Python number to an operator that takes a tensor."""
_libraries: list[torch.library.Library] = []
_shapes: dict[object, Any] = {}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the schema of an operator says."""

    is_view: bool
    waits: bool
    draws: bool
    """It draws random numbers."""
    returned: tuple[str | None, ...]
    """The argument that each result is, None for a new tensor."""
    written: frozenset[str]
    """Arguments it writes to."""
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    """Arguments that are one tensor, or a number in its place."""


_kinds: dict[Any, _Kind] = {}


def register() -> None:
    """Have every operator without a kernel of its own for the device come here."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("record_stream", _record_stream, "PrivateUse1")
    aten.impl("_local_scalar_dense", _item, "PrivateUse1")
    aten.impl("set_.source_Storage_storage_offset", _set, "PrivateUse1")
    aten.impl("resize_", _resize, "PrivateUse1")
    _libraries.extend((everything, aten))


class _Random:
    """As on a GPU, the host knows the state: a seed, and how many operators have drawn from it."""

    seed = 0
    drawn = 0


def seed(number: int) -> None:
    """Begin the random numbers of the device anew."""
    _Random.seed, _Random.drawn = number, 0


def rng_state() -> torch.Tensor:
    """Return the state of the random numbers, without waiting."""
    return torch.tensor([_Random.seed, _Random.drawn]).view(torch.uint8)


def set_rng_state(state: torch.Tensor) -> None:
    """Go back to a state."""
    _Random.seed, _Random.drawn = state.view(torch.int64).tolist()


def _next_generator() -> torch.Generator:
    _Random.drawn += 1
    return torch.Generator("cpu").manual_seed((_Random.seed * 1_000_003 + _Random.drawn) % 2**63)


# ---- memory -------------------------------------------------------------------------------------


def _empty(
    size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = _aten.empty.memory_format(size, dtype=dtype, device=_META, memory_format=memory_format)
    return allocate(size, shape.stride(), dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, layout: Any = None,
    device: Any = None, pin_memory: Any = None,
) -> torch.Tensor:  # fmt: skip
    return allocate(size, stride, torch.get_default_dtype() if dtype is None else dtype)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    block_of(tensor).others.add(stream_of(stream.stream_id))


def _set(
    tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    kernel = _aten.set_.source_Storage_storage_offset
    return kernel.redispatch(_CPU_KEY, tensor, storage, offset, size, stride)


def _resize(tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> Any:
    shape = _aten.empty.memory_format(size, dtype=tensor.dtype, device=_META)
    _resize_result(tensor, shape)
    return tensor


def _resize_result(tensor: torch.Tensor, shape: torch.Tensor) -> None:
    """Give an argument `out` the shape of the result; its memory is new, and its numbers lost."""
    if tensor.size() != shape.size():
        made = allocate(shape.size(), shape.stride(), tensor.dtype)
        _set(tensor, made.untyped_storage(), 0, shape.size(), shape.stride())


# ---- operators ----------------------------------------------------------------------------------


def _item(tensor: torch.Tensor) -> Any:
    with synchronizing("item"):
        stream, host = current_stream(), on_host(tensor)
        run_to(stream, stream.enqueued)
        return _aten._local_scalar_dense.default(host)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue an operator, or do at once what cannot wait."""
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        kind = _kinds.get(op) or _describe(op)
        if kind.is_view:
            return op.redispatch(_CPU_KEY, *args, **kwargs)
        held = dict(zip(kind.names, args, strict=False)) | kwargs
        for name in kind.tensors:
            if isinstance(held.get(name), int | float | complex):
                op = _taking_number(op, name)
        if kind.waits or _has_host_indices(held):
            return _run_now(op, held, kind)
        if all(name is not None and _has_elements(held[name]) for name in kind.returned):
            results = tuple(held[name] for name in kind.returned if name is not None)
        else:
            shapes = _result_shapes(op, held)
            results = tuple(
                _new(shape) if name is None else _ready(held[name], shape)
                for name, shape in zip(kind.returned, shapes, strict=True)
            )
        new = [
            [t if t is None else on_host(t) for t in (r if isinstance(r, list) else [r])]
            for name, r in zip(kind.returned, results, strict=True)
            if name is None
        ]
        where = [i for i, name in enumerate(kind.returned) if name is None]
        call = _host_call(op, held, kind)
        current_stream().enqueue(lambda: _fill(call(), new, where), "operator")
        return results[0] if len(results) == 1 else (results if results else None)


def _describe(op: Any) -> _Kind:
    schema = op._schema
    by_alias = {
        frozenset(a.alias_info.before_set): a.name
        for a in schema.arguments
        if a.alias_info is not None
    }
    written = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    returned = tuple(
        None if r.alias_info is None else by_alias[frozenset(r.alias_info.before_set)]
        for r in schema.returns
    )
    kind = _kinds[op] = _Kind(
        is_view=any(name is not None and name not in written for name in returned),
        waits=bool(_WAITING_TAGS & set(op.tags))
        or any("Tensor" not in str(r.type) for r in schema.returns),
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        returned=returned,
        written=written,
        names=tuple(a.name for a in schema.arguments),
        tensors=tuple(a.name for a in schema.arguments if str(a.type) == "Tensor"),
    )
    return kind


@functools.cache
def _taking_number(op: Any, name: str) -> Any:
    """Return the overload that takes a number where torch hands one to a tensor's argument."""
    packet, overload = op.overloadpacket, op._schema.overload_name
    for words in ("Scalar", "Tensor_Scalar"):
        found = getattr(packet, overload.replace("Tensor", words, 1), None)
        if found is not None and any(
            a.name == name and str(a.type) == "number" for a in found._schema.arguments
        ):
            return found
    return op


def _has_host_indices(held: dict[str, Any]) -> bool:
    """True for an index by a mask, whose result has a shape that only the numbers tell, and for an
    index in host memory: torch copies it to the device first, and waits for it.
    """
    indices = held.get("indices")
    return isinstance(indices, list | tuple) and any(
        isinstance(index, torch.Tensor)
        and (index.dtype in (torch.bool, torch.uint8) or (index.is_cpu and index.dim() > 0))
        for index in indices
    )


def _run_now(op: Any, held: dict[str, Any], kind: _Kind) -> Any:
    with synchronizing(op.name().removeprefix("aten::")):
        stream = current_stream()
        call, out = _host_call(op, held, kind), []
        stream.enqueue(lambda: out.append(call()), "operator")
        run_to(stream, stream.enqueued)
        found = out[0]
    if kind.written:
        names = [name for name in kind.returned if name is not None]
        return held[names[0]] if names else None
    return pytree.tree_map_only(torch.Tensor, _on_device, found)


def _on_device(result: torch.Tensor) -> torch.Tensor:
    made = allocate(result.size(), result.stride(), result.dtype)
    on_host(made).copy_(result)
    return made


def _has_elements(out: Any) -> bool:
    """True for an argument that is written as it is: an empty one gets the shape of the result."""
    return isinstance(out, torch.Tensor) and out.numel() > 0


def _new(shape: Any) -> Any:
    if isinstance(shape, list):
        return [_new(each) for each in shape]
    return None if shape is None else allocate(shape.size(), shape.stride(), shape.dtype)


def _ready(held: Any, shape: Any) -> Any:
    if isinstance(held, torch.Tensor):
        _resize_result(held, shape)
    return held


def _host_call(op: Any, held: dict[str, Any], kind: _Kind) -> Callable[[], Any]:
    """Return the operator on host memory; scalars of the host are read now."""
    on_cpu = {name: _host_argument(value) for name, value in held.items()}
    generator = _next_generator() if kind.draws and on_cpu.get("generator") is None else None
    if generator is not None and "generator" in kind.names:
        on_cpu["generator"] = generator
    names = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in on_cpu]
    args = [on_cpu.pop(name) for name in names]
    if generator is None or "generator" in kind.names:
        return lambda: op(*args, **on_cpu)
    return lambda: _drawing_from(generator, lambda: op(*args, **on_cpu))


def _drawing_from(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Run an operator that knows the CPU's own random numbers alone (a fused dropout)."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return call()
    finally:
        torch.default_generator.set_state(before)


def _host_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return on_host(value)
        if value.dim() == 0:
            return _number(value)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            "late:0 and cpu!"
        )
    if isinstance(value, list | tuple):
        return [_host_argument(each) for each in value]
    if isinstance(value, torch.device):
        return _CPU
    return value


def _number(scalar: torch.Tensor) -> torch.Tensor:
    """Return a scalar of the host as it is now; a Python number stays what it is to torch."""
    return scalar if scalar.dtype in _WRAPPED else _aten.clone.default(scalar)


def _fill(found: Any, new: list[list[torch.Tensor | None]], where: list[int]) -> None:
    if not new:
        return
    results = (found,) if isinstance(found, torch.Tensor | list) else found
    for targets, number in zip(new, where, strict=True):
        result = results[number]
        for target, each in zip(
            targets, result if isinstance(result, list) else [result], strict=True
        ):
            if target is not None and target.size() == each.size():
                target.copy_(each)  # what the CPU leaves out (statistics in eval mode) stays poison


# ---- shapes -------------------------------------------------------------------------------------


def _result_shapes(op: Any, held: dict[str, Any]) -> tuple[Any, ...]:
    """Return meta tensors for the results: asked once for each kind of arguments."""
    key = (op, tuple((name, _key(value)) for name, value in held.items()))
    try:
        found = _shapes.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _ask(op, held)
    if found is None:
        found = _shapes[key] = _ask(op, held)
    return found


def _ask(op: Any, held: dict[str, Any]) -> tuple[Any, ...]:
    on_meta = {name: _meta_argument(value) for name, value in held.items()}
    on_meta.pop("generator", None)
    names = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in on_meta]
    args = [on_meta.pop(name) for name in names]
    found = op(*args, **on_meta)
    return found if isinstance(found, tuple) else (() if found is None else (found,))


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.dim() == 0:
            return "scalar", value.dtype
        return value.dtype, value.size(), value.stride()
    if isinstance(value, list | tuple):
        return tuple(_key(each) for each in value)
    return type(value), value


def _meta_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.dim() == 0:
            return _number(value)
        return _aten.empty_strided.default(
            value.size(), value.stride(), dtype=value.dtype, device=_META
        )
    if isinstance(value, list | tuple):
        return [_meta_argument(each) for each in value]
    return _META if isinstance(value, torch.device) else value
