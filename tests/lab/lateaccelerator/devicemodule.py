"""`torch.late`: the device as a program finds it in torch, with the names of `torch.cuda`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.lab.lateaccelerator import operations
from tests.lab.lateaccelerator.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    every_stream,
    run_to,
    set_current_stream,
    synchronizing,
    work,
)

__all__ = ["Graph", "LateModule"]


class Graph:
    """What was enqueued while it was captured; it runs when it is replayed."""

    def __init__(self) -> None:
        self._entries: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        work.captured = self._entries
        try:
            yield
        finally:
            work.captured = None

    @property
    def size(self) -> int:
        """Entries captured."""
        return len(self._entries)

    def replay(self) -> None:
        for entry in self._entries:
            current_stream().enqueue(entry, "graph")


class LateModule(types.ModuleType):
    """The device module."""

    Stream = Stream
    Event = Event
    Graph = Graph
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    set_stream = staticmethod(set_current_stream)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream | None) -> Iterator[None]:
        before = current_stream()
        set_current_stream(before if stream is None else stream)
        try:
            yield
        finally:
            set_current_stream(before)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        with synchronizing("synchronize"):
            for stream in every_stream():
                run_to(stream, stream.enqueued)

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return work.captured is not None

    @staticmethod
    def set_sync_debug_mode(mode: str) -> None:
        work.mode = mode

    @staticmethod
    def get_sync_debug_mode() -> str:
        return work.mode

    @staticmethod
    def manual_seed(seed: int) -> None:
        operations.seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return operations.rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        operations.set_rng_state(state)

    _initialized = True  # activation checkpointing keeps the random state of such a device

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def device(device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
