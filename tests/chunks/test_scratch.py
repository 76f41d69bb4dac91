"""Tensors in a file without a name: what is held, found, let go, and refused."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rankscope.chunks.scratch import ByteArray, HeldBytes, Scratch
from tests import forked


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path, 1 << 30)


def some(seed: int, nbytes: int) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def keep(scratch: Scratch, reference: int, data: ByteArray) -> HeldBytes:
    held = scratch.write(reference, "uint8", (len(data),), (data,))
    assert held is not None
    scratch.commit(held)
    return held


def bytes_of(scratch: Scratch) -> dict[int, bytes]:
    return {reference: data.tobytes() for reference, (_, data) in scratch.held().items()}


def test_it_holds_what_was_written_and_leaves_no_name(scratch: Scratch, tmp_path: Path) -> None:
    given = {n: some(n, size) for n, size in enumerate((0, 1, 7, 64, 4095, 4096, 1 << 20, 12345))}
    for reference, data in given.items():
        keep(scratch, reference, data)
    assert bytes_of(scratch) == {n: data.tobytes() for n, data in given.items()}
    assert list(tmp_path.iterdir()) == []


def test_dtype_and_shape_decide_the_size(scratch: Scratch) -> None:
    data = some(0, 24)
    held = scratch.write(1, "float32", (2, 3), (data[:5], data[5:]))
    assert held is not None and (held.nbytes, held.dtype, held.shape) == (24, "float32", (2, 3))
    with pytest.raises(ValueError, match="takes 24 bytes, 20 were given"):
        scratch.write(2, "float32", (2, 3), (data[:20],))
    assert scratch.write(2, "float32", (2, 3), (data,)) is not None


@pytest.mark.parametrize("size", [0, 3, 16, 17, 40, 1000, 5001])
def test_equal_bytes_of_one_kind_are_found(scratch: Scratch, size: int) -> None:
    data = some(1, size)
    held = keep(scratch, 1, data)
    assert scratch.find("uint8", (size,), data.copy()) == held
    assert scratch.find("int8", (size,), data) is None
    assert scratch.find("uint8", (size, 1), data) is None


def test_bytes_that_are_alike_at_their_ends_are_told_apart(scratch: Scratch) -> None:
    data = some(1, 4096)
    held = keep(scratch, 1, data)
    for place in (16, 2000, 4079):
        other = data.copy()
        other[place] ^= 1
        assert scratch.find("uint8", (4096,), other) is None
        keep(scratch, place, other)
        found = scratch.find("uint8", (4096,), other)
        assert found is not None and found.reference == place
    assert scratch.find("uint8", (4096,), data) == held


def test_what_is_not_committed_is_neither_held_nor_found(scratch: Scratch) -> None:
    data = some(1, 100)
    first = scratch.write(1, "uint8", (100,), (data,))
    assert first is not None and scratch.find("uint8", (100,), data) is None
    scratch.withdraw(first)
    second = keep(scratch, 2, some(2, 100))
    assert second.begin == first.begin and list(scratch.held()) == [2]


def test_the_place_of_what_is_let_go_is_used_again(scratch: Scratch) -> None:
    first, kept = keep(scratch, 1, some(1, 5000)), keep(scratch, 2, some(2, 5000))
    scratch.release(1)
    scratch.release(1)
    scratch.release(77)
    assert scratch.find("uint8", (5000,), some(1, 5000)) is None
    assert keep(scratch, 3, some(3, 5010)).begin == first.begin  # the same, rounded
    assert bytes_of(scratch) == {2: some(2, 5000).tobytes(), 3: some(3, 5010).tobytes()}
    assert scratch.find("uint8", (5000,), some(2, 5000)) == kept


def test_beyond_the_limit_nothing_is_asked_for(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 10_000)

    def pieces() -> Iterator[ByteArray]:
        raise AssertionError("asked for")
        yield

    keep(scratch, 1, some(1, 8000))
    assert scratch.write(2, "uint8", (4000,), pieces()) is None
    assert scratch.limit_bytes == 10_000
    scratch.release(1)
    assert keep(scratch, 2, some(2, 8000)).begin == 0


def test_a_failing_piece_gives_the_place_back(scratch: Scratch) -> None:
    def pieces() -> Iterator[ByteArray]:
        yield some(1, 10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scratch.write(1, "uint8", (100,), pieces())
    assert keep(scratch, 2, some(2, 100)).begin == 0


def test_who_writes_into_what_is_held_changes_it_for_himself(scratch: Scratch) -> None:
    keep(scratch, 1, some(1, 9000))
    data = scratch.held()[1][1]
    data[:] = 0
    assert os.pread(scratch._file.number, 9000, 0) == some(1, 9000).tobytes()


def test_its_bytes_outlive_it_and_its_descriptor_does_not(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 1 << 20)
    keep(scratch, 1, some(1, 9000))
    descriptor, data = scratch._file.number, scratch.held()[1][1]
    del scratch
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert data.tobytes() == some(1, 9000).tobytes()


def test_a_file_of_the_program_under_its_number_is_left_alone(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 1 << 20)
    keep(scratch, 1, some(1, 9000))
    number = scratch._file.number
    os.close(number)
    with open(tmp_path / "own", "w+b") as own:
        assert own.fileno() == number or os.dup2(own.fileno(), number) == number
        with pytest.raises(OSError, match="the program has closed it"):
            scratch.write(2, "uint8", (100,), (some(2, 100),))
        assert bytes_of(scratch) == {1: some(1, 9000).tobytes()}
        del scratch
        gc.collect()
        os.fstat(number)
        assert (tmp_path / "own").read_bytes() == b""
    with contextlib.suppress(OSError):
        os.close(number)


def test_descriptors_that_were_all_closed_and_given_anew_stay_open(tmp_path: Path) -> None:
    code = (
        "import gc, os, numpy as np\n"
        "from pathlib import Path\n"
        "from rankscope.chunks.scratch import Scratch\n"
        "scratch = Scratch(Path('.'), 1 << 20)\n"
        "data = np.arange(100, dtype=np.uint8)\n"
        "scratch.commit(scratch.write(1, 'uint8', (100,), (data,)))\n"
        "os.closerange(3, 100)\n"
        "mine = [os.open('mine', os.O_RDWR | os.O_CREAT) for _ in range(6)]\n"
        "held = scratch.held()[1][1]\n"
        "del scratch\n"
        "gc.collect()\n"
        "assert (held == data).all()\n"
        "del held\n"
        "gc.collect()\n"
        "[os.fstat(number) for number in mine]\n"
        "assert os.path.getsize('mine') == 0\n"
    )
    forked.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


def test_without_room_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        Scratch(tmp_path, 0)


def test_closed_it_gives_everything_up(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 1 << 20)
    keep(scratch, 1, some(1, 9000))
    number = scratch._file.number
    scratch.close()
    scratch.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert scratch.held() == {}
