"""Collectives of the device: gloo on a queue of its own, as NCCL has a stream of its own.

A collective is enqueued behind the work of the current stream and returns at once. `wait()` has the
current stream wait for it, and the host not at all. What gloo copies while the entry runs is work
of the device, which no host call waits for: it counts nowhere.

Entries run when somebody waits. A rank that waits for a collective waits until its peers wait for
it too, or for something behind it, so a program must not make a peer wait on the host for what only
this rank's host can do (with NCCL, too, that hangs where a queue is full). Two things soften this:
a collective of host tensors runs what the device owes first, and so does the end of the process.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.futures import Future

from tests.lab.lateaccelerator.memory import block_of, on_host
from tests.lab.lateaccelerator.streams import Event, Stream, every_stream, run_to, work

__all__ = ["register"]

_COLLECTIVES: Final = (
    "allgather", "allreduce", "allreduce_coalesced", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send", "alltoall",
)  # fmt: skip


def register() -> None:
    """Make "late" the backend for tensors of the device."""
    dist.Backend.register_backend("late", LateGroup, devices=["late"])
    atexit.register(_run_all)


def _run_all() -> None:
    if work.error is not None:
        return
    for stream in every_stream():
        run_to(stream, stream.enqueued)


class LateWork(dist._Work):  # type: ignore[name-defined,misc]
    """A collective on its way."""

    def __init__(self, done: Event, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._done = done
        self._tensors = tensors
        """Kept until somebody waits: the queue knows their memory, not them."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[torch.Tensor]]:
        self._done.wait()  # a future of C++ orders no streams of Python
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._tensors)
        return future


class LateGroup(dist.ProcessGroup):
    """A group of ranks; tensors of the host go to gloo as they are."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._queue = Stream()
        self._name = ""

    def getBackendName(self) -> str:
        return "late"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def barrier(self, opts: Any = None) -> Any:
        _run_all()
        return self._gloo.barrier(opts) if opts is not None else self._gloo.barrier()

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self._enqueue("_allgather_base", (output, given), opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        return self._enqueue("_reduce_scatter_base", (output, given), opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, given, opts)  # the name since torch 2.13

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        return self._reduce_scatter_base(output, given, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self._allgather_base(o, g) for o, g in zip(outputs, given, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self._reduce_scatter_base(o, g, opts) for o, g in zip(outputs, given, strict=True)][
            -1
        ]

    def alltoall_base(self, output: Any, given: Any, out_splits: Any, splits: Any, o: Any) -> Any:
        return self._enqueue("alltoall_base", (output, given, out_splits, splits), o)

    def _enqueue(self, name: str, arguments: tuple[Any, ...], opts: Any = None) -> Any:
        rest = () if opts is None else (opts,)
        tensors = _tensors(arguments)
        if all(tensor.device.type == "cpu" for tensor in tensors):
            _run_all()
            return getattr(self._gloo, name)(*arguments, *rest)
        ready = Event()
        ready.record()
        self._queue.wait_event(ready)
        hosts = _on_host(arguments)
        for tensor in tensors:
            block_of(tensor).others.add(self._queue)
        self._queue.enqueue(lambda: getattr(self._gloo, name)(*hosts, *rest).wait(), "collective")
        done = Event()
        done.record(self._queue)
        return LateWork(done, tensors)


def _collective(name: str) -> Any:
    def enqueue(self: LateGroup, *arguments: Any) -> Any:
        return self._enqueue(name, arguments)

    enqueue.__name__ = name
    return enqueue


for _name in _COLLECTIVES:
    setattr(LateGroup, _name, _collective(_name))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value) if value.device.type != "cpu" else value
    if isinstance(value, list | tuple):
        return type(value)(_on_host(each) for each in value)
    return value
