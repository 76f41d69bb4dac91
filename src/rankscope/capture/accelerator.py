"""What torch offers of one device: streams, events, and host memory that copies reach late.

torch keeps these in the module of the device (`torch.cuda`, `torch.xpu`, `torch.mps`, that of a
backend). CUDA, ROCm, XPU and MTIA have streams and events, MPS events alone; on other devices a
copy to the host blocks. torch before 2.10 lacks `torch.Stream` and `torch.Event` on some devices,
and a backend that is written in Python has none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch


def is_host(device: torch.device) -> bool:
    """True for memory that torch operations on the host read and write."""
    return device.type in ("cpu", "meta")


_MOST_WAIT_S: Final = 60.0
"""Longest wait for a device. It queues about a thousand launches, seconds of work: one that frees
no place for so long stands still, most likely in a collective whose peer is gone."""
_MOST_PAUSE_S: Final = 0.002


class HostCopy(NamedTuple):
    """A copy to the host; `is_done` raises RuntimeError on a device in error."""

    is_done: Callable[[], bool]

    def wait(self) -> None:
        """Wait. Raises RuntimeError if the device is in error, TimeoutError if it stands still."""
        deadline, pause = time.monotonic() + _MOST_WAIT_S, 0.0001
        while not self.is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device stood still for {_MOST_WAIT_S:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)


_NOTHING = contextlib.nullcontext()
_DONE = HostCopy(lambda: True)


class Accelerator:
    """Streams and copies of one device; on the host everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module: Any = None if is_host(device) else getattr(torch, device.type, None)
        self._event: Any = getattr(module, "Event", None)
        self._stream: Any = getattr(module, "Stream", None)
        self._current: Any = getattr(module, "current_stream", None)
        self._within: Any = getattr(module, "stream", None)
        self._capturing: Any = getattr(module, "is_current_stream_capturing", None)
        self._has_streams = None not in (self._stream, self._current, self._within, self._event)

    def is_capturing(self) -> bool:
        """True while a graph is captured on the current stream. Work enqueued then would become
        part of the graph, and querying an event or pinning memory breaks the capture."""
        return self._capturing is not None and bool(self._capturing())

    def current_stream(self) -> Any:
        """Return the stream on which operations of this thread run, hashable; None without."""
        return self._current(self._device) if self._has_streams else None

    def handle_of(self, stream: Any) -> int:
        """Return a stream as the driver of CUDA or HIP knows it, 0 for the default one."""
        return int(getattr(stream, "cuda_stream", 0))

    def as_current(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which this is the current CUDA or HIP device of the thread."""
        # kernels are launched in the current context: that of another device would read foreign
        # addresses
        if self._device.type != "cuda" or torch.cuda.current_device() == self._device.index:
            return _NOTHING
        return torch.cuda.device(self._device)

    def new_stream(self) -> Any:
        """Return another stream; None on devices with a single queue."""
        return self._stream(self._device) if self._has_streams else None

    def host_memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for `copy_to_host`, pinned if the device writes to it asynchronously.
        Raises RuntimeError if none is left."""
        if not is_host(self._device) and self._event is not None:
            # a backend that pins nothing refuses: its copies block
            with contextlib.suppress(NotImplementedError):
                return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
        return torch.empty(count, dtype=dtype, device="cpu")

    def to_device(self, table: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor on the device, behind the work of the current stream."""
        if is_host(self._device):
            return table.to(self._device)
        pinned = self.host_memory(table.numel(), table.dtype).reshape(table.shape)
        # from pinned memory: a copy from pageable memory waits for the device
        return pinned.copy_(table).to(self._device, non_blocking=True)

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> HostCopy:
        """Start copying to memory of the same size made by `host_memory`, behind the work of a
        stream that `current_stream` or `new_stream` gave. Keep `source` unchanged until the copy is
        done."""
        if is_host(self._device) or self._event is None:
            target.copy_(source)
            return _DONE
        # the event behind the copy on the same stream: `query` never waits, and true means that it
        # arrived
        with self._within(stream) if self._has_streams else _NOTHING:
            target.copy_(source, non_blocking=True)
            done = self._event()
            done.record()
        return HostCopy(done.query)

    def follow_current(self, stream: Any) -> None:
        """Have what is enqueued on a stream from now on run behind the work of the current one."""
        if self._has_streams:
            ready = self._event()
            ready.record(self._current(self._device))
            stream.wait_event(ready)
