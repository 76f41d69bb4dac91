"""What no rank writes is set aside and named, and the trace of all that is sound is built."""

from __future__ import annotations

import copy
import json
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.errors import TraceVersionError
from rankscope.run.folders import INDEX_NAME, REPLICA_FOLDER, STEPS_FOLDER
from rankscope.spool.recordformat import CELL_BYTES, HEADER_BYTES, RecordKind
from rankscope.tree.build import build, recover
from rankscope.tree.reader import open_trace
from tests.lab.fuzz import samples
from tests.lab.fuzz.decoders import run_command
from tests.tree.ranks_on_paper import PaperRank

_OTHER = ("text", -1, 1 << 70, 2.5, None, True, [[1]], {"a": 1}, ["x"], [1 << 40], [3, 3])
"""Of other types than a field has, or out of its bounds."""


@pytest.fixture(scope="module", autouse=True)
def _cleared() -> Iterator[None]:
    yield
    samples.clear()


def changed_job(folder: Path, change: Any, name: str = "ddp") -> Path:
    """The records of a golden job, in which definitions of rank 1 are changed."""
    (folder / REPLICA_FOLDER).mkdir(parents=True)
    for replica in samples.replicas(name):
        data = replica.read_bytes()
        if replica.name.startswith("rank00001"):
            data = samples.redefined(data, change)
        (folder / REPLICA_FOLDER / replica.name).write_bytes(data)
        marker = replica.with_suffix(".json")
        fields = json.loads(marker.read_text()) | {"committed": len(data)}
        (folder / REPLICA_FOLDER / marker.name).write_text(json.dumps(fields))
    return folder


def first_of_kinds(name: str = "ddp") -> Iterator[dict[str, Any]]:
    """One definition of each kind that a golden job has."""
    seen = set()
    for fields in samples.definitions():
        if fields["kind"] not in seen:
            seen.add(fields["kind"])
            yield fields


FIELDS = sorted(
    {(d["kind"], field) for d in samples.definitions() for field in d} - {("rank", "id")}
)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in FIELDS}))
def test_a_definition_with_any_field_wrong_costs_only_itself(tmp_path, kind):
    """A definition of the kind without the field, and with each odd value there, all in one job."""
    (sound,) = [each for each in first_of_kinds() if each["kind"] == kind]
    if kind == "inside":
        sound = {**sound, "root": 901}  # of no root: those that make sense say nothing here
    bad = []
    for field in sound:
        for odd in (*_OTHER, ...):
            fields = {**copy.deepcopy(sound), "id": 900}
            if odd is ...:
                del fields[field]
            elif (field, odd) != ("run_id", "text"):  # that is another run
                fields[field] = odd
            bad.append(fields)
    replica = changed_job(tmp_path / "job", lambda fields: None) / REPLICA_FOLDER
    path = replica / "rank00001.0.cells"
    data = path.read_bytes()
    first = CELL_BYTES * (int.from_bytes(data[6:8], "little") + 1)
    more = b"".join(
        samples.record(RecordKind.DEFINITION, struct.pack("<I", len(text)) + text)
        for text in map(samples.packed, bad)
    )
    path.write_bytes(data[:first] + more + data[first:])
    recover([tmp_path / "job"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    sound_trace = open_trace(samples.tree("ddp"))
    assert [node.id for node in trace.walk()] == [node.id for node in sound_trace.walk()]
    zero, one = trace.completeness["ranks"]
    assert zero["complete"] and not zero["notes"]
    assert not one["complete"]
    (note,) = [note for note in one["notes"] if "definitions are set aside" in note]
    assert int(note.split()[0]) >= len(sound), note


def test_every_command_reads_a_job_whose_definitions_of_one_rank_are_all_wrong(tmp_path):
    def wrong(fields: dict[str, Any]) -> dict[str, Any]:
        return {"id": fields["id"], "kind": fields["kind"], "path": 3, "shape": "x", "axes": {}}

    job = changed_job(tmp_path / "job", wrong, "fsdp2_tp")
    for command in (["show"], ["show", "--full"], ["verify"], ["check"]):
        assert run_command(command, job)
    said = run_command(["recover", "--out", "OUT"], job)
    assert "incomplete: see" in said
    verified = run_command(["verify"], job)
    assert "definitions are set aside, which no rank writes" in verified


def test_a_collector_keeps_the_records_of_which_some_were_set_aside(tmp_path):
    out = changed_job(
        tmp_path / "job", lambda fields: {**fields, "path": 7} if "path" in fields else None
    )
    build(out)
    assert (out / REPLICA_FOLDER).is_dir(), "their bytes may say more to somebody else"
    (note,) = open_trace(out).completeness["ranks"][1]["notes"][:1]
    assert re.match(
        r"\d+ definitions are set aside, which no rank writes: path of a module is 7", note
    )


def test_a_rank_of_a_newer_format_is_named_and_the_others_are_built(tmp_path):
    def newer(fields: dict[str, Any]) -> dict[str, Any] | None:
        return {**fields, "format": 99} if fields["kind"] == "rank" else None

    recover([changed_job(tmp_path / "job", newer)], tmp_path / "out")
    zero, one = open_trace(tmp_path / "out").completeness["ranks"]
    assert zero["complete"] and not one["complete"]
    assert "rank 1 wrote records of format 99" in one["notes"][0]
    PaperRank(tmp_path / "spools", identity={"format": 99}).end()
    with pytest.raises(TraceVersionError, match="format 99"):
        recover([tmp_path / "spools"], tmp_path / "none")


def test_a_world_that_one_rank_makes_up_is_told_in_a_few_words(tmp_path):
    rank = PaperRank(tmp_path / "spools", world_size=1 << 20)
    rank.end()
    document = recover([tmp_path / "spools"], tmp_path / "out")
    assert document.completeness["missing"] == f"1-{(1 << 20) - 1}"


# ---- records ------------------------------------------------------------------------------------


def patched(folder: Path, kind: RecordKind, at: int, number: bytes, count: int = 1) -> None:
    """Change bytes in the payload of some records of a kind, with crcs that are right."""
    (path,) = folder.glob("rank*/*.cells")
    cells = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, CELL_BYTES).copy()
    rows = np.flatnonzero((cells[:, 4] == kind) & (cells[:, 5] == 1))[-count:]
    for row in rows.tolist():
        begin = HEADER_BYTES + at
        cells[row, begin : begin + len(number)] = np.frombuffer(number, np.uint8)
        crc = zlib.crc32(cells[row, 4:].tobytes())
        cells[row, :4] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    path.write_bytes(cells.tobytes())


NEVER = ((1 << 64) - 1).to_bytes(8, "little")
CASES = {
    "call at no time": (RecordKind.ENTER, 16, NEVER, "ENTER with time out of range"),
    "end at no time": (RecordKind.EXIT, 8, NEVER, "EXIT with time out of range"),
    "value at no time": (RecordKind.VALUE, 8, NEVER, "VALUE with time out of range"),
    "elements without end": (RecordKind.VALUE, 32, NEVER, "VALUE with element count out of range"),
    "call inside itself": (RecordKind.ENTER, 8, bytes(8), "a call inside one that began later"),
    "last record": (RecordKind.END, 8, NEVER, "END with counts out of range"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_record_out_of_its_bounds_costs_only_itself(tmp_path, case):
    kind, at, number, said = CASES[case]
    rank = PaperRank(tmp_path / "spools")
    for step in range(3):
        with rank.call(step=step) as call:
            rank.value(call, "output", np.arange(6, dtype=np.float32))
    rank.end()
    if case == "call inside itself":
        number = (1 << 40).to_bytes(8, "little")
    patched(tmp_path / "spools", kind, at, number)
    recover([tmp_path / "spools"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    (rank_state,) = trace.completeness["ranks"]
    (note,) = [note for note in rank_state["notes"] if "set aside" in note]
    assert note.startswith("1 record is set aside, which no rank writes: ") and said in note
    assert not trace.is_complete
    assert len(trace.steps) >= 2


def test_a_digest_whose_counts_contradict_each_other_is_no_digest(tmp_path):
    rank = PaperRank(tmp_path / "spools")
    with rank.call() as call:
        rank.value(call, "output", np.arange(6, dtype=np.float32))
    rank.end()
    patched(tmp_path / "spools", RecordKind.VALUE, 32, (2).to_bytes(8, "little"))
    (path,) = (tmp_path / "spools").glob("rank*/*.cells")
    cells = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, CELL_BYTES).copy()
    (row,) = np.flatnonzero((cells[:, 4] == RecordKind.VALUE) & (cells[:, 5] == 1))
    cells[row + 1, HEADER_BYTES : HEADER_BYTES + 8] = (9, 0, 0, 0, 0, 0, 0, 0)  # NaNs
    cells[row + 1, :4] = np.frombuffer(
        zlib.crc32(cells[row + 1, 4:].tobytes()).to_bytes(4, "little"), np.uint8
    )
    path.write_bytes(cells.tobytes())
    recover([tmp_path / "spools"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    (node,) = trace.walk()
    assert node.slots[0].per_rank() == {0: None}
    (note,) = trace.completeness["ranks"][0]["notes"]
    assert "digest whose counts contradict each other" in note


# ---- files of a tree ----------------------------------------------------------------------------


def test_recover_names_the_files_of_a_grown_tree_that_are_damaged(tmp_path):
    growing = tmp_path / "growing"
    shutil.copytree(samples.growing_tree("ddp"), growing)
    assert (growing / STEPS_FOLDER / INDEX_NAME).exists()
    values = sorted((growing / STEPS_FOLDER).glob("*.safetensors"))[0]
    data = bytearray(values.read_bytes())
    data[:8] = (1 << 50).to_bytes(8, "little")
    values.write_bytes(data)
    said = run_command(["recover", "--out", "OUT"], growing)
    assert "incomplete: see" in said
    verified = run_command(["verify"], growing)
    assert f"{STEPS_FOLDER}/{values.name}: header of" in verified


def test_every_command_names_a_damaged_step_file(tmp_path):
    shutil.copytree(samples.tree("ddp"), tmp_path / "trace")
    path = tmp_path / "trace" / STEPS_FOLDER / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "000000.safetensors: a column does not fit the file" in run_command(
        ["verify"], tmp_path / "trace"
    )
    for command in (["show"], ["show", "--full"], ["check"]):
        assert "000000.safetensors: a column does not fit" in run_command(
            command, tmp_path / "trace"
        )


def test_a_stream_whose_settled_begin_is_damaged_is_named_and_the_others_are_built(tmp_path):
    job = changed_job(tmp_path / "job", lambda fields: None)
    (job / REPLICA_FOLDER / "rank00001.0.settled").write_bytes(b"rsSETTL1" + bytes(80))
    recover([job], tmp_path / "out")
    zero, one = open_trace(tmp_path / "out").completeness["ranks"]
    assert zero["complete"] and not one["complete"] and one["received"] == 0
    assert "rank00001.0.settled: is damaged" in one["notes"][0]
    assert run_command(["show"], job)


def test_a_segment_that_is_none_costs_only_its_stream(tmp_path):
    for number in range(2):
        rank = PaperRank(tmp_path / "spools", number, 2)
        with rank.call() as call:
            rank.value(call, "output", np.arange(6, dtype=np.float32))
        rank.end()
    (segment,) = (tmp_path / "spools" / "rank00001.0").glob("*.cells")
    segment.write_bytes(segment.read_bytes()[:100])
    recover([tmp_path / "spools"], tmp_path / "out")
    zero, one = open_trace(tmp_path / "out").completeness["ranks"]
    assert zero["complete"] and not one["complete"]
    assert "100 bytes are not a segment" in one["notes"][0]
