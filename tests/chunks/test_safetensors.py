"""The safetensors format: what is written others read; what does not fit its file is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from rankscope.errors import ChunkError, TraceError
from rankscope.spool.chunks.safetensors import (
    LENGTH_BYTES,
    MappedFile,
    as_array,
    framed_header,
    parse_entries,
    write_arrays,
    write_tensor,
    write_tensors,
)

ARRAYS = {
    "a": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.empty((0, 5), np.int32),
    "b": np.array([True, False, True]),
}


def written(path: Path) -> Path:
    write_arrays(path, {key: lambda key=key: ARRAYS[key] for key in ARRAYS}, {"format": "x/1"})
    return path


def test_arrays_of_shapes_nobody_knew_before_are_read_by_safetensors_and_here(tmp_path):
    path = written(tmp_path / "arrays")
    file, loaded = MappedFile(path, ChunkError), load_file(path)
    about, entries = parse_entries(file.header, len(file.data))
    assert about["format"] == "x/1" and file.is_unchanged(about)
    assert [*loaded] and {key for key, *_ in entries} == loaded.keys() == ARRAYS.keys()
    for key, dtype, shape, begin, end in entries:
        found = as_array(file.data[begin:end], dtype, shape)
        assert found.dtype == ARRAYS[key].dtype and np.array_equal(found, ARRAYS[key])
        assert np.array_equal(loaded[key], found)


@pytest.mark.parametrize("place", [9, 40, -1], ids=["format", "header", "data"])
def test_any_byte_that_was_changed_is_seen(tmp_path, place):
    path = written(tmp_path / "arrays")
    about, _ = parse_entries((file := MappedFile(path, ChunkError)).header, len(file.data))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert not MappedFile(path, ChunkError).is_unchanged(about)
    assert not MappedFile(path, ChunkError).is_unchanged({})
    assert not MappedFile(path, ChunkError).is_unchanged({"xxh3_64": "\ud800"})


def test_tensors_are_written_one_after_the_other_under_keys_of_any_characters(tmp_path):
    path, odd = tmp_path / "tensors", 'a"\\\x00ü'
    made = [(key, "uint8", (3,), lambda: np.arange(3, dtype=np.uint8)) for key in (odd, "b")]
    assert write_tensors(path, made) == path.stat().st_size
    assert {key: each.tolist() for key, each in load_file(path).items()} == {
        odd: [0, 1, 2], "b": [0, 1, 2],
    }  # fmt: skip


def test_one_tensor_takes_another_name_of_its_file_and_never_writes_through_one(tmp_path):
    first, second = f"{tmp_path}/first", f"{tmp_path}/second"
    data = np.arange(200_000, dtype=np.uint8)
    write_tensor(first, "uint8", (200_000,), data)
    write_tensor(second, "uint8", (200_000,), data, first)
    assert os.path.samefile(first, second)
    write_tensor(second, "uint8", (1,), data[:1])
    assert np.array_equal(load_file(first)["data"], data)
    assert load_file(second)["data"].tolist() == [0]
    write_tensor(first, "uint8", (1,), data[:1], f"{tmp_path}/gone")
    assert load_file(first)["data"].tolist() == [0], "no such file to link to: it is written"


def entry(begin: int, end: int, shape: object = None, dtype: object = "U8") -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 7), "b": entry(6, 10)},
        {"a": entry(0, 5), "b": entry(6, 10)},
        {"a": entry(0, 9)},
        {"a": entry(0, 11)},
        {"a": entry(0, 10, [9])},
        {"a": entry(0, 10, [5], "F32")},
        {"a": entry(0, 10, [-1, -10])},
        {"a": entry(0, 10, [10.0])},
        {"a": entry(0, 10, dtype=["U8"])},
        {"a": entry(0, 10), "b": entry(10, 10, [0, 1 << 70])},
        {"a": entry(0, 10, [10] + [1] * 70)},
        {"a": {"dtype": "U8", "shape": [10]}},
        {"a": entry(0, 10), "__metadata__": {"rank": 3}},
        ["a"],
    ],
    ids=["overlap", "hole", "less", "more", "rows", "itemsize", "negative", "fraction", "dtype",
         "huge", "dims", "placeless", "metadata", "list"],
)  # fmt: skip
def test_a_header_that_does_not_fit_what_follows_is_refused(header):
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=r"header|begins at"):
        parse_entries(framed_header(text)[LENGTH_BYTES:], 10)
    sound = framed_header(json.dumps({"a": entry(0, 10)}).encode())
    assert parse_entries(sound[LENGTH_BYTES:], 10)[1] == [("a", "uint8", (10,), 0, 10)]
    assert load(sound + bytes(10))["a"].tolist() == [0] * 10


def test_a_file_shorter_than_its_header_says_is_refused_as_its_reader_wants(tmp_path):
    path = tmp_path / "short"
    for data in (
        b"",
        b"123",
        framed_header(b"{}")[:-1],
        (1 << 60).to_bytes(8, "little") + bytes(99),
    ):
        path.write_bytes(data)
        for error in (ChunkError, TraceError):
            with pytest.raises(error, match="short: header of"):
                MappedFile(path, error)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        MappedFile(tmp_path / "nowhere", TraceError)
