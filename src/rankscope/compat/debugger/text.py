"""Tensors as `print` of torch writes them, in the options the debugger of transformers sets, and
their statistics.

Scientific notation and 120 columns; digits, items at each edge, and from how many elements on only
the edges are shown, as the program has it when the tensor is looked at (`torch.set_printoptions`).
What autograd would add (`requires_grad`, `grad_fn`) is left out. The statistics are torch's own,
because they have to agree with its last printed digit: this file is imported where a tensor is
rendered.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from rankscope.capture import kernel
from rankscope.capture.torch_internals.tensors import PrintOptions, print_options

_LINE: Final = 120
_PREFIX: Final = "tensor("
_MEASURED: Final = frozenset({torch.float16, torch.float32, torch.bfloat16})
_WIDENED: Final = frozenset(
    found
    for name in ("float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e4m3fnuz")
    if (found := getattr(torch, name, None)) is not None
)
_FLOAT: Final = struct.Struct("=f")
_CHUNK_BYTES: Final = 1 << 18
_LINE_BYTES: Final = 64
_kernel: Final = functools.cache(kernel.load)


class Arena:
    """Memory outside the heap for items that are kept, by one thread: there, a kB between large
    tensors that come and go keeps the room of one from being used for the next."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return so much memory, which lasts as long as it is used."""
        if nbytes > len(self._rest):
            size = max(nbytes, _CHUNK_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._rest = memoryview(mmap.mmap(-1, size, flags=flags))
        taken = self._rest[:nbytes]
        self._rest = self._rest[nbytes + -nbytes % _LINE_BYTES :]
        return taken


class Glimpse(NamedTuple):
    """All that is written of a tensor, a few kB unless the program prints tensors whole: the tensor
    itself may go. `items` are shown, in order (None: not asked for); `numbers` are mean, std, min
    and max ({} where undefined); `odd` counts what is not finite, by kind."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    items: memoryview | None
    numbers: Mapping[str, float]
    odd: Mapping[str, int]
    options: PrintOptions


def glimpse_of(
    tensor: torch.Tensor, stride: tuple[int, ...] = (), *, arena: Arena | None = None
) -> Glimpse:
    """Look at a strided tensor on the host. `stride` is that of the program's tensor where this is
    a copy of it in row-major order; `arena` takes the items for `tensor_text`."""
    tensor = _laid_out(tensor, stride)
    numbers = _numbers(tensor)
    odd: dict[str, int] = {}
    if numbers and not (math.isfinite(numbers["min"]) and math.isfinite(numbers["max"])):
        kinds = {"nan": torch.isnan, "posinf": torch.isposinf, "neginf": torch.isneginf}
        counts = {name: int(is_odd(tensor).sum()) for name, is_odd in kinds.items()}
        odd = {name: count for name, count in counts.items() if count}
    options = print_options()
    items = None if arena is None else _items(tensor, arena, options)
    return Glimpse(tensor.dtype, tuple(tensor.shape), items, numbers, odd, options)


def is_measured(dtype: torch.dtype) -> bool:
    """True for a dtype of which the debugger gives statistics."""
    return dtype in _MEASURED


def tensor_text(seen: Glimpse, device: str = "cpu") -> str:
    """Return a tensor as `print` shows it on the device where the program had it."""
    dtype, shape, options = seen.dtype, seen.shape, seen.options
    count = math.prod(shape)
    if seen.items is None or not count:
        suffixes = _device(device)
        suffixes += [f"size={shape}"] if len(shape) != 1 else []
        suffixes += [f"dtype={dtype}"] if dtype != torch.get_default_dtype() else []
        return _with_suffixes(f"{_PREFIX}[]", suffixes)
    suffixes = _device(device) + _size(shape, options) + _dtype(dtype)
    if not len(seen.items):  # torch shows no item at no edge
        return _with_suffixes(f"{_PREFIX}[...]", suffixes)
    texts, width = _texts(torch.frombuffer(seen.items, dtype=dtype), options.precision)
    edge = options.edgeitems if count > options.threshold else count
    body = _body(iter(texts), shape, width, edge, len(_PREFIX))
    return _with_suffixes(_PREFIX + body, suffixes)


def meta_text(shape: Sequence[int], dtype: str) -> str:
    """Return what `print` shows of a tensor on the meta device; `dtype` is without "torch."."""
    suffixes = ["device='meta'", f"size={tuple(shape)}"]
    if getattr(torch, dtype) != torch.get_default_dtype():
        suffixes.append(f"dtype=torch.{dtype}")
    return _with_suffixes(f"{_PREFIX}...", suffixes)


def statistics_of(seen: Glimpse, device: str = "cpu") -> dict[str, str]:
    """Return mean, std, min and max as the repr of torch's results on that device; {} where
    undefined."""
    options = seen.options
    suffixes = _device(device) + _size((), options) + _dtype(seen.dtype)
    return {
        name: _with_suffixes(_PREFIX + _floats([found], options.precision)[0][0], suffixes)
        for name, found in seen.numbers.items()
    }


def _numbers(tensor: torch.Tensor) -> dict[str, float]:
    if not is_measured(tensor.dtype) or not tensor.numel():
        return {}
    low, high = torch.aminmax(tensor)
    mean = tensor.mean().item()
    std = _std(tensor, mean)
    return {"mean": mean, "std": std, "min": low.item(), "max": high.item()}


def _std(tensor: torch.Tensor, mean: float) -> float:
    if tensor.numel() == 1:  # undefined, and torch warns of it
        return math.nan
    is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg()
    fast = _kernel() if is_plain else None
    if fast is None:
        return tensor.std().item()
    # as torch does it, six times faster: in double around the mean it rounds to float32, and
    # rounded at the end
    squares = fast.squares_around(tensor.data_ptr(), tensor.numel(), mean)
    std = math.sqrt(squares / (tensor.numel() - 1))
    return float(_FLOAT.unpack(_FLOAT.pack(std))[0])


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the elements, given in row-major order, as they lay in memory with this stride: sums
    depend on the order, in their last digits."""
    if not stride or len(stride) != tensor.dim() or not tensor.numel():
        return tensor
    distinct = tensor
    for dim, step in enumerate(stride):
        if not step:  # the same items again and again
            distinct = distinct.narrow(dim, 0, 1)
    closer = _closed_up(distinct.shape, stride)
    if closer is None:
        return tensor
    memory = torch.empty_strided(distinct.shape, closer, dtype=tensor.dtype, device="cpu")
    return memory.copy_(distinct).expand(tensor.shape)


def _closed_up(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return strides in the same order, with gaps where there are any, but small ones: what torch
    makes of a tensor depends on no more. None where two items may lie at one place (`unfold`)."""
    closer = [1] * len(shape)
    reach, near = 1, 1
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    for dim in sorted(dims, key=lambda dim: stride[dim]):
        if stride[dim] < reach:
            return None
        closer[dim] = near + (stride[dim] > reach)
        reach, near = stride[dim] * shape[dim], closer[dim] * shape[dim]
    return closer


def _items(tensor: torch.Tensor, arena: Arena, options: PrintOptions) -> memoryview:
    shown, edge = tensor, options.edgeitems
    if tensor.numel() > options.threshold:
        for dim, size in enumerate(tensor.shape):
            if size > 2 * edge:
                low, high = shown.narrow(dim, 0, edge), shown.narrow(dim, size - edge, edge)
                shown = torch.cat((low, high), dim)
    items = arena.take(shown.numel() * shown.element_size())
    if items:
        torch.frombuffer(items, dtype=tensor.dtype).view(shown.shape).copy_(shown)
    return items


def _texts(shown: torch.Tensor, precision: int) -> tuple[list[str], int]:
    """Return the text of every item, and the width of an item in its line."""
    if shown.dtype in _WIDENED:
        shown = shown.half()
    if shown.dtype.is_complex:
        real, real_width = _floats(shown.real.tolist(), precision)
        imag, imag_width = _floats(shown.imag.tolist(), precision)
        joined = [a + _signed((b + "j").lstrip()) for a, b in zip(real, imag)]
        return joined, real_width + imag_width + 1
    if shown.dtype.is_floating_point:
        return _floats(shown.tolist(), precision)
    texts = [str(value) for value in shown.tolist()]
    width = max(map(len, texts))
    return [text.rjust(width) for text in texts], width


def _signed(text: str) -> str:
    return text if text[0] in "+-" else "+" + text


def _floats(values: Sequence[float], precision: int) -> tuple[list[str], int]:
    """Return the texts of floats and their width, which only those decide that are neither zero nor
    infinite; where there are none of these all are written as whole numbers."""
    texts = [f"{value:.{precision}e}" for value in values]
    ordinary = [len(text) for text, value in zip(texts, values) if value and math.isfinite(value)]
    if not ordinary:
        return [f"{value:.0f}." if math.isfinite(value) else str(value) for value in values], 1
    width = max(ordinary)
    return [text.rjust(width) for text in texts], width


def _body(items: Iterator[str], shape: Sequence[int], width: int, edge: int, indent: int) -> str:
    """Return the texts of a tensor's items in brackets and lines: items of `width` columns, with
    `edge` of them at each end of a dim that is longer than both, `indent` columns from the left."""
    if not shape:
        return next(items)
    is_cut = shape[0] > 2 * edge
    count = 2 * edge if is_cut else shape[0]
    if len(shape) == 1:
        row = [next(items) for _ in range(count)]
        if is_cut:
            row.insert(edge, " ...")
        per_line = max(1, (_LINE - indent) // (width + 2))
        parts = [", ".join(row[at : at + per_line]) for at in range(0, len(row), per_line)]
    else:
        parts = [_body(items, shape[1:], width, edge, indent + 1) for _ in range(count)]
        if is_cut:
            parts.insert(edge, "...")
    ends = "," + "\n" * max(1, len(shape) - 1) + " " * (indent + 1)
    return f"[{ends.join(parts)}]"


def _with_suffixes(text: str, suffixes: Sequence[str]) -> str:
    parts = [text]
    filled = len(text) - text.rfind("\n") + 1
    for suffix in suffixes:
        if filled + len(suffix) + 2 > _LINE:
            parts.append(f",\n{' ' * len(_PREFIX)}{suffix}")
            filled = len(_PREFIX) + len(suffix)
        else:
            parts.append(f", {suffix}")
            filled += len(suffix) + 2
    return "".join(parts) + ")"


def _device(device: str) -> list[str]:
    return [] if device == "cpu" else [f"device='{device}'"]


def _size(shape: Sequence[int], options: PrintOptions) -> list[str]:
    return [] if options.edgeitems else [f"size={tuple(shape)}"]


def _dtype(dtype: torch.dtype) -> list[str]:
    default = torch.get_default_dtype()
    plain = torch.complex128 if default == torch.float64 else torch.complex64
    usual = (default, plain, torch.int64, torch.bool)
    return [] if dtype in usual else [f"dtype={dtype}"]
