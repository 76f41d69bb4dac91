"""The records of all streams by step. What is put together at once is a part: one large step, or
some small ones; of every stream it is a choice of rows, which stay where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.spool.recordcolumns import Sequences, step_codes
from rankscope.tree.assembly.interning import Vocabulary, common_numbers
from rankscope.tree.assembly.rankstreams import RankStream, SampleSketches

_MOST_ROWS: Final = 1 << 17
"""Calls and values of a part of several steps."""
_SETUP: Final = -1
"""In place of the code of a step."""
_NOWHERE: Final = -1

Rows = NDArray[np.int64] | slice


class Group(NamedTuple):
    """What is one step in the tree, or the setup of one life of the job."""

    incarnation: int
    is_setup: bool
    mode: int
    step: int


class StepRecords:
    """The records of every stream by part."""

    def __init__(
        self,
        streams: Sequence[RankStream],
        vocabulary: Vocabulary,
        without: Collection[tuple[int, int, int]] = (),
    ) -> None:
        """Sort the records of all streams by step, without these (incarnation, mode, step)."""
        self._streams = streams
        self.orphans: list[int] = []
        """Per stream, values whose call, slot or description was not found."""
        stream_groups = [_groups_of_calls(stream) for stream in streams]
        calls = [Sequences(stream.enters["sequence"]) for stream in streams]
        of_values = [self._owners(n, calls[n], vocabulary) for n in range(len(streams))]
        rows: Counter[Group] = Counter()
        for (groups, of_call), of_value in zip(stream_groups, of_values):
            # calls and values together: a part is cut by what is put into memory for it
            counts = np.bincount(of_call, minlength=len(groups))
            counts += np.bincount(of_call[of_value[of_value >= 0]], minlength=len(groups))
            rows.update(dict(zip(groups, counts.tolist())))
        chosen = {group for group in rows if group.is_setup or group[:1] + group[2:] not in without}
        self.groups = sorted(chosen, key=lambda group: (group[0], not group[1], *group[2:]))
        """Setup before steps, train before eval, by step; one incarnation after another."""
        self.part_of_group = _parts_of_groups([rows[group] for group in self.groups])
        numbers = dict(zip(self.groups, self.part_of_group))
        samples = [stream.samples.heads["count"].astype(np.int64) for stream in streams]
        self._first_samples = [np.cumsum(count) - count for count in samples]
        self._rows: list[dict[str, _ByPart]] = []
        for number, stream in enumerate(streams):
            groups, of_call = stream_groups[number]
            table = np.array([numbers.get(group, _NOWHERE) for group in groups], np.int64)
            # an index of -1 takes this last one: records without a call need no mask of their own
            part = np.append(table[of_call], _NOWHERE)  # the last for what is of no call
            parts = {"values": part[of_values[number]], "enters": part[:-1]}
            heads = stream.samples.heads
            kinds = ("exits", stream.exits), ("samples", heads), ("errors", stream.errors)
            for name, records in kinds:
                parts[name] = part[calls[number].find(records["sequence"])]
            self._rows.append({name: _ByPart(part_of) for name, part_of in parts.items()})

    def close(self) -> None:
        """Let the records go."""
        self._streams, self._rows, self._first_samples = (), [], []

    def streams(self, part: int) -> Iterator[tuple[int, RankStream]]:
        """Yield (number, stream) of the streams with calls of a part, reduced to that part."""
        for number, (stream, rows) in enumerate(zip(self._streams, self._rows)):
            enters = stream.enters[rows["enters"].of(part)]
            if len(enters):
                yield (
                    number,
                    replace(
                        stream,
                        enters=enters,
                        exits=stream.exits[rows["exits"].of(part)],
                        values=stream.values.chosen(rows["values"].of(part)),
                        samples=_chosen(
                            stream.samples, self._first_samples[number], rows["samples"].of(part)
                        ),
                        errors=stream.errors[rows["errors"].of(part)],
                    ),
                )

    def _owners(self, number: int, calls: Sequences, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Return the row of each value's call, -1 where that or what it is was not found."""
        values = self._streams[number].values
        slot = common_numbers(vocabulary.lookups[number]["slot"], values["slot"])
        description = common_numbers(vocabulary.lookups[number]["meta"], values["meta"])
        owners = calls.find(values["sequence"])
        owners[(slot < 0) | (description < 0)] = -1
        # a value does not leave the setup or the step of its call: groups are those of calls
        is_setup = np.append(self._streams[number].enters["phase"] == Phase.SETUP, False)
        owners[is_setup[owners] != (values["phase"] == Phase.SETUP)] = -1
        self.orphans.append(int((owners < 0).sum()))
        return owners


class _ByPart:
    """Rows by the number of their part."""

    def __init__(self, part: NDArray[np.int64]) -> None:
        is_sorted = not len(part) or bool((np.diff(part) >= 0).all())
        self._order = None if is_sorted else np.argsort(part, kind="stable")
        part = part if self._order is None else part[self._order]
        self._starts = np.searchsorted(part, np.arange(int(part.max(initial=-1)) + 2))

    def of(self, part: int) -> Rows:
        if part + 1 >= len(self._starts):
            return slice(0)
        rows = slice(*self._starts[part : part + 2].tolist())
        return rows if self._order is None else self._order[rows]


def _groups_of_calls(stream: RankStream) -> tuple[list[Group], NDArray[np.int64]]:
    """Return the groups of a stream, and the number of each call's group among them."""
    enters, life = stream.enters, stream.stream.incarnation
    codes = step_codes(enters["mode"], enters["step"])
    codes[enters["phase"] == Phase.SETUP] = _SETUP
    distinct, numbers = np.unique(codes, return_inverse=True)
    groups = [
        Group(life, True, int(Mode.TRAIN), 0)
        if code == _SETUP
        else Group(life, False, code >> 32, code & 0xFFFF_FFFF)
        for code in distinct.tolist()
    ]
    return groups, numbers.reshape(-1)


def _parts_of_groups(rows: Sequence[int]) -> list[int]:
    """Return the part of each group: as many of them together as have few rows."""
    parts: list[int] = []
    room = 0
    for count in rows:
        room -= count
        if room < 0:
            parts.append(parts[-1] + 1 if parts else 0)
            room = _MOST_ROWS - count
        else:
            parts.append(parts[-1])
    return parts


def _chosen(samples: SampleSketches, firsts: NDArray[np.int64], rows: Rows) -> SampleSketches:
    heads = samples.heads[rows]
    if len(heads) == len(samples.heads):
        return samples
    first = firsts[rows]
    counts = heads["count"].astype(np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return SampleSketches(heads, samples.rows[np.repeat(first, counts) + within])
