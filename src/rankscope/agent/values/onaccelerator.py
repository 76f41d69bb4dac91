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
from rankscope.capture.device.fusedcache import compiler_of, find_image, missing, obstacle
from rankscope.capture.device.fusedforms import FusedReader
from rankscope.capture.device.gpudriver import architecture_of, driver_of
from rankscope.capture.reading import ValueNumbers
from rankscope.record.phases import Phase
from rankscope.run.companions import start_extras


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
    """Digests in flight on all accelerators of this process; autograd's threads read here too."""

    def __init__(self, batch_dim: int) -> None:
        self._batch_dim = batch_dim
        self._lock = threading.RLock()
        self._digesters: dict[torch.device, DeviceDigester] = {}
        self._remarks: list[str] = []
        self._uncompiled: set[str] = set()  # architectures: their compiler runs beside the job
        self._told: set[torch.device] = set()
        self._places: dict[tuple[torch.device, int], ValuePlace | HeldValue] = {}

    def read(self, local: torch.Tensor, place: ValuePlace | HeldValue, *, samples: bool) -> bool:
        """Enqueue a digest on the tensor's device; False while a graph is captured."""
        device = local.device
        with self._lock:
            digester = self._digesters.get(device)
            if digester is None:
                digester = self._digesters[device] = self._make_digester(device)
            ticket = digester.read(local, place.described.meta.ranges, samples=samples)
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
        """Return what has arrived with its place; None for what a device lost or garbled."""
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
            while wait and self._uncompiled:
                self._tell_missing(self._uncompiled.pop())
            return found

    def failures(self) -> list[str]:
        """Return in words which devices failed and which fused kernels are not used, each once."""
        with self._lock:
            failed = [d for d, digester in self._digesters.items() if digester.failure]
            new = [device for device in failed if device not in self._told]
            self._told.update(new)
            said = [f"no digest came back from {d}: {self._digesters[d].failure}" for d in new]
            remarks, self._remarks = self._remarks, []
            return remarks + said

    def _make_digester(self, device: torch.device) -> DeviceDigester:
        """Return a device's digester with its fused kernels; missing ones are being compiled."""
        driver = driver_of(device)
        if driver is None:
            return DeviceDigester(device, self._batch_dim)
        architecture = architecture_of(device)
        compiler = compiler_of(architecture)
        if compiler is None:
            self._tell_missing(architecture)
        else:
            self._uncompiled.add(architecture)
            for complaint in start_extras([compiler]):
                self._tell(f"{complaint}: torch operations take the digests, which is slower")
        reader = FusedReader(device, driver, partial(find_image, architecture))
        return DeviceDigester(device, self._batch_dim, reader, self._tell)

    def _tell_missing(self, architecture: str) -> None:
        is_told_here = os.environ.get("LOCAL_RANK", "0") == "0" and not is_off()
        if is_told_here and missing(architecture) and (reason := obstacle(architecture)):
            self._tell(
                f"kernels for {architecture} are missing ({reason}): torch operations take the "
                f"digests that need them, with a hundred launches a value; see rankscope doctor"
            )

    def _tell(self, text: str) -> None:
        say(text)
        self._remarks.append(text[:500])
