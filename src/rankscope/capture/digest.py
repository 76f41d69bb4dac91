"""The digest of a CPU tensor: statistics, hash and sketch in a nanosecond an element or less.

This is the hot path of rankscope: it runs for every value of a traced step. It uses no torch
operation at all, so nothing that watches torch (checkpointing, autocast, a mode, a default device)
can see it or change it: xxhash, and `rankscope.capture.measuring`, read the tensor's own memory.

Statistics and sketch of one step are reused for the same address *and hash*, dtype and shape. All
but the hash prove nothing (whoever writes memory may leave a tensor's identity and version as they
are, and addresses recur), so every value is hashed. No reference to a tensor is kept, not even a
weak one: torch refuses to swap a parameter that has any (`torch.utils.swap_tensors`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from rankscope.capture.dtypestorage import Array, Floats, elements, memory_type, storage_of_digested
from rankscope.capture.fold import BLOCK_ELEMENTS, flat_copy, make_plan
from rankscope.capture.measuring import (
    Arithmetic,
    ValueForm,
    ValueNumbers,
    empty_reading,
    hash_words,
    words_at,
)
from rankscope.layout.placement import Ranges
from rankscope.record.statistics import ADDED, ADDED_UNKNOWN

_xxh3: Final[Any] = xxhash.xxh3_64_intdigest  # the stubs know no ctypes memory as a buffer
_MOST_FORMS: Final = 4096
_MOST_FORM_BYTES: Final = 64 << 20
_MOST_REMEMBERED: Final = 1 << 16


class _RememberedValue(NamedTuple):
    """Last reading at an address."""

    raw_hash: int
    form: ValueForm
    reading: ValueNumbers


class Digester:
    """Reads digests of CPU tensors, and remembers them until the step ends; serves any number of
    threads. Call `read` with torch's function modes out of the way
    (`rankscope.capture.torch_internals.tensors`)."""

    def __init__(self, batch_dim: int = 0) -> None:
        self._batch_dim = batch_dim
        self._forms: dict[object, ValueForm] = {}
        self._held_bytes = 0
        self._remembered: dict[int, _RememberedValue] = {}
        self.arithmetic = Arithmetic()

    def end_step(self) -> None:
        """Forget every value: nothing is reused across steps."""
        self._remembered.clear()
        self.arithmetic.forget()

    def read(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, *, samples: bool
    ) -> ValueNumbers:
        """Return the digest of a strided CPU tensor that `describe` found digestible. `ranges`: per
        dim the global indices held, None for the local ones; `samples`: also keep one sketch per
        sample, if the batch dim is at most 64 long. Raises TypeError for other dtypes."""
        form = self.form_of(local, ranges, samples=samples)
        if form.plan.count == 0:
            return empty_reading(form.plan)
        address = source = local.data_ptr()
        array: Array | None = None
        if form.is_complex or not local.is_contiguous() or local.is_neg():
            array = elements(local, form.storage)
            if array.flags.c_contiguous or array.size <= BLOCK_ELEMENTS:
                array = flat_copy(array)
            source = array.ctypes.data if array.ndim == 1 else 0
        reading = None
        if form.bound is not None and source:
            raw, reading = self.arithmetic.in_one_pass(form, address, source)
            if reading is not None and not ADDED:
                return reading
        else:
            raw = _xxh3(form.memory.from_address(source)) if array is None else hash_words(array)
        # the address is a hint, the hash decides
        entry = self._remembered.get(address)
        if entry is not None and entry.raw_hash == raw and entry.form is form:
            return self._reuse(address, entry)
        if array is None:
            array = words_at(form.memory.from_address(source), form.dtype)
        if reading is None:
            reading = self.arithmetic.compute(array, form, raw)
        if ADDED:
            reading = reading._replace(added=_added(form.storage.values(array.reshape(-1))))
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[address] = _RememberedValue(raw, form, reading)
        return reading

    def _reuse(self, address: int, entry: _RememberedValue) -> ValueNumbers:
        if not entry.reading.reused:
            entry = entry._replace(reading=entry.reading._replace(reused=True))
            self._remembered[address] = entry
        return entry.reading

    def form_of(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, *, samples: bool
    ) -> ValueForm:
        """Return what all values like this one share, for the arguments of `read`."""
        key = (local.dtype, local.shape, ranges, samples)
        return self._forms.get(key) or self._add_form(local, ranges, samples, key)

    def _add_form(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, samples: bool, key: object
    ) -> ValueForm:
        storage = storage_of_digested(local.dtype)
        batch_dim = self._batch_dim if samples else None
        plan = make_plan(tuple(local.shape), ranges, batch_dim, storage.is_complex)
        self._held_bytes += plan.held_bytes
        if len(self._forms) >= _MOST_FORMS or self._held_bytes > _MOST_FORM_BYTES:
            self._forms.clear()
            self.arithmetic.forget()  # it knows forms by addresses, which are given again
            self._held_bytes = plan.held_bytes
        memory = memory_type(local.numel(), storage)
        samples_kept = 0 if plan.batch_factors is None else len(plan.batch_factors)
        bound = self.arithmetic.bind(plan, storage)
        form = self._forms[key] = ValueForm(
            plan, storage, memory, storage.dtype, storage.is_complex, bound, samples_kept
        )
        return form


def _added(values: Floats) -> tuple[float, ...]:
    """Return the statistics that are computed in Python, of finite elements."""
    finite = values[np.isfinite(values)].astype(np.float64, copy=False)
    if not finite.size:
        return ADDED_UNKNOWN
    return tuple(float(s.of_values(finite)) for s in ADDED if s.of_values is not None)
