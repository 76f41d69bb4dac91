"""No decoder lets anything but rankscope's own errors out, whatever the bytes are.

`python -m tests.lab.fuzz --inputs N` does the same for as long as one likes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.companion.protocol import decode
from rankscope.errors import ChunkError, LayoutError, RankscopeError, SpoolError, WireError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.spool.chunks.chunkfiles import parse_header
from rankscope.spool.recordcolumns import COLUMNS, records
from rankscope.spool.recordformat import CELL_BYTES, DEFINITION_LENGTH, decode_definition
from tests.lab.fuzz import samples
from tests.lab.fuzz.__main__ import fuzz
from tests.lab.fuzz.decoders import DECODERS, Decoder
from tests.lab.fuzz.mutations import gentle, nested, raw, sealed

_FEW = {"built": 12, "opened": 25, "golden": 15, "commands": 30, "records": 100, "values": 200}
"""Of those that take milliseconds each; of the others a thousand."""


@pytest.fixture(scope="module", autouse=True)
def _cleared() -> Iterator[None]:
    yield
    samples.clear()


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_raises_nothing_foreign(decoder: Decoder):
    found = fuzz(decoder, _FEW.get(decoder.name, 1000), seed=18)
    assert not found.faults, found.first


@pytest.mark.soak
def test_a_long_run_finds_nothing_and_stays_within_its_memory():
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.fuzz", "--inputs", "1000000", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# ---- any value, not only damaged ones ------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(
    ["rank", "root", "inside", "module", "mark", "slot", "meta", "mesh", "text", "group"]
    + ["collective", "layout", "raised", "not_kept", "copied", "new"]
)
names = st.sampled_from(
    ["id", "kind", "rank", "world_size", "path", "class", "root", "name", "shape", "axes", "ranks"]
    + ["members", "text", "fact", "dtype", "ranges", "op", "group", "async", "issuer", "format"]
)


@settings(max_examples=150, deadline=None)
@given(kinds, st.integers(1, 9), st.dictionaries(names, anything, max_size=8))
def test_a_definition_of_any_fields_is_taken_or_refused(kind, number, fields):
    packed = msgpack.packb({**fields, "id": number, "kind": kind}, unicode_errors="replace")
    try:
        found = decode_definition(DEFINITION_LENGTH.pack(len(packed)) + packed)
    except SpoolError:
        return
    assert found["id"] == number and found["kind"] == kind
    assert kind != "new" or len(found) == 2, "fields that nobody reads are left out"


@settings(max_examples=150, deadline=None)
@given(st.lists(anything, max_size=9), st.binary(max_size=80))
def test_a_message_of_any_fields_is_taken_or_refused(fields, body):
    header = msgpack.packb(fields, unicode_errors="replace")
    for parts in ([header], [header, body], [body], []):
        try:
            decode(parts)
        except WireError:
            continue


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=56, max_size=56), min_size=1, max_size=6), st.integers(0, 12))
def test_any_cells_with_a_valid_crc_are_read(payloads, kind):
    cells = b""
    for payload in payloads:
        cell = bytes([kind, 1, 0, 0]) + payload
        cells += zlib.crc32(cell).to_bytes(4, "little") + cell
    found = records(cells)
    assert len(found) == (len(cells) // CELL_BYTES if kind else 0)
    for each in COLUMNS:
        positions, rows = found.columns(each)
        assert len(positions) == len(rows)
    found.values(), found.definitions()


@settings(max_examples=60, deadline=None)
@given(anything, st.integers(0, 1 << 40))
def test_a_chunk_header_of_any_json_is_refused(data, size):
    with pytest.raises(ChunkError):
        parse_header(json.dumps(data).encode(), size)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='axes="dp=12,[]layout{}\n placements.0²', max_size=60))
def test_a_layout_file_of_any_text_is_taken_or_refused(text):
    try:
        LayoutFile.parse(text)
    except LayoutError:
        return


def test_lists_nested_without_end_are_refused():
    for text in ("a=" + "[" * 100_000, "a=" + "{b=" * 20_000):
        with pytest.raises(LayoutError, match="is not TOML"):
            LayoutFile.parse(text)
    with pytest.raises(RankscopeError):
        parse_header(b"[" * 1_000_000 + b"}", 0)


# ---- the fuzzer itself ---------------------------------------------------------------------------


def test_damage_comes_again_from_its_seed_and_changes_something():
    data = {"a": [1, 2, {"b": "text"}], "c": 1.5}
    for change, sound in ((nested, data), (gentle, data), (raw, b"some bytes of a file")):
        first = [change(random.Random(n), sound) for n in range(50)]
        assert first == [change(random.Random(n), sound) for n in range(50)]
        assert sum(each != sound for each in first) > 35
    stream = samples.small_stream()
    damaged = sealed(random.Random(1), stream)
    assert damaged != stream and len(records(damaged).cells) >= 1


def test_what_a_decoder_lets_out_is_found():
    def broken(given: int) -> None:
        if given % 100 == 7:
            raise KeyError(given)

    def numbers(_rng: random.Random) -> Iterator[int]:
        yield from range(10**9)

    found = fuzz(Decoder(name="broken", make=numbers, take=broken, share=1), 1000, seed=1)
    assert found.inputs == 1000 and found.faults.total() == 10
    assert "KeyError" in next(iter(found.first.values()))
