"""Streams from replicas, segments and both; recovery of what a killed job left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankscope.errors import FolderError, TraceError, TraceVersionError
from rankscope.run.folders import segment_indexes, segment_path
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import RecordKind
from rankscope.tree.assembly.rankstreams import read_stream
from rankscope.tree.assembly.sources import find_streams
from rankscope.tree.build import build, recover
from rankscope.tree.reader import open_trace
from tests.spool.streams import SMALL, record_begins, settle, settled, write_some
from tests.spool.test_reader import record_ends
from tests.tree.jobs import grid_job, read_valid
from tests.tree.ranks_on_paper import PaperRank

VALUE = np.arange(6, dtype=np.float32)


def busy_rank(folder, number=0, world=1, calls=200, **how):
    rank = PaperRank(folder, number, world, segment_bytes=16 << 10, **how)
    for step in range(calls):
        with rank.call(step=step) as call:
            rank.value(call, "output", VALUE + step)
    return rank


def test_a_tree_is_recovered_from_live_segments_alone(tmp_path):
    busy_rank(tmp_path / "spools").writer.close()
    recover([tmp_path / "spools"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    assert len(trace.steps) == 200
    assert trace.is_complete
    read_valid(tmp_path / "out")


def test_a_rank_that_was_killed_is_recovered_and_called_lost(tmp_path):
    rank = busy_rank(tmp_path / "spools")
    rank.writer._lock.release()  # what the kernel does when the process dies
    recover([tmp_path / "spools"], tmp_path / "out")
    (state,) = open_trace(tmp_path / "out").completeness["ranks"]
    assert state["end"] == "lost"
    assert state["committed"] == state["received"] > 0


def test_a_spool_or_replica_torn_at_any_byte_gives_exactly_its_committed_prefix(tmp_path):
    """What `recover` reads; behind the tear stand the zeros of a preallocated segment."""
    whole = write_some(tmp_path / "written", 3)
    ends = record_ends(whole)
    folder, replica = tmp_path / "spool/rank00000.0", tmp_path / "trace/spool/rank00000.0.cells"
    folder.mkdir(parents=True)
    replica.parent.mkdir(parents=True)
    for cut in range(len(whole) + 1):
        last = max(end for end in ends if end <= cut)
        segment_path(folder, 0).write_bytes(whole[:cut].ljust(SMALL // 8, b"\0"))
        replica.write_bytes(whole[:cut])
        for place in (tmp_path / "spool", tmp_path / "trace"):
            (found,) = find_streams([place])
            kept = bytes(found.data)
            # a tail of zeros that happens to be the record's own bytes makes the record whole
            assert kept[:last] == whole[:last]
            assert whole[last:].startswith(kept[last:])
            assert len(kept) == last or not any(whole[cut : len(kept)])
        assert bytes(found.data) == whole[:last]


def test_a_bit_flipped_anywhere_in_a_spool_costs_the_one_record_it_is_in(tmp_path):
    whole = write_some(tmp_path / "written", 6)
    ends = record_ends(whole)
    folder = tmp_path / "spool/rank00000.0"
    folder.mkdir(parents=True)
    chosen = random.Random(7)
    for _ in range(1000):
        at = chosen.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chosen.randrange(8)
        segment_path(folder, 0).write_bytes(bytes(damaged).ljust(SMALL // 8, b"\0"))
        (found,) = find_streams([tmp_path / "spool"])
        begin = max(end for end in ends if end <= at)
        behind = min(end for end in ends if end > at)
        # whose the records are stands in the first: without it they are nobody's
        assert bytes(found.data) == (whole[:begin] + whole[behind:] if begin else b"")
        if begin and behind < len(whole):
            assert found.notes == (
                f"bytes {begin}..{behind} are missing: add the trace folder or spool that has them",
            )
            assert found.committed == len(whole)


def test_a_replica_and_the_segments_behind_it_are_joined(tmp_path):
    """The relay freed what was acknowledged: each place holds a part."""
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    out = tmp_path / "unfinished"
    rank.ship(out, marker=False, cut=0)
    replica = out / "spool" / "rank00000.0.cells"
    whole = replica.read_bytes()
    replica.write_bytes(whole[: 40 << 10])
    for index in (0, 1):
        segment_path(rank.folder, index).unlink()
    recover([out, tmp_path / "spools"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    assert trace.is_complete
    assert len(trace.steps) == 200


def test_a_hole_between_replica_and_segments_is_said(tmp_path):
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    segment_path(rank.folder, 0).unlink()
    out = tmp_path / "unfinished"
    rank_bytes = 64 * 100
    rank_replica = out / "spool" / "rank00000.0.cells"
    rank_replica.parent.mkdir(parents=True)
    other = busy_rank(tmp_path / "copy")
    other.end()
    rank_replica.write_bytes(segment_path(other.folder, 0).read_bytes()[:rank_bytes])
    document = recover([out, tmp_path / "spools"], tmp_path / "out")
    (state,) = document.completeness["ranks"]
    assert not state["complete"]
    assert "are missing" in state["notes"][0]


def test_segments_behind_holes_are_read_and_each_hole_is_named(tmp_path):
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    indexes = segment_indexes(rank.folder)
    size = segment_path(rank.folder, 0).stat().st_size
    pieces = [segment_path(rank.folder, index).read_bytes() for index in indexes]
    assert len(pieces) > 4
    for lost in (1, 3):
        segment_path(rank.folder, lost).unlink()
    (found,) = find_streams([tmp_path / "spools"])
    kept = b"".join(piece for index, piece in enumerate(pieces) if index not in (1, 3))
    assert bytes(found.data) == kept[: len(found.data)]
    assert not any(kept[len(found.data) :])
    assert [note.partition(" are")[0] for note in found.notes] == [
        f"bytes {index * size}..{(index + 1) * size}" for index in (1, 3)
    ]
    assert found.committed == len(found.data) + 2 * size
    recover([tmp_path / "spools"], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    assert not trace.is_complete
    assert 80 < len(trace.steps) < 200
    read_valid(tmp_path / "out")


def test_what_is_damaged_in_one_place_is_taken_from_another(tmp_path):
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    out = tmp_path / "unfinished"
    replica = rank.ship(out)
    whole = replica.read_bytes()
    damaged = bytearray(whole)
    for at in (20 << 10, 50 << 10):
        damaged[at] ^= 1
    replica.write_bytes(damaged)
    path = segment_path(rank.folder, 2)
    segment = bytearray(path.read_bytes())
    segment[100] ^= 1
    path.write_bytes(segment)
    (found,) = find_streams([out, tmp_path / "spools"])
    assert bytes(found.data) == whole
    assert found.notes == ()
    (alone,) = find_streams([out])
    assert len(whole) - len(alone.data) < 4096
    assert len(alone.notes) == 2


def test_a_settled_replica_gives_the_same_records_but_for_those_let_go(tmp_path):
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    out = tmp_path / "unfinished"
    replica = rank.ship(out)
    whole = replica.read_bytes()
    (before,) = find_streams([out])
    assert before.hidden_bytes == 0
    wanted, ended = read_stream(before), before.end
    del before  # a map: nothing would be freed
    begins = record_begins(whole, RecordKind.ENTER)
    for begin, end in ((2, 7), (50, 90), (150, 150)):
        prefix = settled(whole, begins[end], begins[begin])
        settle(replica, prefix)
        (found,) = find_streams([out])
        assert bytes(found.data) == prefix.payload + whole[begins[end] :]
        assert found.hidden_bytes == len(whole) - len(found.data) > 0
        assert (found.committed, found.end, found.notes) == (len(whole), ended, ())
        stream = read_stream(found)
        assert stream.definitions == wanted.definitions
        assert stream.enters["step"].tolist() == [*range(begin, 200)]
        assert (stream.received, stream.committed) == (len(whole), len(whole))
        assert stream.origin == wanted.origin
    recover([out], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    assert len(trace.steps) == 50
    (state,) = trace.completeness["ranks"]
    assert state["received"] == state["committed"] and not state["complete"]
    (note,) = state["notes"]
    assert "steps/index.jsonl, which names these steps, is not there" in note
    read_valid(tmp_path / "out")


def test_a_settled_replica_is_joined_with_the_segments_behind_it(tmp_path):
    """Also one that a crash of the head left shorter than what is settled of it."""
    rank = busy_rank(tmp_path / "spools")
    rank.end()
    out = tmp_path / "unfinished"
    replica = rank.ship(out, marker=False)
    whole = replica.read_bytes()
    replica.write_bytes(whole[: 40 << 10])
    begins = record_begins(whole, RecordKind.ENTER)
    end = max(at for at in begins if at < 36 << 10)
    settle(replica, settled(whole, end, late=2))
    for index in (0, 1):
        segment_path(rank.folder, index).unlink()
    for number, size in enumerate((40 << 10, 4096)):
        with replica.open("r+b") as file:
            file.truncate(size)
        made = tmp_path / f"out{number}"
        recover([out, tmp_path / "spools"], made)
        (state,) = open_trace(made).completeness["ranks"]
        assert not state["complete"], "some records are in no step"
        assert state["received"] == state["committed"] == len(whole)
        late, freed = state["notes"]
        assert late == "2 records came after their step was written: they are not in the tree"
        assert "steps/index.jsonl, which names these steps, is not there" in freed
        assert len(open_trace(made).steps) == len([at for at in begins if at >= end])


def test_hosts_without_a_shared_folder_are_merged(tmp_path):
    for host in range(2):
        for number in (2 * host, 2 * host + 1):
            busy_rank(tmp_path / f"host{host}", number, 4, calls=3).end()
    document = recover([tmp_path / "host0", tmp_path / "host1"], tmp_path / "out")
    assert document.completeness["complete"]
    assert {n.ranks for n in open_trace(tmp_path / "out").walk()} == {(0, 1, 2, 3)}


def test_records_of_two_runs_are_not_mixed(tmp_path):
    busy_rank(tmp_path / "a", 0, 2, calls=1, run_id="one").end()
    busy_rank(tmp_path / "b", 1, 2, calls=1, run_id="two").end()
    with pytest.raises(TraceError, match=r"2 different runs.*one, two"):
        recover([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_occupied_folder_is_not_written_into(tmp_path):
    busy_rank(tmp_path / "a", calls=1).end()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(FolderError, match="not an empty folder"):
        recover([tmp_path / "a"], tmp_path / "out")


def test_a_finished_trace_has_nothing_left_to_recover(tmp_path):
    grid_job(tmp_path / "spools", tmp_path / "trace")
    build(tmp_path / "trace")
    with pytest.raises(FolderError, match="already written"):
        recover([tmp_path / "trace"], tmp_path / "out")


def test_bytes_behind_a_damaged_cell_are_left_out_and_the_trace_is_incomplete(tmp_path):
    out = tmp_path / "trace"
    rank = busy_rank(tmp_path / "spools", calls=20)
    rank.end()
    replica = rank.ship(out)
    data = bytearray(replica.read_bytes())
    data[len(data) // 2] ^= 1
    replica.write_bytes(data)
    build(out)
    trace = open_trace(out)
    assert not trace.is_complete
    assert 0 < len(trace.steps) < 20


def test_records_of_a_newer_format_are_refused(tmp_path):
    rank = PaperRank(tmp_path / "spools", identity={"format": 9})
    rank.end()
    with pytest.raises(TraceVersionError, match="format 9"):
        recover([tmp_path / "spools"], tmp_path / "out")


def test_definitions_that_make_no_sense_cost_only_what_names_them(tmp_path):
    rank = PaperRank(tmp_path / "spools")
    with rank.call() as call:
        rank.value(call, "output", VALUE)
        rank._known.clear()
        rank.define("meta", dtype="float32", shape="nonsense")
        odd = rank.define("meta", dtype="float32", shape=None)
        rank.known = lambda kind, **fields: odd if kind == "meta" else 1
        rank.value(call, "other", VALUE)
    rank.end()
    document = recover([tmp_path / "spools"], tmp_path / "out")
    (node,) = open_trace(tmp_path / "out").walk()
    assert [slot.slot for slot in node.slots] == ["output"]
    assert document.completeness["ranks"][0]["notes"] == [
        "2 definitions are set aside, which no rank writes: shape of a meta is 'nonsense'; "
        "shape of a meta is None",
        "1 values name a call or a description that is not there",
    ]


def two_processes(folder, *how):
    """Spools of two processes, one after the other the same rank in the same life."""
    for name, began in zip("ba", (20, 10)):  # in an order that says nothing
        rank = busy_rank(
            folder / name, identity={"wall_ns": began, "host": f"host-{name}"}, calls=90
        )
        if name in how:
            rank.end()
        else:
            rank.writer._lock.release()
    return folder / "b", folder / "a"


def lives_of(trace):
    ranks = open_trace(trace).completeness["ranks"]
    assert all(rank["committed"] == rank["received"] for rank in ranks)
    return [(rank["incarnation"], rank["host"], rank["end"]) for rank in ranks]


def test_spools_of_two_processes_of_one_rank_and_life_are_two_lives_never_one(tmp_path):
    recover(two_processes(tmp_path, "b"), tmp_path / "out")
    assert lives_of(tmp_path / "out") == [(0, "host-a", "lost"), (1, "host-b", "exit")]
    assert len(open_trace(tmp_path / "out").steps) == 180


def test_a_spool_is_joined_with_its_own_replica_whatever_life_that_has(tmp_path):
    """The collector had given the replacement the next life; the rest of it is still on its host,
    which had freed the begin.
    """
    later, first = two_processes(tmp_path, "b")
    replicas = tmp_path / "trace/spool"
    replicas.mkdir(parents=True)
    for life, folder, length in ((0, first, 40 << 10), (1, later, 24 << 10)):
        segments = sorted((folder / "rank00000.0").glob("*.cells"))
        data = b"".join(segment.read_bytes() for segment in segments)[:length]
        (replicas / f"rank00000.{life}.cells").write_bytes(data)
        with StreamReader(folder / "rank00000.0") as reader:
            assert reader.free_below(length) >= 1
    recover([tmp_path / "trace", later, first], tmp_path / "out")
    assert lives_of(tmp_path / "out") == [(0, "host-a", "lost"), (1, "host-b", "exit")]
    assert len(open_trace(tmp_path / "out").steps) == 180
