"""Calls of all ranks merged into one tree."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankscope.errors import TraceError
from rankscope.layout.placement import Mesh
from rankscope.record.call import CallStatus
from rankscope.record.notes import Note, NoteKind, RanksNote
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import TO_ITS_END, StepEvent
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.tree.jobs import GRID, NONE, WEIGHT, grid_job, piece, read_valid
from tests.tree.ranks_on_paper import PaperRank

ONES = np.ones((2, 3), np.float32)


@pytest.fixture
def spools(tmp_path):
    return tmp_path / "spools"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "trace"


def finish(out, *ranks, **how):
    for rank in ranks:
        rank.end()
        rank.ship(out)
    build(out, **how)
    return read_valid(out)


def nodes(trace, step=0):
    def walk(listed):
        for node in listed:
            yield node
            yield from walk(node["children"])

    return list(walk(trace["steps"][step]["nodes"]))


def slot(node, name):
    return [entry for entry in node["slots"] if entry["slot"] == name]


def test_a_call_of_all_ranks_is_one_node_and_equal_values_are_folded(spools, out):
    """Four ranks, one tree; ranks with the same value share an entry."""
    grid_job(spools, out)
    build(out)
    root = read_valid(out)["steps"][0]["nodes"][0]
    assert (root["path"], root["class"], root["ranks"], root["status"]) == (
        "",
        "Model",
        "0-3",
        "returned",
    )
    assert [value["ranks"] for value in slot(root, "input.0")[0]["values"]] == ["0-1", "2-3"]
    assert [value["ranks"] for value in slot(root, "output")[0]["values"]] == ["0-3"]
    (child,) = root["children"]
    assert (child["path"], child["raw_path"], child["wrappers"]) == (
        "fc",
        "_orig_mod.fc",
        ["FSDP2"],
    )


def test_a_slot_says_its_layout_and_the_statistics_of_the_whole(spools, out):
    grid_job(spools, out)
    build(out)
    value = open_trace(out).value("fc", "output")
    assert value.layout.by_axis() == {"dp": "Replicate()", "tp": "Shard(1)"}
    assert value.combined.mean == pytest.approx(float((WEIGHT * 2).mean()))
    assert value.combined.l2 == pytest.approx(float(np.linalg.norm(WEIGHT * 2)))
    assert value.views[0].ranges(3) == (((0, 4),), ((3, 6),))
    assert value.per_rank[1].max == piece(1, WEIGHT * 2, GRID, ["Replicate()", "Shard(1)"]).max()


def test_children_stand_in_the_order_the_first_rank_called_them(spools, out):
    rank = PaperRank(spools)
    with rank.call():
        for path in ("z", "a", "m"):
            with rank.call(path):
                pass
    (root,) = finish(out, rank)["steps"][0]["nodes"]
    assert [child["path"] for child in root["children"]] == ["z", "a", "m"]


def test_a_module_called_twice_has_two_nodes(spools, out):
    rank = PaperRank(spools)
    with rank.call():
        for _ in range(2):
            with rank.call("fc") as call:
                rank.value(call, "output", ONES)
    trace = finish(out, rank)
    assert [(n["path"], n["ordinal"]) for n in nodes(trace)] == [("", 0), ("fc", 0), ("fc", 1)]
    assert len({n["id"] for n in nodes(trace)}) == 3


def test_two_modules_of_one_path_on_one_rank_are_told_apart_by_order(spools, out):
    """Two losses of one class outside every root share path and key."""
    rank = PaperRank(spools)
    for _ in range(2):
        with rank.call("@Loss", root=0, ordinal=0):
            pass
    assert [n["ordinal"] for n in nodes(finish(out, rank))] == [0, 1]


def test_gradients_become_backward_nodes_that_mirror_the_forward_tree(spools, out):
    rank = PaperRank(spools)
    with rank.call() as top, rank.call("block") as block, rank.call("block.fc") as inner:
        pass
    for call in (top, inner):  # the block between them has no gradient of its own
        rank.value(call, "grad_output.0", ONES, phase=Phase.BACKWARD)
    del block
    forward, backward = finish(out, rank)["steps"][0]["nodes"]
    assert (forward["phase"], backward["phase"], backward["path"]) == ("forward", "backward", "")
    assert [child["path"] for child in backward["children"]] == ["block.fc"]
    assert backward["slots"][0]["slot"] == "grad_output.0"


def test_a_second_backward_through_the_same_call_is_a_node_of_its_own(spools, out):
    rank = PaperRank(spools)
    with rank.call() as first:
        pass
    with rank.call() as second:
        pass
    for task, call in ((0, first), (0, second), (1, first)):
        rank.value(call, "grad_output.0", ONES * task, phase=Phase.BACKWARD, ordinal=task)
    found = [n for n in nodes(finish(out, rank)) if n["phase"] == "backward"]
    told = [
        (n["ordinal"], n.get("of_ordinal", n["ordinal"]), n.get("graph_task", 0)) for n in found
    ]
    assert told == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]


def test_pipeline_stages_are_nodes_of_some_ranks_only(spools, out):
    ranks = []
    for number in range(2):
        rank = PaperRank(spools, number, 2)
        with rank.call(class_name="Stage"), rank.call(f"layers.{number}"):
            pass
        ranks.append(rank)
    trace = finish(out, *ranks)
    assert [(n["path"], n["ranks"]) for n in nodes(trace)] == [
        ("", "0-1"),
        ("layers.0", "0"),
        ("layers.1", "1"),
    ]
    assert trace["completeness"]["complete"]


def test_ranks_that_disagree_in_dtype_are_kept_apart_and_say_so(spools, out):
    ranks = []
    for number in range(3):
        rank = PaperRank(spools, number, 3)
        with rank.call() as call:
            rank.value(call, "output", ONES, dtype="bfloat16" if number == 1 else "float32")
        ranks.append(rank)
    trace = finish(out, *ranks)
    found = [(e["ranks"], e["dtype"], e["disagree"]) for e in slot(nodes(trace)[0], "output")]
    assert found == [("0,2", "float32", ["dtype"]), ("1", "bfloat16", ["dtype"])]
    assert len(open_trace(out).value("", "output").views) > 1


def test_ranks_that_disagree_in_placement_are_kept_apart(spools, out):
    mesh = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
    ranks = []
    for number, placement in enumerate(["Replicate()", "Shard(0)"]):
        rank = PaperRank(spools, number, 2)
        with rank.call() as call:
            rank.value(
                call,
                "output",
                piece(number, ONES, mesh, [placement]),
                mesh=mesh,
                placements=[placement],
                whole=ONES.shape,
            )
        ranks.append(rank)
    entries = slot(nodes(finish(out, *ranks))[0], "output")
    assert [e["disagree"] for e in entries] == [["placements"], ["placements"]]
    assert entries[1]["combined"][0]["note"] == "no value from rank 0"


def test_replicas_that_differ_are_named_and_not_combined(spools, out):
    mesh = Mesh(axes=("dp",), shape=(2,), ranks=(0, 1))
    ranks = []
    for number in range(2):
        rank = PaperRank(spools, number, 2)
        with rank.call() as call:
            rank.value(
                call,
                "output",
                ONES + number,
                mesh=mesh,
                placements=["Replicate()"],
                whole=ONES.shape,
            )
        ranks.append(rank)
    (entry,) = slot(nodes(finish(out, *ranks))[0], "output")
    assert entry["combined"] == [
        {
            "ranks": "0-1",
            "note": "replicas differ: ranks 0-1 should hold the same values",
            "fact": {"kind": "replicas_differ", "ranks": "0-1"},
            "digest": None,
        }
    ]
    assert len(entry["values"]) == 2


def test_what_ranks_note_is_the_same_by_its_fact_and_by_the_sentence_of_an_older_record(out):
    """Ranks wrote sentences alone before there were facts, and traces held them alone."""
    skipped = Note.of(NoteKind.SCALER_SKIPPED, optimizer="SGD")
    unmatched = Note.of(NoteKind.UNMATCHED_GLOB, glob="layer.*", near="fc")
    trees = []
    for as_written in (lambda note: note, str):
        folder = out.with_name(f"{out.name}{len(trees)}")
        rank = PaperRank(folder.with_name(f"{folder.name}-spools"))
        rank.step(StepEvent.BEGIN, 0)
        with rank.call():
            rank.step(StepEvent.NOTE, 0, note=as_written(skipped))
        rank.error(None, "words")
        rank.error(None, as_written(unmatched))
        trees.append(finish(folder, rank))
    noted, state = trees[0]["steps"][0]["notes"], trees[0]["completeness"]["ranks"][0]
    assert noted == [{"ranks": "0", "note": str(skipped), "fact": skipped.fact}]
    assert (state["errors"], state["facts"]) == (["words", str(unmatched)], [unmatched.fact])
    assert noted == trees[1]["steps"][0]["notes"]
    assert state["facts"] == trees[1]["completeness"]["ranks"][0]["facts"]

    found = open_trace(folder)
    assert [[*step.notes] for step in found.steps] == [[RanksNote((0,), skipped)]]
    assert found.error_notes == [[unmatched]]
    head = json.loads((folder / "trace.json").read_text())
    del head["steps"][0]["notes"][0]["fact"], head["completeness"]["ranks"][0]["facts"]
    (folder / "trace.json").write_text(json.dumps(head))
    older = open_trace(folder)
    assert [[*step.notes] for step in older.steps] == [[RanksNote((0,), skipped)]]
    assert older.error_notes == [[Note.words("words"), unmatched]]


def test_meshes_of_one_family_are_combined_apart_and_folded_when_equal(spools, out):
    """tp meshes of two data-parallel rows: the same weight twice, two different activations."""
    ranks = []
    for number in range(4):
        rank = PaperRank(spools, number, 4)
        row = number // 2
        mesh = Mesh(axes=("tp",), shape=(2,), ranks=(2 * row, 2 * row + 1))
        how = {"mesh": mesh, "placements": ["Shard(0)"], "whole": WEIGHT.shape}
        with rank.call() as call:
            rank.value(call, "input.weight", piece(number, WEIGHT, mesh, ["Shard(0)"]), **how)
            rank.value(call, "output", piece(number, WEIGHT + row, mesh, ["Shard(0)"]), **how)
        ranks.append(rank)
    trace = finish(out, *ranks)
    (root,) = nodes(trace)
    assert [c["ranks"] for c in slot(root, "input.weight")[0]["combined"]] == ["0-3"]
    assert [c["ranks"] for c in slot(root, "output")[0]["combined"]] == ["0-1", "2-3"]
    assert [v["ranks"] for v in slot(root, "input.weight")[0]["values"]] == ["0,2", "1,3"]
    assert trace["run"]["meshes"][0]["over"] == [[0, 1], [2, 3]]
    assert open_trace(out).value("", "output").combined is None


def test_a_root_that_owns_parameters_is_one_node_of_its_own_event(spools, out):
    rank = PaperRank(spools)
    with rank.call(phase=Phase.GRADS, **NONE) as event:
        with rank.call(phase=Phase.GRADS, **NONE) as own:
            rank.value(own, "grad:scale", ONES, phase=Phase.GRADS)
        with rank.call("fc", phase=Phase.GRADS, **NONE) as owner:
            rank.value(owner, "grad:weight", None, phase=Phase.GRADS, flags=int(ValueFlag.ABSENT))
    del event
    root, fc = nodes(finish(out, rank))
    assert [(root["path"], root["phase"], root["micro_batch"])] == [("", "grads", None)]
    assert root["slots"][0]["slot"] == "grad:scale"
    assert fc["slots"][0]["values"][0]["flags"] == ["absent"]


def test_setup_and_steps_of_both_modes_are_groups_of_their_own(spools, out):
    rank = PaperRank(spools)
    with rank.call(phase=Phase.SETUP, **NONE):
        pass
    for mode, step in (("train", 0), ("eval", 0), ("train", 1)):
        with rank.call(mode=mode, step=step):
            pass
    rank.step(StepEvent.END, 1, note="the scaler skipped this step")
    trace = finish(out, rank)
    assert len(trace["setup"]) == 1
    assert [(s["mode"], s["step"]) for s in trace["steps"]] == [
        ("train", 0),
        ("train", 1),
        ("eval", 0),
    ]
    assert trace["steps"][1]["notes"] == [{"ranks": "0", "note": "the scaler skipped this step"}]


def test_micro_batches_of_a_step_are_nodes_of_their_own(spools, out):
    rank = PaperRank(spools)
    for micro_batch in range(2):
        with rank.call(micro_batch=micro_batch):
            pass
    assert [n["micro_batch"] for n in nodes(finish(out, rank))] == [0, 1]


def test_incarnations_of_a_rank_have_steps_of_their_own(spools, out):
    lives = []
    for incarnation in range(2):
        rank = PaperRank(spools, incarnation=incarnation)
        with rank.call() as call:
            rank.value(call, "output", ONES + incarnation)
        lives.append(rank)
    lives[0].ship(out)  # the first life ended without a word
    trace = finish(out, lives[1])
    assert [(s["step"], s["incarnation"]) for s in trace["steps"]] == [(0, 0), (0, 1)]
    assert [r["end"] for r in trace["completeness"]["ranks"]] == ["lost", "exit"]
    assert trace["completeness"]["complete"]
    assert open_trace(out).columns()["values.incarnation"].tolist() == [0, 1]


def test_how_a_call_ended_is_kept_by_rank(spools, out):
    ranks = []
    for number in range(3):
        rank = PaperRank(spools, number, 3)
        call = rank.enter()
        if number == 0:
            rank.exit(call)
        elif number == 1:
            rank.exit(call, CallStatus.RAISED, "ValueError: no")
        ranks.append(rank)
    (root,) = nodes(finish(out, *ranks))
    assert root["status"] == "mixed"
    assert root["outcomes"] == [
        {"ranks": "0", "status": "returned"},
        {"ranks": "1", "status": "raised", "error": "ValueError: no"},
        {"ranks": "2", "status": "unfinished"},
    ]


def test_failures_inside_rankscope_are_shown_where_they_happened(spools, out):
    rank = PaperRank(spools)
    with rank.call():
        with rank.call("fc") as call:
            rank.error(call, "digest failed: RuntimeError")
        rank.error(None, "something without a call")
    rank.value(call, "grad_output.0", ONES, phase=Phase.BACKWARD)
    trace = finish(out, rank)
    assert nodes(trace)[1]["errors"] == [{"ranks": "0", "error": "digest failed: RuntimeError"}]
    assert trace["completeness"]["ranks"][0]["errors"] == ["something without a call"]


def test_values_that_are_no_numbers_keep_their_words(spools, out):
    rank = PaperRank(spools)
    with rank.call() as call:
        rank.value(
            call, "input.flag", None, dtype="python", note="True", flags=int(ValueFlag.PYTHON)
        )
        rank.value(call, "input.0", None, flags=int(ValueFlag.PENDING | ValueFlag.STRUCTURE_ONLY))
        rank.value(call, "output", np.array([np.nan, np.inf], np.float32))
        rank.value(call, "empty", np.empty((0, 3), np.float32))
    flag, pending, output, empty = nodes(finish(out, rank))[0]["slots"]
    assert flag["values"] == [{"ranks": "0", "shape": [], "note": "True"}]
    assert pending["values"][0]["flags"] == ["pending", "structure_only"]
    assert output["values"][0]["digest"]["mean"] is None
    assert (output["values"][0]["digest"]["nan"], output["values"][0]["digest"]["posinf"]) == (1, 1)
    assert empty["values"][0]["digest"]["count"] == 0


def test_names_of_a_model_are_values_and_never_keys_or_file_names(spools, out):
    rank = PaperRank(spools)
    odd = ["__metadata__", "a/b", "../x", "nul\0", "snow\N{SNOWMAN}", "\ud800"]
    with rank.call():
        for name in odd[:-1]:
            with rank.call(name, class_name=name) as call:
                rank.value(call, f"output.{name}", ONES)
    trace = finish(out, rank)
    assert [n["path"] for n in nodes(trace)][1:] == odd[:-1]
    assert sorted(p.name for p in out.rglob("*")) == [
        "000000.safetensors",
        "steps",
        "trace.json",
        "tree.json",
    ]


def test_a_very_deep_tree_is_kept_readable(spools, out):
    rank = PaperRank(spools)
    path, calls = "", []
    for level in range(600):
        calls.append(rank.enter(path, parent=calls[-1] if calls else None))
        path = f"{path}.m" if path else "m"
        del level
    for call in reversed(calls):
        rank.exit(call)
    assert len(nodes(finish(out, rank))) == 600


def test_gaps_and_drops_make_a_trace_incomplete(spools, out):
    rank = PaperRank(spools)
    with rank.call():
        pass
    rank.gap(12, 3, 4)
    state = finish(out, rank)["completeness"]
    assert not state["complete"]
    assert state["ranks"][0]["dropped"] == 12
    assert state["ranks"][0]["gaps"][0]["first_step"] == 3


@pytest.mark.parametrize("lives", [1, 2])
def test_a_rank_that_was_killed_while_it_dropped_leaves_an_open_gap(spools, out, lives):
    """Also where that was an earlier life: what it dropped is missing all the same."""
    for life in range(lives):
        rank = PaperRank(spools, incarnation=life)
        with rank.call():
            pass
        if life == 0:
            rank.gap(0, 3, TO_ITS_END)
        if life < lives - 1 or lives == 1:
            rank.ship(out)
    if lives == 2:
        rank.end()
        rank.ship(out)
    build(out)
    state = read_valid(out)["completeness"]
    assert not state["complete"]
    assert state["ranks"][0]["gaps"] == [
        {"mode": "train", "first_step": 3, "last_step": None, "records": None, "bytes": None}
    ]


def test_a_rank_that_sent_nothing_is_named_as_missing(spools, out):
    rank = PaperRank(spools, 1, 4)
    with rank.call():
        pass
    state = finish(out, rank)["completeness"]
    assert (state["complete"], state["missing"]) == (False, "0,2-3")
    assert (out / "spool").exists()  # what hosts still hold can be joined with these replicas


def test_the_header_says_where_ranks_differ(spools, out):
    ranks = []
    for number in range(3):
        versions = {"versions": {"torch": "2.12.0" if number == 2 else "2.13.0"}}
        rank = PaperRank(spools, number, 3, identity=versions)
        with rank.call():
            pass
        ranks.append(rank)
    values = [{"ranks": "0-1", "value": "2.13.0"}, {"ranks": "2", "value": "2.12.0"}]
    assert finish(out, *ranks)["run"]["differs"] == [
        {"what": "versions", "name": "torch", "values": values}
    ]


def test_the_replicas_go_when_the_tree_is_written_unless_they_are_to_be_kept(spools, tmp_path):
    for keep in (False, True):
        out = tmp_path / f"trace{keep}"
        grid_job(tmp_path / f"s{keep}", out)
        build(out, keep_spool=keep)
        assert (out / "spool").exists() is keep


def test_a_folder_without_one_record_makes_no_trace(out):
    (out / "spool").mkdir(parents=True)
    (out / "spool" / "rank00000.0.cells").write_bytes(b"")
    with pytest.raises(TraceError, match="not one record"):
        build(out)
    assert not (out / "trace.json").exists()
