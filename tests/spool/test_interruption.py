"""Signals, forks and kills in the middle of writes: what was committed stays, once, in order."""

import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rankscope.errors import SpoolError
from rankscope.run.processes import is_alive
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.interrupts import interrupting
from tests.spool.streams import SMALL, enter, samples, stream_bytes, value
from tests.waiting import wait_until


class Moved:
    """Where retired segments go, so that a storm may last longer than the spool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def __call__(self, path: Path, offset: int) -> None:
        os.rename(path, self.folder / path.name)

    def bytes_with(self, stream: Path) -> bytes:
        kept = sorted(self.folder.iterdir())
        return b"".join(path.read_bytes() for path in kept) + stream_bytes(stream)


def one_record(writer: SpoolWriter, number: int) -> bool:
    """Write record `number`, of a size that depends on it."""
    match number % 4:
        case 0:
            return writer.write(RecordKind.VALUE, value(number))
        case 1:
            return writer.write(RecordKind.SAMPLES, samples(number, number % 30))
        case _:
            return writer.write(RecordKind.ENTER, enter(number))


def numbers_in(whole: bytes) -> list[int]:
    """The numbers of the records in a stream, in order."""
    found = records(whole)
    assert found.committed_bytes == len(whole)
    hot = (RecordKind.VALUE, RecordKind.SAMPLES, RecordKind.ENTER)
    return [
        int.from_bytes(found.payload(position)[:8], "little")
        for position in range(len(found))
        if found.kind[position] in hot
    ]


def test_a_storm_of_keyboard_interrupts_leaves_no_hole_and_loses_no_confirmed_record(tmp_path):
    moved = Moved(tmp_path / "moved")
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL, retire=moved)
    confirmed, numbers = [], itertools.count(1)

    def write():
        for number in itertools.islice(numbers, 150):
            if one_record(writer, number):
                confirmed.append(number)

    with interrupting(random.Random(3), 1e-5, 4e-4) as is_interrupted:
        interrupts = sum(is_interrupted(write) for _ in range(600))
    writer.close()
    assert interrupts > 100
    found = numbers_in(moved.bytes_with(tmp_path / "s"))
    assert found == sorted(set(found))
    assert set(confirmed) <= set(found)
    # At most the record under way at an interrupt is there without having been confirmed.
    assert len(found) - len(confirmed) <= interrupts


def test_a_write_nested_in_a_write_by_a_handler_is_dropped_and_counted(tmp_path):
    moved = Moved(tmp_path / "moved")
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL, retire=moved)
    nested = {True: 0, False: 0}

    def write_too(signal_number, frame):
        nested[writer.write(RecordKind.ENTER, enter(1 << 40))] += 1

    before = signal.signal(signal.SIGALRM, write_too)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        for number in range(1, 20_000):
            assert one_record(writer, number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.close()
    found = numbers_in(moved.bytes_with(tmp_path / "s"))
    assert [number for number in found if number < 1 << 40] == list(range(1, 20_000))
    assert found.count(1 << 40) == nested[True]
    assert writer.dropped_records == nested[False] > 0


def test_a_thread_that_died_inside_a_write_does_not_stop_the_others(tmp_path):
    """As libraries end a thread that works too long: an exception is put into it."""
    moved = Moved(tmp_path / "moved")
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL, retire=moved)
    numbers, confirmed = itertools.count(1), []

    def write():
        number = next(numbers)
        is_written = one_record(writer, number)
        if is_written:
            confirmed.append(number)
        return is_written

    def write_until_ended(has_begun):
        try:
            while True:
                write()
                has_begun.set()
        except SystemExit:
            return

    for _ in range(100):
        has_begun = threading.Event()
        thread = threading.Thread(target=write_until_ended, args=(has_begun,))
        thread.start()
        assert has_begun.wait(60)
        end = ctypes.py_object(SystemExit)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), end) == 1
        thread.join()
        assert write(), "nothing is refused because of the dead thread"
    writer.close()
    found = numbers_in(moved.bytes_with(tmp_path / "s"))
    assert found == sorted(set(found))
    assert set(confirmed) <= set(found) and len(found) <= len(confirmed) + 100


def test_a_forked_child_never_writes_and_leaves_the_lock_with_its_parent(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    writer.write(RecordKind.ENTER, enter(1))
    child = os.fork()
    if child == 0:
        wrote = writer.write(RecordKind.ENTER, enter(2)) or not writer.is_closed
        writer.close()
        os._exit(1 if wrote else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = f"""
import sys
from pathlib import Path
from rankscope.run.processes import is_alive
sys.exit(0 if is_alive(Path({str(tmp_path / "s")!r})) else 1)
"""
    assert (
        subprocess.run([sys.executable, "-c", code], env=with_path(), check=False).returncode == 0
    )
    assert writer.write(RecordKind.ENTER, enter(3))
    writer.close()
    assert numbers_in(stream_bytes(tmp_path / "s")) == [1, 3]


def test_a_stream_has_one_writer_here_and_anywhere(tmp_path):
    writer = SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    with pytest.raises(SpoolError, match="this process"):
        SpoolWriter(tmp_path / "s", limit_bytes=SMALL)
    assert is_alive(tmp_path / "s")
    code = f"""
from pathlib import Path
from rankscope.errors import SpoolError
from rankscope.spool.writer import SpoolWriter
try:
    SpoolWriter(Path({str(tmp_path / "s")!r}), limit_bytes={SMALL})
except SpoolError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=with_path(), capture_output=True, text=True, check=True
    )
    assert "another process writes this stream" in done.stdout
    assert is_alive(tmp_path / "s")
    assert writer.write(RecordKind.ENTER, enter(1))
    writer.close()


WRITE_FOR_EVER = """
import os, sys
from pathlib import Path
from rankscope.spool.writer import SpoolWriter
from tests.spool.test_interruption import one_record
folder = Path(sys.argv[1])
writer = SpoolWriter(folder / "s", limit_bytes=256 << 20)
confirmed = os.open(folder / "confirmed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0
while True:
    number += 1
    one_record(writer, number)
    if number % 16 == 0:
        os.write(confirmed, number.to_bytes(8, "little"))
"""


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("seed", range(4))
def test_a_process_killed_at_any_moment_keeps_every_committed_record(tmp_path, seed):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], env=with_path()
    )
    assert wait_until((tmp_path / "confirmed").exists)
    assert is_alive(tmp_path / "s")
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    process.kill()
    process.wait()
    assert not is_alive(tmp_path / "s")
    raw = (tmp_path / "confirmed").read_bytes()
    last = int.from_bytes(raw[len(raw) // 8 * 8 - 8 : len(raw) // 8 * 8], "little") if raw else 0
    with StreamReader(tmp_path / "s") as reader:
        whole = b"".join(reader.chunks())
    found = numbers_in(whole)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= last
