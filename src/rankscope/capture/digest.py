"""The digest of a CPU tensor: statistics, hash and sketch in a nanosecond an element or less.

This is the hot path of rankscope: it runs for every value of a traced step. It uses no torch
operation at all, so nothing that watches torch (checkpointing, autocast, a mode, a default device)
can see it or change it: xxhash, and `rankscope.capture.reading`, read the tensor's own memory.

Statistics and sketch are reused for an object of the same identity, address, version *and hash*:
all but the hash prove nothing (in-place collectives, fused optimizers and `.data` leave them, and
addresses recur), so the hash is always computed. No reference to a tensor is kept, not even a weak
one: torch refuses to swap a parameter that has any (`torch.utils.swap_tensors`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from rankscope.capture.dtypestorage import Array, Floats, elements, memory_type, storage_of_digested
from rankscope.capture.fold import BLOCK_ELEMENTS, flat_copy, make_plan
from rankscope.capture.reading import (
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


class _RememberedTensor(NamedTuple):
    """Last reading of a tensor, by its identity; the address is 0 if it was not read in place."""

    address: int
    version: int
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
        self._remembered: dict[int, _RememberedTensor] = {}
        self._arithmetic = Arithmetic()

    def end_step(self) -> None:
        """Forget every tensor: nothing is reused across steps."""
        self._remembered.clear()

    def read(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, *, samples: bool
    ) -> ValueNumbers:
        """Return the digest of a strided CPU tensor that `describe` found digestible. `ranges`: per
        dim the global indices held, None for the local ones; `samples`: also keep one sketch per
        sample, if the batch dim is at most 64 long. Raises TypeError for other dtypes."""
        key = (local.dtype, local.shape, ranges, samples)
        form = self._forms.get(key) or self._add_form(local, ranges, samples, key)
        if form.plan.count == 0:
            return empty_reading(form.plan)
        if local.is_contiguous() and not local.is_neg() and not form.is_complex:
            address = local.data_ptr()
            raw = _xxh3(form.memory.from_address(address))
            array: Array | None = None
        else:
            address = 0
            array = elements(local, form.storage)
            if array.flags.c_contiguous or array.size <= BLOCK_ELEMENTS:
                array = flat_copy(array)
            raw = hash_words(array)
        try:
            version = local._version
        except RuntimeError:  # inference tensors have none
            version = -1
        # an id may be another tensor's by now: hash, version, address and form have to agree too
        identity = id(local)
        at, entry = address, self._remembered.get(identity)
        if (
            entry is not None
            and entry.raw_hash == raw
            and entry.version == version
            and entry.address == at
            and entry.form is form
        ):
            return entry.reading if entry.reading.reused else self._reuse(identity, entry)
        reading = None
        if form.bound is not None:
            if array is not None:
                address = array.ctypes.data if array.ndim == 1 else 0
            if address:
                reading = self._arithmetic.in_one_pass(form, address, raw)
        if reading is None:
            if array is None:
                array = words_at(form.memory.from_address(address), form.dtype)
            reading = self._arithmetic.compute(array, form, raw)
        if ADDED:
            if array is None:
                array = words_at(form.memory.from_address(address), form.dtype)
            reading = reading._replace(added=_added(form.storage.values(array.reshape(-1))))
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[identity] = _RememberedTensor(at, version, raw, form, reading)
        return reading

    def _reuse(self, identity: int, entry: _RememberedTensor) -> ValueNumbers:
        reading = entry.reading._replace(reused=True)
        self._remembered[identity] = entry._replace(reading=reading)
        return reading

    def _add_form(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, samples: bool, key: object
    ) -> ValueForm:
        storage = storage_of_digested(local.dtype)
        batch_dim = self._batch_dim if samples else None
        plan = make_plan(tuple(local.shape), ranges, batch_dim, storage.is_complex)
        self._held_bytes += plan.held_bytes
        if len(self._forms) >= _MOST_FORMS or self._held_bytes > _MOST_FORM_BYTES:
            self._forms.clear()
            self._held_bytes = plan.held_bytes
        memory = memory_type(local.numel(), storage)
        samples_kept = 0 if plan.batch_factors is None else len(plan.batch_factors)
        bound = self._arithmetic.bind(plan, storage)
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
