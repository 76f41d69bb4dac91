"""From a tensor in a hook to its record: described, digested unseen, written; later where a
collective may still write it, or where its digest is still on an accelerator.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FunctionType

import torch

from rankscope.agent.guard import say
from rankscope.agent.pythonstack import keyword_arguments
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedcache import compiler_of, find_image, missing_variants, obstacle
from rankscope.capture.device.fusedforms import FusedReader, architecture_of, driver_of
from rankscope.capture.digest import Digester
from rankscope.capture.dtypestorage import storage_of, stored_words
from rankscope.capture.kernel import Kernel, ValueMemory, is_off
from rankscope.capture.measuring import ValueNumbers
from rankscope.capture.pytree import Leaves, is_tensor, parts, walk
from rankscope.capture.torch_internals.distributed import (
    dtensor_parts,
    is_collective_outstanding,
    is_dtensor,
)
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.globs import slot_matches
from rankscope.record.phases import Phase
from rankscope.record.statistics import ADDED
from rankscope.record.value import ValueFlag
from rankscope.run.processes import start_extras
from rankscope.settings import Settings


class InFlight:
    """Counts by storage; whoever adds a tensor keeps it alive until it is taken away again."""

    def __init__(self) -> None:
        self.writers: Counter[int | None] = Counter()
        """Collectives by the storage they write; None stands for memory without a storage."""

    def has(self, tensor: torch.Tensor) -> bool:
        """True while a collective may still write the memory of a plain tensor."""
        if not self.writers:
            return False
        memory = memory_of(tensor)
        return memory is not None and memory in self.writers

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that a collective is going to write these."""
        self.writers.update(map(memory_of, tensors))

    def remove(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that it has."""
        for memory in map(memory_of, tensors):
            self.writers[memory] -= 1
            if self.writers[memory] <= 0:
                del self.writers[memory]


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return what stands for the storage behind a tensor while that lives; None without one."""
    if tensor.layout is not torch.strided:
        return None
    try:
        # the storage and not the address of the data: views at other offsets are the same memory
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # nested, functorch: they have none
        return None


def overlaps(tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> bool:
    """True if tensors of the one set share elements with tensors of the other."""
    spans = [_span(tensor) for tensor in written]
    for memory, first, end in map(_span, tensors):
        if memory is not None and any(memory == m and first < e and f < end for m, f, e in spans):
            return True
    return False


def _span(tensor: torch.Tensor) -> tuple[int | None, int, int]:
    """Return the storage of a tensor, and its first byte there and the one behind its last."""
    memory, size = memory_of(tensor), tensor.element_size()
    if memory is None or not tensor.numel():
        return None, 0, 0
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride()))
    return memory, first * size, (last + 1) * size


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
    """Reference of the kept bytes, 0 where none are kept."""


@dataclass(slots=True)
class HeldValue:
    """A value that was read; whether it is recorded is decided later."""

    described: Described
    numbers: ValueNumbers | None
    """None until an accelerator has computed them."""
    state: tuple[int, int]
    """Address and version of the memory when it was read."""
    place: ValuePlace | None = None
    """Where the value belongs in the trace; None until it is to be recorded."""


class DeviceValues:
    """Digests in flight on all accelerators of this process; autograd's threads read here too."""

    def __init__(self, batch_dim: int) -> None:
        self._batch_dim = batch_dim
        self._lock = threading.RLock()
        self._digesters: dict[torch.device, DeviceDigester] = {}
        self._remarks: list[str] = []
        self._uncompiled: set[str] = set()  # architectures: their compiler runs beside the job
        self._reported_devices: set[torch.device] = set()
        self._places: dict[tuple[torch.device, int], ValuePlace | HeldValue] = {}

    def read(self, local: torch.Tensor, place: ValuePlace | HeldValue, *, samples: bool) -> bool:
        """Enqueue a digest on the tensor's device; False while a graph is captured."""
        device = local.device
        with self._lock:
            digester = self._digesters.get(device)
            if digester is None:
                digester = self._digesters[device] = self._make_digester(device)
            # ticket and place under one lock: `collect` of another thread must know whose digest
            # arrives
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
            arrivals: list[tuple[ValuePlace | HeldValue, ValueNumbers | None]] = []
            for device, digester in self._digesters.items():
                arrivals += [
                    (self._places.pop((device, ticket)), reading)
                    for ticket, reading in digester.collect(wait=wait)
                ]
                if digester.failure:
                    lost = [key for key in self._places if key[0] == device]
                    arrivals += [(self._places.pop(key), None) for key in lost]
            while wait and self._uncompiled:
                self._tell_missing(self._uncompiled.pop())
            return arrivals

    def failures(self) -> list[str]:
        """Return in words which devices failed and which fused kernels are not used, each once."""
        with self._lock:
            failed = [d for d, digester in self._digesters.items() if digester.failure]
            new = [device for device in failed if device not in self._reported_devices]
            self._reported_devices.update(new)
            failures = [f"no digest came back from {d}: {self._digesters[d].failure}" for d in new]
            remarks, self._remarks = self._remarks, []
            return remarks + failures

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
        if is_told_here and missing_variants(architecture) and (reason := obstacle(architecture)):
            self._tell(
                f"kernels for {architecture} are missing ({reason}): torch operations take the "
                f"digests that need them, with a hundred launches a value; see rankscope doctor"
            )

    def _tell(self, text: str) -> None:
        say(text)
        self._remarks.append(text[:500])


_ACTIVATIONS = Phase.having(lambda facts: facts.is_activation)
# plain ints: an IntFlag's own `|` costs a microsecond, and these are used for every value
_PENDING, _PYTHON = int(ValueFlag.PENDING), int(ValueFlag.PYTHON)
_REPLACED = int(ValueFlag.AFTER_CALL | ValueFlag.SUPERSEDES)
_NOT_KEPT, _AS_LEFT = int(ValueFlag.NOT_KEPT), int(ValueFlag.AS_LEFT)
_MOST_PENDING = 256


class ValueReader:
    """Reads values for one session: what to take, how to digest it, where to write it."""

    def __init__(
        self,
        recorder: Recorder,
        describer: Describer,
        settings: Settings,
        make_tensor_store: Callable[[], TensorStore | None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._make_store = make_tensor_store
        self.tensor_store = make_tensor_store() if settings.tensors else None
        """Keeps full tensors; None as long as none were asked for."""
        self._tensor_store = self.tensor_store
        """`tensor_store` while the running steps keep full tensors, else None."""
        self._keeps_always = self.tensor_store is not None
        self._digests = settings.digest == "full"
        self._describer = describer
        self._globs = None if settings.slots == ("*",) else settings.slots
        self._choices: dict[str, bool] = {}
        self._digester = Digester(settings.batch_dim)
        self._on_devices = DeviceValues(settings.batch_dim)
        self.in_flight = InFlight()
        self._pending: list[tuple[torch.Tensor, ValuePlace, bool]] = []
        """(memory, place, whether a collective of this session writes it). Ours are read after the
        program's wait, others at the next hook that finds no collective outstanding."""
        self.is_on = self._digests or self._keeps_always
        """False where only the structure is recorded."""
        self.is_plain = self._is_plain()
        """True where the native way may read: whole digests of all slots, and nothing else."""

    def keep_too(self, globs: tuple[str, ...]) -> None:
        """Keep these full tensors and those of the setting `tensors`, until the next call."""
        if globs and self.tensor_store is None:
            self.tensor_store = self._make_store()
        store = self.tensor_store
        if store is not None:
            store.select_also(globs)
            self._tensor_store = store if globs or self._keeps_always else None
            self.is_on = self._digests or self._tensor_store is not None
            self.is_plain = self._is_plain()

    def _is_plain(self) -> bool:
        is_whole = self._digests and self._globs is None and not ADDED
        return is_whole and self._tensor_store is None

    def wants(self, slot: str) -> bool:
        """True where the setting `slots` takes this slot."""
        if self._globs is None:
            return True
        is_taken = self._choices.get(slot)
        if is_taken is None:
            is_taken = self._choices[slot] = any(slot_matches(glob, slot) for glob in self._globs)
        return is_taken

    def read(
        self,
        tensor: torch.Tensor,
        sequence: int,
        path: str,
        slot: str,
        phase: Phase,
        *,
        ordinal: int = 0,
        flags: int = 0,
        samples: bool = True,
        earlier: HeldValue | None = None,
    ) -> bool:
        """Digest one tensor as it is now and record it under a call of the module at this path; the
        caller holds `invisible()`. True if it is still the value that `earlier` was read from."""
        described, local = self._describer.describe(tensor)
        # to wait for it would move the program's own waits, to read it would read bytes half
        # written
        is_pending = described.is_pending or self.in_flight.has(local)
        reference = 0
        if self._tensor_store is not None:
            is_wanted = self._tensor_store.wants(path, slot)
            if not (self._digests or is_wanted):
                return False
            if is_wanted and not is_pending:
                reference = self._tensor_store.keep(local, described)
            if is_wanted and not reference:
                flags |= _NOT_KEPT
        if is_pending:
            place = ValuePlace(sequence, slot, described, phase, ordinal, flags | _PENDING)
            self._remember_pending(tensor, local, place, flags)
            self._record(place, None)
            return False
        is_as_held = False
        if described.can_digest or not self._digests:
            reading = (
                self._digest_on_host(local, described, samples=samples) if self._digests else None
            )
            if earlier is not None and earlier.numbers is not None and reading is not None:
                is_as_held = earlier.numbers.hash == reading.hash
            self._recorder.value(
                sequence, slot, described, reading, phase, ordinal,
                flags | _AS_LEFT if is_as_held else flags, reference,
            )  # fmt: skip
            return is_as_held
        if earlier is not None and earlier.state == self.state_of(tensor):
            is_as_held, flags = True, flags | _AS_LEFT
        place = ValuePlace(sequence, slot, described, phase, ordinal, flags, reference)
        if not self._is_read_on_device(local, place, samples=samples):
            self._record(place, None)
        return is_as_held

    def hold(self, tensor: torch.Tensor) -> HeldValue | None:
        """Digest a tensor as it is now, if it can be read; the caller holds `invisible()`."""
        described, local = self._describer.describe(tensor)
        if not self._digests or described.is_pending or self.in_flight.has(local):
            return None
        value = HeldValue(described, None, self.state_of(tensor))
        if described.can_digest:
            value.numbers = self._digest_on_host(local, described, samples=False)
        elif not self._is_read_on_device(local, value, samples=False):
            return None
        return value

    def state_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return address and version of a tensor's own memory: a write most likely changes one of
        them. The caller holds `invisible()`."""
        local = dtensor_parts(tensor)[0] if is_dtensor(type(tensor)) else tensor
        try:
            return local.data_ptr(), local._version
        except RuntimeError:  # subclasses may have no memory, inference tensors no version
            return 0, -1

    def record_held(
        self, value: HeldValue, sequence: int, slot: str, phase: Phase, flags: int
    ) -> None:
        """Record what `hold` has read, now or when the accelerator has it."""
        value.place = ValuePlace(sequence, slot, value.described, phase, 0, flags)
        if value.numbers is not None:
            self._record(value.place, value.numbers)

    def records_numbers(self, path: str, slot: str) -> bool:
        """True where more is recorded of this slot of this path than what it is."""
        return self._digests or (
            self._tensor_store is not None and self._tensor_store.wants(path, slot)
        )

    def is_zero(self, tensor: torch.Tensor) -> bool:
        """True where, without waiting, all is known to be zero; the caller holds `invisible()`."""
        described, local = self._describer.describe(tensor)
        storage = storage_of(local.dtype)
        if not described.can_digest or described.is_pending or storage is None:
            return False
        if not local.numel():
            return True
        words = stored_words(local, storage)
        # the first word mostly tells: only what may be zero is looked through
        return not (words.flat[0].any() or words.any())

    def _digest_on_host(
        self, local: torch.Tensor, described: Described, *, samples: bool
    ) -> ValueNumbers:
        samples = samples and described.allows_samples
        return self._digester.read(local, described.meta.ranges, samples=samples)

    def _is_read_on_device(
        self, local: torch.Tensor, place: ValuePlace | HeldValue, *, samples: bool
    ) -> bool:
        """Start a digest on an accelerator, whose result comes later; False if none can."""
        described = place.described
        return (
            self._digests
            and described.can_digest_on_device
            and self._on_devices.read(local, place, samples=samples and described.allows_samples)
        )

    def _record(self, place: ValuePlace, reading: ValueNumbers | None, flags: int = 0) -> None:
        self._recorder.value(
            place.sequence, place.slot, place.described, reading, place.phase, place.ordinal,
            place.flags | flags, place.reference,
        )  # fmt: skip

    def read_all(
        self,
        prefix: str,
        value: object,
        sequence: int,
        path: str,
        phase: Phase,
        *,
        skip: frozenset[int] = frozenset(),
        unchanged: Mapping[str, int] | None = None,
    ) -> list[tuple[str, torch.Tensor]]:
        """Record every leaf of an argument or result and return the tensors by slot. Tensors whose
        identity is in `skip`, or was `unchanged` in their slot, are left out; with either all
        non-tensors."""
        return self._read_leaves(walk(prefix, value), sequence, path, phase, skip, unchanged)

    def _read_leaves(
        self,
        leaves: Leaves,
        sequence: int,
        path: str,
        phase: Phase,
        skip: frozenset[int] = frozenset(),
        unchanged: Mapping[str, int] | None = None,
    ) -> list[tuple[str, torch.Tensor]]:
        tensors = []
        flags = 0 if unchanged is None else _REPLACED
        with invisible():
            for slot, leaf in leaves:
                if not self.wants(slot):
                    continue
                if is_tensor(leaf):
                    if id(leaf) in skip or (
                        unchanged is not None and unchanged.get(slot) == id(leaf)
                    ):
                        continue
                    self.read(leaf, sequence, path, slot, phase, flags=flags)
                    tensors.append((slot, leaf))
                elif not skip and unchanged is None:
                    self.note(leaf, sequence, slot, phase)
        return tensors

    # ------------------------------------------------------------------ for the native way

    keywords = staticmethod(keyword_arguments)

    def native_parts(self) -> tuple[Kernel, ValueMemory, dict[int | None, int]] | None:
        """Return the kernel, its memory, and the collectives in flight; None without a kernel."""
        arithmetic = self._digester.arithmetic
        if arithmetic.kernel is None or arithmetic.memory is None:
            return None
        return arithmetic.kernel, arithmetic.memory, self.in_flight.writers

    def learn(self, tensor: torch.Tensor) -> tuple[object, ...] | None:
        """Return what holds for all plain tensors of this dtype and shape whose memory may be read
        as it lies: plan of the kernel, elements, bytes of one, batch dim, description, and the form
        that the plan belongs to. None where Python has to read them."""
        described, local = self._describer.describe(tensor)
        if not described.can_digest or local is not tensor or described.is_pending:
            return None
        samples = described.allows_samples
        form = self._digester.form_of(tensor, None, samples=samples)
        if form.bound is None or form.is_complex or not form.plan.count:
            return None
        batch_dim = form.plan.batch_dim or 0
        plan, item_bytes = form.bound.plan, form.dtype.itemsize
        return plan, form.plan.count, item_bytes, batch_dim, described, form

    def meta_of(self, value: object) -> int:
        """Return the number of a description, or of what describes a value that is no tensor."""
        if not isinstance(value, Described):
            value = self._describer.describe_other(value)
        return self._recorder.meta(value)

    def read_parts(
        self, slot: str, value: object, sequence: int, path: str, phase: Phase, is_in_itself: bool
    ) -> list[tuple[str, torch.Tensor]]:
        """Record a part of an argument or result as `read_all` records the whole. A container that
        lies in itself is a leaf there."""
        leaves = [(slot, value)] if is_in_itself else parts(slot, value)
        return self._read_leaves(leaves, sequence, path, phase)

    @staticmethod
    def positional(forward: object) -> int:
        """Return with how many arguments a module's call can have no keywords; -1 for unknown."""
        if type(forward) is not FunctionType:
            return -1
        code = forward.__code__
        takes_more = code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or code.co_kwonlyargcount
        return -1 if takes_more else code.co_argcount - 1

    def note(
        self, leaf: object, sequence: int, slot: str, phase: Phase, flags: int = _PYTHON
    ) -> None:
        """Record a bounded description of what is no tensor, or (with flags) None for a lack."""
        if self._digests:
            described = self._describer.describe_other(leaf)
            self._recorder.value(sequence, slot, described, None, phase, 0, flags)

    def note_form(
        self, make: Callable[[], str | None], sequence: int, path: str, slot: str, phase: Phase
    ) -> None:
        """Record how the arguments or the result of a call are nested, where tensors are kept."""
        store = self._tensor_store
        if store is None or not (self.wants(slot) and store.wants(path, slot)):
            return
        with invisible():
            form = make()
        if form is not None:
            described = self._describer.describe_text(form)
            self._recorder.value(sequence, slot, described, None, phase, 0, _PYTHON)

    def describe(
        self, tensor: torch.Tensor, sequence: int, slot: str, phase: Phase, flags: int = 0
    ) -> None:
        """Record what a tensor is, without its numbers; the caller holds `invisible()`."""
        described, _ = self._describer.describe(tensor)
        self._record(ValuePlace(sequence, slot, described, phase, 0, flags), None)

    def _remember_pending(
        self, tensor: torch.Tensor, local: torch.Tensor, place: ValuePlace, flags: int
    ) -> None:
        result = self._describer.describe_result(tensor)
        if result is None and not place.described.is_pending:
            result = place.described, local
        if result is None or len(self._pending) >= _MOST_PENDING:
            return
        described, memory = result
        flags |= _REPLACED
        place = replace(place, described=described, flags=flags)
        self._pending.append((memory, place, self.in_flight.has(memory)))

    def read_pending(self) -> None:
        """Read what collectives have finished since it was seen; never waits for one."""
        if not self._pending:
            return
        with invisible():
            is_any_outstanding = is_collective_outstanding()
            has, pending = self.in_flight.has, self._pending
            ready = [
                not has(memory) and (is_ours or not is_any_outstanding)
                for memory, _, is_ours in pending
            ]
            self._pending = [value for value, is_ready in zip(pending, ready) if not is_ready]
            for (memory, place_seen, _), is_ready in zip(pending, ready):
                if not is_ready:
                    continue
                samples = place_seen.phase in _ACTIVATIONS
                place = self._kept_late(memory, place_seen)
                if place.described.can_digest and self._digests:
                    reading = self._digest_on_host(memory, place.described, samples=samples)
                    self._record(place, reading)
                elif not self._is_read_on_device(memory, place, samples=samples):
                    self._record(place, None)

    def forget_pending(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave values in this memory pending: nobody has waited for the collective."""
        if self._pending:
            lost = {memory_of(tensor) for tensor in tensors}
            self._pending = [value for value in self._pending if memory_of(value[0]) not in lost]

    def _kept_late(self, memory: torch.Tensor, place: ValuePlace) -> ValuePlace:
        if self._tensor_store is None or not place.flags & _NOT_KEPT:
            return place
        reference = self._tensor_store.keep(memory, place.described)
        if not reference:
            return place
        return replace(place, flags=place.flags & ~_NOT_KEPT, reference=reference)

    @property
    def keeps(self) -> bool:
        """True where full tensors are kept."""
        return self._tensor_store is not None

    def end_step(self) -> None:
        """Forget every tensor seen: memory of what was digested ends with the step."""
        self.read_pending()
        self._pending.clear()
        # it remembers by identity: in the next step another tensor may have that address
        self._digester.end_step()
        self._on_devices.flush()
        self.collect()

    def flush(self) -> None:
        """Make accelerators send finished digests: they arrive before the next step begins, and
        survive a device that fails in it."""
        self._on_devices.flush()

    def collect(self, *, wait: bool = False) -> None:
        """Record values back from accelerators; wait for all at the end of a trace alone."""
        if self.tensor_store is not None:
            with invisible():
                self.tensor_store.collect(wait=wait)
        for target, reading in self._on_devices.collect(wait=wait):
            place = target.place if isinstance(target, HeldValue) else target
            if place is not None:
                self._record(place, reading, 0 if reading is None else int(ValueFlag.MIX64))
        for failure in self._on_devices.failures():
            self._recorder.error(None, failure[:500])
