"""The write side: order, room, steps, closing."""

import os
import subprocess
import sys
import textwrap
import threading

import msgpack
import pytest

from rankscope.errors import SpoolError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import segment_indexes, segment_path
from rankscope.run.processes import is_alive
from rankscope.spool.recordcolumns import StreamReader, read_ending, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    PAYLOAD_BYTES,
    TO_ITS_END,
    RecordKind,
    StepEvent,
)
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.rankstreams import StreamBytes, read_stream
from tests.spool.streams import SMALL, enter, rank_definition, step, stream_bytes, value, write_some


def write_step(writer: SpoolWriter, number: int, count: int) -> int:
    """Write a whole step of `count` values; return how many were taken."""
    writer.write(RecordKind.STEP, step(number, StepEvent.BEGIN))
    taken = sum(writer.write(RecordKind.VALUE, value(number)) for _ in range(count))
    writer.write(RecordKind.STEP, step(number, StepEvent.END))
    return taken


def test_records_of_every_length_come_back_whole(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    lengths = [0, 1, 55, 56, 57, 111, 112, 113, 223, 224, 225, 1000, 5000, 20000]
    for kind in (RecordKind.DEFINITION, RecordKind.ENTER, RecordKind.VALUE, RecordKind.SAMPLES):
        for length in lengths:
            assert writer.write(
                kind, bytes(range(1, 251)) * (length // 250) + b"z" * (length % 250)
            )
    writer.close()
    found = records(stream_bytes(tmp_path / "s"))
    expected = [length for _ in range(4) for length in lengths]
    for position, length in enumerate(expected):
        payload = bytes(range(1, 251)) * (length // 250) + b"z" * (length % 250)
        cells = max(1, -(-length // PAYLOAD_BYTES))
        assert found.payload(position) == payload.ljust(cells * PAYLOAD_BYTES, b"\0")
    assert found.kind[-1] == RecordKind.END


def test_segments_are_whole_files_of_one_size_that_only_the_owner_may_read(tmp_path):
    whole = write_some(tmp_path / "s", 2000)
    indexes = segment_indexes(tmp_path / "s")
    assert indexes == list(range(len(indexes)))
    assert len(indexes) > 3
    for index in indexes:
        status = segment_path(tmp_path / "s", index).stat()
        assert status.st_size == SMALL // 8
        assert status.st_blocks * 512 >= status.st_size
        assert status.st_mode & 0o777 == 0o600
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert len(whole) > 3 * SMALL // 8


def test_the_end_record_counts_what_was_committed(tmp_path):
    found = records(write_some(tmp_path / "s", 2000))
    _, ends = found.columns(RecordKind.END)
    not_filler = (found.kind != RecordKind.FILLER).sum()
    assert ends["records"][0] == not_filler - 1
    assert ends["dropped"][0] == 0


@pytest.mark.parametrize("reason", [EndReason.EXIT, EndReason.CLOSED, EndReason.SWITCHED_OFF])
def test_closing_writes_its_reason_once_and_frees_the_lock(tmp_path, reason):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    assert is_alive(tmp_path / "s")
    writer.close(reason)
    writer.close(EndReason.EXIT)
    assert writer.is_closed
    assert not is_alive(tmp_path / "s")
    assert not writer.write(RecordKind.ENTER, enter(1))
    found = records(stream_bytes(tmp_path / "s"))
    assert found.kind.tolist() == [RecordKind.END]
    assert read_ending(found).reason is reason


def test_a_full_spool_drops_whole_steps_tells_which_and_resumes_when_room_is_freed(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    writer.define(rank_definition())
    assert write_step(writer, 0, 100) == 100
    taken = write_step(writer, 1, 8000)
    assert 0 < taken < 8000
    assert writer.is_dropping
    assert write_step(writer, 2, 10) == 0
    assert write_step(writer, 3, 10) == 0
    assert writer.define(msgpack.packb({"id": 7, "kind": "slot", "name": "while full"}))
    received = bytearray()
    with StreamReader(tmp_path / "s") as reader:
        for piece in reader.chunks():
            received += piece
        reader.free_below(len(received))
        assert write_step(writer, 4, 10) == 10
        assert not writer.is_dropping
        writer.close()
        for piece in reader.chunks(len(received)):
            received += piece
    found = records(bytes(received))
    assert found.committed_bytes == len(received)
    _, gaps = found.columns(RecordKind.GAP)
    assert gaps["records"][0] == 0, "that dropping began"
    gaps = gaps[1:]
    assert len(gaps) == 1
    assert (gaps[0]["first_step"], gaps[0]["last_step"]) == (1, 3)
    # Dropped: the rest of step 1 and its end, and steps 2 and 3 with their marks.
    assert gaps[0]["records"] == 8000 - taken + 1 + 12 + 12
    assert gaps[0]["records"] == writer.dropped_records == read_ending(found).dropped_records
    assert 7 in [entry["id"] for entry in found.definitions()]
    _, steps = found.columns(RecordKind.STEP)
    assert steps["step"].tolist() == [0, 0, 1, 4, 4]
    _, values = found.values()
    assert values["sequence"].tolist() == [0] * 100 + [1] * taken + [4] * 10


def test_a_definition_dropped_from_no_full_spool_precedes_the_records_that_use_it(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    write_step(writer, 0, 8000)
    for number in range(2, 3000):
        assert writer.define(msgpack.packb({"id": number, "kind": "slot", "name": "n" * 300}))
    received = bytearray()
    with StreamReader(tmp_path / "s") as reader:
        number = 1
        while write_step(writer, number, 3) != 3:
            for piece in reader.chunks(len(received)):
                received += piece
            reader.free_below(len(received))
            number += 1
            assert number < 100
        writer.close()
        for piece in reader.chunks(len(received)):
            received += piece
    found = records(bytes(received))
    ids = [entry["id"] for entry in found.definitions()]
    assert ids == list(range(2, 3000))
    at, values = found.values()
    last = found.positions(RecordKind.DEFINITION)[-1]
    assert at[values["sequence"] == number].min() > last


def test_a_spool_full_to_the_end_still_says_so(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    write_step(writer, 0, 9000)
    writer.close()
    found = records(stream_bytes(tmp_path / "s"))
    assert read_ending(found).reason is EndReason.EXIT
    assert read_ending(found).dropped_records == writer.dropped_records > 0
    assert len(found.columns(RecordKind.GAP)[1]) == 2, "that dropping began, and how much it was"
    assert len(gaps_in(stream_bytes(tmp_path / "s"))) == 1
    assert sum(segment_path(tmp_path / "s", i).stat().st_size for i in range(8)) <= SMALL


def test_train_and_eval_steps_dropped_together_get_a_gap_each(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    write_step(writer, 0, 9000)
    from rankscope.spool.recordformat import STEP

    writer.write(RecordKind.STEP, STEP.pack(0, 5, 1, StepEvent.BEGIN, 0))
    writer.close()
    _, gaps = records(stream_bytes(tmp_path / "s")).columns(RecordKind.GAP)
    gaps = gaps[gaps["records"] > 0]
    assert sorted(gaps["mode"].tolist()) == [0, 1]
    assert gaps[gaps["mode"] == 1]["first_step"].tolist() == [5]


def test_full_segments_are_retired_with_their_offset(tmp_path):
    moved: list[tuple[str, int]] = []
    (tmp_path / "kept").mkdir()

    def retire(path, offset):
        os.rename(path, tmp_path / "kept" / path.name)
        moved.append((path.name, offset))

    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL, retire=retire)
    for number in range(20_000):
        assert writer.write(RecordKind.VALUE, value(number))
    size = writer.segment_bytes
    writer.close()
    assert [offset for _, offset in moved] == [i * size for i in range(len(moved))]
    assert len(moved) * size > 4 * SMALL
    whole = b"".join((tmp_path / "kept" / name).read_bytes() for name, _ in moved)
    whole += stream_bytes(tmp_path / "s")
    assert records(whole).values()[1]["sequence"].tolist() == list(range(20_000))


def test_a_retire_that_fails_is_never_raised_and_loses_nothing(tmp_path):
    def retire(path, offset):
        raise PermissionError(13, "no")

    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL, retire=retire)
    for number in range(2000):
        writer.write(RecordKind.VALUE, value(number))
    writer.close()
    assert len(records(stream_bytes(tmp_path / "s")).values()[0]) == 2000


def test_a_record_larger_than_a_segment_is_refused_and_the_next_one_written(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    for _ in range(3):
        with pytest.raises(SpoolError, match="does not fit"):
            writer.write(RecordKind.SAMPLES, bytes(SMALL))
        assert writer.write(RecordKind.ENTER, enter(1))
    writer.close()
    assert read_ending(records(stream_bytes(tmp_path / "s"))).dropped_records == 0


def test_what_cannot_be_a_spool_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(SpoolError, match="spool-bytes"):
        SpoolWriter(tmp_path / "s", limit_bytes=1000)
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpoolError, match="--rs-spool"):
        SpoolWriter(tmp_path / "file" / "s", limit_bytes=SMALL)
    write_some(tmp_path / "used")
    with pytest.raises(SpoolError, match="earlier process"):
        SpoolWriter(tmp_path / "used", limit_bytes=SMALL)
    assert not is_alive(tmp_path / "used")


def test_a_disk_without_room_is_told_at_the_start_and_drops_steps_later(tmp_path):
    """A file size limit stands for the full disk: preallocation fails in the same place."""
    code = f"""
        import resource
        from pathlib import Path
        from rankscope.errors import SpoolError
        from rankscope.spool.writer import SpoolWriter
        from tests.spool.streams import enter, stream_bytes
        base = Path({str(tmp_path)!r})
        writer = SpoolWriter(base / "first", limit_bytes={SMALL})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        try:
            SpoolWriter(base / "second", limit_bytes={SMALL})
        except SpoolError as error:
            print(error)
        taken = sum(writer.write(2, enter(number)) for number in range(5000))
        print(taken, writer.is_dropping)
        writer.close()
        print(len(stream_bytes(base / "first")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, cwd=os.getcwd(), timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    refused, told, length = done.stdout.splitlines()
    assert "cannot reserve 128 KiB" in refused
    assert "free" in refused
    assert told.startswith("2048 True") or int(told.split()[0]) < 2048
    assert int(length) <= SMALL // 8


def test_several_threads_write_one_stream_without_losing_a_record(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=4 * SMALL)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def work(thread):
            for number in range(1500):
                assert writer.write(RecordKind.VALUE, value(thread * 10_000 + number))
                assert writer.write(RecordKind.ENTER, enter(thread * 10_000 + number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    writer.close()
    found = records(stream_bytes(tmp_path / "s"))
    for sequences in (
        found.values()[1]["sequence"],
        found.columns(RecordKind.ENTER)[1]["sequence"],
    ):
        for thread in range(4):
            own = sequences[sequences // 10_000 == thread]
            assert own.tolist() == [thread * 10_000 + number for number in range(1500)]
    assert writer.dropped_records == 0


def test_the_stream_grows_by_whole_cells_only(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    assert writer.committed_bytes == 0
    writer.write(RecordKind.ENTER, enter(1)[:20])
    assert writer.committed_bytes == CELL_BYTES
    writer.write(RecordKind.VALUE, value(1))
    assert writer.committed_bytes == 5 * CELL_BYTES
    writer.close()


def gaps_in(received: bytes) -> list[tuple[int, int, int]]:
    """Return (first step, last step, records) of each gap, as assembly reads them."""
    gaps = read_stream(StreamBytes(stream=StreamId(rank=0, incarnation=0), data=received)).gaps
    return list(zip(*(gaps[name].tolist() for name in ("first_step", "last_step", "records"))))


def test_a_rank_that_is_killed_while_it_drops_has_said_from_which_step_on(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    write_step(writer, 0, 100)
    taken = write_step(writer, 1, 9000)
    write_step(writer, 2, 10)
    assert gaps_in(stream_bytes(tmp_path / "s")) == [(1, TO_ITS_END, 0)]
    received = bytearray()
    with StreamReader(tmp_path / "s") as reader:
        for piece in reader.chunks():
            received += piece
        reader.free_below(len(received))
        assert write_step(writer, 3, 10) == 10
        for piece in reader.chunks(len(received)):
            received += piece
        first = (1, 2, 9000 - taken + 1 + 12)
        assert gaps_in(bytes(received)) == [first], "it has said how many by now"
        write_step(writer, 4, 9000)
        for piece in reader.chunks(len(received)):
            received += piece
    assert gaps_in(bytes(received)) == [first, (4, TO_ITS_END, 0)]


@pytest.mark.parametrize("closes", [False, True])
def test_a_full_disk_leaves_room_to_say_so_and_to_end_in_order(tmp_path, closes):
    """A file size limit stands for the full disk, as above."""
    code = f"""
        import os, resource
        from pathlib import Path
        from rankscope.spool.writer import SpoolWriter
        from tests.spool.test_writer import write_step
        writer = SpoolWriter(Path({str(tmp_path / "s")!r}), limit_bytes={SMALL})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        print(*(write_step(writer, number, 1000) for number in range(4)))
        if {closes}:
            writer.close()
        os._exit(print(end="", flush=True) or 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, cwd=os.getcwd(), timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    taken = [*map(int, done.stdout.split())]
    assert sum(taken) < 4000
    first = next(number for number, count in enumerate(taken) if count < 1000)
    received = stream_bytes(tmp_path / "s")
    assert read_ending(records(received)).reason is (EndReason.EXIT if closes else None)
    ((begin, last, dropped),) = gaps_in(received)
    assert (begin, last) == (first, 3 if closes else TO_ITS_END)
    assert (dropped > 4000 - sum(taken)) == closes
