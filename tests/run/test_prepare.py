"""A run is prepared in one way, whoever asks; a refused one leaves nothing behind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.errors import FolderError, SpoolError
from rankscope.run.folders import RUN_NAME, SHARED, TENSOR_FOLDER, read_run_header
from rankscope.run.prepare import Collection, RunRequest, prepare_out, prepare_run
from rankscope.settings import settings_from

NO_DISK_HAS = 1 << 60
ELSEWHERE = "ipc:///run/collector.sock"


@pytest.fixture
def request_here(tmp_path: Path) -> RunRequest:
    asked = {"steps": "all", "spool_bytes": "1M", "tensors": "**", "spool": tmp_path / "spool"}
    asked["out"] = tmp_path / "deep" / "trace"
    return RunRequest(
        run_id="one",
        key="a1",
        collection=Collection(""),
        world_size=8,
        local_ranks=2,
        settings=settings_from(asked, {}),
    )


def with_settings(request: RunRequest, **what: object) -> RunRequest:
    return replace(request, settings=replace(request.settings, **what))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"spool_bytes": NO_DISK_HAS}, "--rs-spool"),
        ({"tensor_budget": NO_DISK_HAS}, "tensors each"),
    ],
    ids=["spools", "tensors"],
)
@pytest.mark.parametrize("address", ["", SHARED, ELSEWHERE], ids=["here", "shared", "elsewhere"])
def test_a_run_without_room_is_refused_and_leaves_no_folder(
    tmp_path: Path, request_here: RunRequest, what: dict[str, int], words: str, address: str
):
    asked = with_settings(request_here, **what)
    with pytest.raises(SpoolError, match=words):
        prepare_run(replace(asked, collection=Collection(address)))
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_all_hosts_share_must_have_room_for_the_tensors_of_all_ranks(
    tmp_path: Path, request_here: RunRequest
):
    """Every host writes there: room for its own ranks alone would run out in the job."""
    enough_for_100 = shutil.disk_usage(tmp_path).free // 100
    request = replace(request_here, world_size=2000)
    request = with_settings(request, ranks=tuple(range(1000)), tensor_budget=enough_for_100)
    with pytest.raises(SpoolError, match="1000 ranks may keep"):
        prepare_run(replace(request, collection=Collection(SHARED)))
    prepare_run(replace(request, collection=Collection(SHARED), keeps_apart=True)).remove()
    prepare_run(replace(request, collection=Collection(ELSEWHERE))).remove()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("what", ["spool_bytes", "tensor_budget"])
def test_ranks_that_are_not_traced_need_no_room(
    tmp_path: Path, request_here: RunRequest, what: str
):
    """Two ranks are here, and room for one: it is enough where one rank of the job is traced."""
    enough_for_one = shutil.disk_usage(tmp_path).free * 2 // 3
    with pytest.raises(SpoolError):
        prepare_run(with_settings(request_here, **{what: enough_for_one}))
    prepare_run(with_settings(request_here, ranks=(0,), **{what: enough_for_one})).remove()


def test_beside_a_full_trace_folder_a_run_takes_a_sibling_and_says_so(
    tmp_path: Path, request_here: RunRequest
):
    out = tmp_path / "trace"
    out.mkdir()
    (out / "mine").touch()
    for number, address in ((2, ""), (3, SHARED)):
        run_id = f"run{number}"
        asked = replace(request_here, run_id=run_id, collection=Collection(address))
        asked = with_settings(asked, out=out)
        made = prepare_run(asked)
        assert made.out == tmp_path / f"trace-{number}"
        assert made.announcement == f"{out} is not empty: tracing into {made.out}"
    made.remove()
    assert not made.out.exists()
    assert [*out.iterdir()] == [out / "mine"]


@pytest.mark.parametrize("address", ["", SHARED, ELSEWHERE], ids=["here", "shared", "elsewhere"])
def test_run_json_says_where_the_records_are_collected(request_here: RunRequest, address: str):
    """Ranks and relay read it there, and come to the same answer as who prepared the run."""
    asked = Collection(address)
    made = prepare_run(replace(request_here, collection=asked))
    header = read_run_header(made.run_folder)
    assert header.collector == address
    assert (header.run_id, header.out) == ("one", made.out)
    assert header.settings == request_here.settings.as_text()
    assert Collection.of_run(header) == made.collection == asked
    where = address if asked.is_elsewhere else str(made.out)
    assert asked.announcement(made.out).endswith(where)
    assert made.out.exists() != asked.is_elsewhere  # there the collector has its own


def test_the_trace_folder_is_announced_before_any_rank_may_read_of_it(request_here: RunRequest):
    seen, spool = [], request_here.settings.spool
    made = prepare_run(
        request_here,
        lambda out, line: seen.append((out.is_dir(), [*spool.rglob(RUN_NAME)])),
    )
    assert seen == [(True, [])]
    assert (made.run_folder / RUN_NAME).exists()


def test_the_first_host_to_be_ready_does_not_keep_others_out_of_a_shared_folder(
    request_here: RunRequest,
):
    shared = replace(request_here, collection=Collection(SHARED))
    out = prepare_run(shared).out
    (out / TENSOR_FOLDER).mkdir()
    assert prepare_run(replace(shared, key="b2")).new_folders == []


def test_without_a_word_several_hosts_share_the_trace_folder_and_one_does_not():
    assert Collection.of_setting("", is_one_host=False).is_shared
    assert Collection.of_setting("", is_one_host=True) == Collection("")
    assert Collection.of_setting(ELSEWHERE, is_one_host=False).is_elsewhere
    assert Collection.of_setting(SHARED, is_one_host=True).is_shared


def test_a_collector_may_be_started_again_in_a_folder_in_which_a_tree_grows(tmp_path: Path):
    for name in ("spool", "steps", "parquet"):
        (tmp_path / name).mkdir()
    for name in ("collector.log", "findings.jsonl"):
        (tmp_path / name).touch()
    assert prepare_out(tmp_path, is_shared=True) == tmp_path
    (tmp_path / "trace.json").touch()
    with pytest.raises(FolderError, match="not empty"):
        prepare_out(tmp_path, is_shared=True)
