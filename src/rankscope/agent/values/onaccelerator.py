"""Values whose digests are still on an accelerator: where each belongs once it comes back."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial

import torch

from rankscope.agent.guard import say
from rankscope.capture.codefolders import is_off
from rankscope.capture.describe import Described
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedcache import compiler_of, find_image, variants
from rankscope.capture.device.fusedforms import FusedReader
from rankscope.capture.device.gpudriver import architecture_of, driver_of
from rankscope.capture.reading import ValueNumbers
from rankscope.record.phases import Phase
from rankscope.run.companions import start_extras

__all__ = ["DeviceValues", "HeldValue", "ValuePlace"]


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """The slot a reading belongs to."""

    sequence: int
    slot: str
    described: Described
    phase: Phase
    ordinal: int
    flags: int
    reference: int = 0
    """Of its kept bytes, 0 where they are not."""


@dataclass(slots=True)
class HeldValue:
    """A value that was read, and of which it is not known yet whether it is to be recorded."""

    described: Described
    numbers: ValueNumbers | None
    """None while an accelerator computes them."""
    state: tuple[int, int]
    """Address and version of the memory when it was read."""
    place: ValuePlace | None = None
    """Where it belongs; None until somebody wants it recorded."""


class DeviceValues:
    """Digests in flight, over all accelerators of this process; autograd's threads read
    here too.
    """

    def __init__(self, batch_dim: int) -> None:
        self._batch_dim = batch_dim
        self._lock = threading.RLock()
        self._digesters: dict[torch.device, DeviceDigester] = {}
        self._told: set[torch.device] = set()
        self._places: dict[tuple[torch.device, int], ValuePlace | HeldValue] = {}

    def read(self, local: torch.Tensor, place: ValuePlace | HeldValue, *, samples: bool) -> bool:
        """Enqueue a digest on the tensor's device; False where that cannot be (a graph is
        captured).
        """
        device = local.device
        with self._lock:
            digester = self._digesters.get(device)
            if digester is None:
                digester = self._digesters[device] = _make_digester(device, self._batch_dim)
            ticket = digester.read(local, place.described.ranges, samples=samples)
            if ticket is None:
                return False
            self._places[device, ticket] = place
            return True

    def flush(self) -> None:
        """Start the copies to the host; returns at once."""
        with self._lock:
            for digester in self._digesters.values():
                digester.flush()

    def collect(self, *, wait: bool) -> list[tuple[ValuePlace | HeldValue, ValueNumbers | None]]:
        """Return the readings that have arrived, with the places they belong to; None for those of
        a device that failed, and for those that cannot be believed.

        Args:
            wait: wait for the devices. Only at the end of a trace.
        """
        with self._lock:
            found: list[tuple[ValuePlace | HeldValue, ValueNumbers | None]] = []
            for device, digester in self._digesters.items():
                found += [
                    (self._places.pop((device, ticket)), reading)
                    for ticket, reading in digester.collect(wait=wait)
                ]
                if digester.failure:
                    lost = [key for key in self._places if key[0] == device]
                    found += [(self._places.pop(key), None) for key in lost]
            return found

    def failures(self) -> list[str]:
        """Return in words which devices failed, each once."""
        with self._lock:
            failed = [d for d, digester in self._digesters.items() if digester.failure]
            new = [device for device in failed if device not in self._told]
            self._told.update(new)
            return [f"no digest came back from {d}: {self._digesters[d].failure}" for d in new]


def _make_digester(device: torch.device, batch_dim: int) -> DeviceDigester:
    """Return the digester of a device, with the fused kernels where it has any; those that are
    missing on this host are being compiled then.
    """
    driver = driver_of(device)
    if driver is None:
        return DeviceDigester(device, batch_dim)
    architecture = architecture_of(device)
    compiler = compiler_of(architecture)
    for complaint in start_extras([] if compiler is None else [compiler]):
        say(f"{complaint}: torch operations take the digests on {device}, which is slower")
    if (
        compiler is None
        and not is_off()
        and os.environ.get("LOCAL_RANK", "0") == "0"
        and find_image(architecture, next(variants())) is None
    ):
        say(
            f"no compiled kernels for {device} ({architecture}): torch operations take digests, "
            f"with a hundred launches a value. Install triton, and see rankscope doctor"
        )
    find = partial(find_image, architecture)
    return DeviceDigester(device, batch_dim, FusedReader(device, driver, find), say)
