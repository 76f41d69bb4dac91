"""The Perfetto archive: read with Perfetto's own message definitions, played as a viewer plays it,
and opened in Perfetto's trace_processor."""

from __future__ import annotations

import json
import zipfile
from collections import Counter

import numpy as np
import pytest

import rankscope.export.perfetto as perfetto
from rankscope.errors import SelectionError
from rankscope.export.formats import claimed
from tests.export.conftest import call_rows, exported, selected


def unpacked(path):
    """Return the manifest, and each rank's packets."""
    messages = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="the extra rankscope[viewers] is not installed",
    )
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        manifest, *files = archive.namelist()
        packets = {}
        for name in files:
            message = messages.Trace()
            message.ParseFromString(archive.read(name))
            packets[name] = list(message.packet)
        return json.loads(archive.read(manifest))["perfetto_manifest"], packets


def arguments(annotations):
    found = {}
    for each in annotations:
        kind = each.WhichOneof("value")
        found[each.name] = arguments(each.dict_entries) if kind is None else getattr(each, kind)
    return found


def played(packets):
    """Open and close slices as a viewer does; return processes, slices and instants."""
    tracks, processes, open_slices, slices, instants = {}, {}, {}, [], []
    for packet in packets:
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            if described.HasField("process"):
                processes[described.uuid] = (described.process.pid, described.process.process_name)
            else:
                assert described.parent_uuid in processes
                tracks[described.uuid] = described.name
            continue
        if not packet.HasField("track_event"):
            continue
        event, uuid = packet.track_event, packet.track_event.track_uuid
        assert packet.timestamp_clock_id == 1
        stack = open_slices.setdefault(uuid, [])
        about = {"track": tracks[uuid], "name": event.name, "start": packet.timestamp, "end": None}
        about["args"] = arguments(event.debug_annotations)
        if event.type == event.TYPE_SLICE_BEGIN:
            about["around"] = stack[-1] if stack else None
            stack.append(about)
            slices.append(about)
        elif event.type == event.TYPE_SLICE_END:
            stack.pop()["end"] = packet.timestamp
        else:
            instants.append(about)
    return processes, slices, instants


def test_every_call_of_every_rank_is_a_slice_with_its_times_inside_its_parent(trace, tmp_path):
    exported(trace, "perfetto", tmp_path / "out.zip")
    _, files = unpacked(tmp_path / "out.zip")
    calls, values = call_rows(trace), {node.id: node for node in trace.walk()}
    found = {}
    for packets in files.values():
        processes, slices, _ = played(packets)
        ((_, name),) = processes.values()
        rank = int(name.split()[1])
        for each in slices:
            if each["track"] == "steps":
                continue
            key = each["args"]["node"], rank
            assert key not in found
            found[key] = each
    assert found.keys() == calls.keys()
    for key, (start, duration, status) in calls.items():
        each, node = found[key], values[key[0]]
        assert (each["start"], each["args"]["status"]) == (start, status)
        assert (each["name"], each["args"]["path"]) == (node.path or "(root)", node.path)
        assert each["track"].split()[0] == node.phase.word
        if duration >= 0:
            assert each["end"] == start + duration
        around = each["around"]
        assert around is None or around["end"] is None or each["end"] <= around["end"]
    if "real" in trace.path.name:
        inner = next(e for e in found.values() if e["name"] == "0" and e["track"] == "forward")
        assert inner["around"]["name"] == "(root)"


def test_what_came_out_of_a_call_stands_beside_it(trace, tmp_path):
    exported(trace, "perfetto", tmp_path / "out.zip", phase="forward,backward")
    _, files = unpacked(tmp_path / "out.zip")
    seen = 0
    for name, packets in files.items():
        rank = int(name[4:9])
        for each in played(packets)[1]:
            told = each["args"].get("output")
            if told is None or "hash" not in told:
                continue
            (node,) = [node for node in trace.walk() if node.id == each["args"]["node"]]
            digest = node.value("output").per_rank[rank]
            assert int(told["hash"], 16) == digest.hash
            assert told.get("mean", "nan") == digest.mean or np.isnan(digest.mean)
            assert (told["nan"], told["count"]) == (digest.nan, digest.count)
            seen += 1
    assert seen


def test_each_rank_and_life_is_a_process_of_its_host_on_one_clock(traces, tmp_path):
    said = exported(traces["grid"], "perfetto", tmp_path / "grid.zip")
    assert any("wall clocks of 2 hosts" in line for line in said)
    manifest, files = unpacked(tmp_path / "grid.zip")
    assert manifest["version"] == 1
    assert manifest["trace_time"] == {"clock": "REALTIME", "file": "rank00000.pftrace"}
    assert {f["path"]: f["machine"]["name"] for f in manifest["files"]} == {
        f"rank{rank:05d}.pftrace": f"h{rank // 2}" for rank in range(4)
    }
    assert manifest["attributes"]["rankscope.complete"] == "true"
    for packets in files.values():
        assert packets[0].clock_snapshot.primary_trace_clock == 1
    exported(traces["odd"], "perfetto", tmp_path / "odd.zip")
    manifest, files = unpacked(tmp_path / "odd.zip")
    names = [name for packets in files.values() for _, name in played(packets)[0].values()]
    assert sorted(names) == ["rank 0", "rank 0 (life 1)", "rank 1", "rank 1 (life 1)"]
    pids = Counter(
        (pid, file["machine"]["name"])
        for file in manifest["files"]
        for pid, _ in played(files[file["path"]])[0].values()
    )
    assert set(pids.values()) == {1}, "lives that claim one pid would be one process"
    uuids = Counter(
        packet.track_descriptor.uuid
        for packets in files.values()
        for packet in packets
        if packet.HasField("track_descriptor")
    )
    assert set(uuids.values()) == {1}


def test_steps_are_a_track_and_troubles_are_instants(traces, tmp_path):
    exported(traces["odd"], "perfetto", tmp_path / "out.zip")
    _, files = unpacked(tmp_path / "out.zip")
    _, slices, instants = played(files["rank00001.pftrace"])
    assert [each["name"] for each in slices if each["track"] == "steps"] == ["train step 0"]
    assert {(each["track"], each["args"]["error"]) for each in instants} == {
        ("errors", "ValueError: no"),
        ("errors", "digest failed: RuntimeError"),
    }
    _, slices, _ = played(files["rank00000.pftrace"])
    never = [each for each in slices if each["args"].get("status") == "unfinished"]
    assert len(never) == 2
    assert all(each["end"] is None for each in never)
    _, slices, _ = played(files["rank00000.1.pftrace"])
    assert {each["name"] for each in slices if each["track"] == "steps"} == {
        "train step 0",
        "eval step 0",
    }


def test_what_is_too_much_for_a_viewer_is_left_out_and_named(traces, tmp_path):
    trace = traces["grid"]

    def limited(name, limit):
        with claimed(tmp_path / name, is_folder=False) as place:
            said = perfetto.write(
                trace, selected(), place, lambda what, part: None, max_events=limit
            )
        manifest, files = unpacked(tmp_path / name)
        events = sum(p.HasField("track_event") for packets in files.values() for p in packets)
        assert events <= limit
        return said, manifest["attributes"].get("rankscope.left_out"), set(files)

    said, left, files = limited("all", 1000)
    assert (left, len(said)) == (None, 2)
    total = int(said[0].split()[0])
    said, left, files = limited("most", total - 1)
    assert left == "train step 1, ranks 3"
    assert "choose with --step, --rank, --phase, --path" in said[1]
    assert len(files) == 4
    _, left, files = limited("little", 40)
    assert left == "train step 0, ranks 1-3; train step 1"
    with pytest.raises(SelectionError, match="more than 3 events: narrow it"):
        limited("none", 3)
