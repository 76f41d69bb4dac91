"""Whoever observes a stream is handed its records in batches, each once, whatever happens."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rankscope.run.folders import segment_indexes
from rankscope.spool.recordcolumns import Records
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.spool.streams import SMALL, enter, value


def sequences(batch: Records) -> list[int]:
    return list(batch.values()[1]["sequence"].tolist())


def observed(folder: Path) -> tuple[SpoolWriter, list[list[int]]]:
    writer, batches = SpoolWriter(folder, limit_bytes=SMALL), list[list[int]]()
    writer.observers.append(lambda batch: batches.append(sequences(batch)))
    return writer, batches


def test_a_batch_has_what_was_committed_since_the_one_before(tmp_path: Path) -> None:
    writer, batches = observed(tmp_path / "s")
    for number in range(3):
        writer.write(RecordKind.VALUE, value(number))
    assert batches == [], "a write calls nobody"
    assert writer.hand_on() and writer.hand_on()
    writer.write(RecordKind.VALUE, value(3))
    writer.close()
    assert batches == [[0, 1, 2], [3]]


def test_a_full_segment_is_handed_on_before_it_is_unmapped(tmp_path: Path) -> None:
    writer, batches = observed(tmp_path / "s")
    for number in range(2000):
        assert writer.write(RecordKind.VALUE, value(number))
    full = len(segment_indexes(tmp_path / "s")) - 1
    assert full > 1 and full <= len(batches) <= 2 * full
    writer.close()
    assert [number for batch in batches for number in batch] == [*range(2000)]


def test_an_observer_may_write_and_is_not_called_inside_its_own_call(tmp_path: Path) -> None:
    writer, answers = SpoolWriter(tmp_path / "s", limit_bytes=SMALL), list[bool]()

    def observer(batch: Records) -> None:
        if sequences(batch):
            writer.write(RecordKind.ENTER, enter(7))
            answers.append(writer.hand_on())

    writer.observers.append(observer)
    writer.write(RecordKind.VALUE, value(1))
    assert writer.hand_on()
    assert answers == [False] and not writer.dropped_records
    writer.close()


def test_what_an_observer_raises_at_is_handed_to_nobody_again(tmp_path: Path) -> None:
    writer, batches = observed(tmp_path / "s")
    writer.observers.insert(0, lambda batch: 1 / (1 not in sequences(batch)))  # type: ignore[arg-type, return-value]  # raises at 1
    writer.write(RecordKind.VALUE, value(1))
    with pytest.raises(ZeroDivisionError):
        writer.hand_on()
    writer.write(RecordKind.VALUE, value(2))
    writer.close()
    assert batches == [[2]]


def test_several_threads_write_and_every_record_is_handed_on_once(tmp_path: Path) -> None:
    writer, batches = observed(tmp_path / "s")

    def write(first: int) -> None:
        for number in range(first, first + 300):
            writer.write(RecordKind.VALUE, value(number))
            if number % 50 == 0:
                writer.hand_on()

    threads = [threading.Thread(target=write, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    seen = [number for batch in batches for number in batch]
    assert sorted(seen) == sorted(1000 * n + k for n in range(4) for k in range(300))
