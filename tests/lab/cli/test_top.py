"""`rankscope top` beside jobs with missing ranks, full spools and long paths."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rankscope.cli.terminal import Paint
from rankscope.cli.top import screen_lines
from rankscope.record.ranks import parse_ranks, ranks_named, ranks_text
from rankscope.record.texts import utc_text
from rankscope.run.folders import REPLICA_FOLDER
from rankscope.run.jobstatus import read_status
from rankscope.tree.reader import open_trace
from rankscope.words.page.verdicthtml import places_in
from tests.cli.test_top import Start, Terminal, ended, top
from tests.cli.test_top import launch as launch
from tests.launcher.launches import kill, rankscope
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("top"),
    pytest.mark.skipif(
        not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
        reason="needs the start-up file: an environment made by launcher/test",
    ),
]


def test_where_a_rank_is_missing_top_check_and_the_page_say_the_same(launch: Start) -> None:
    # noticed once ranks have stood for longer than check calls a hang, 3 s: a stall is judged once
    job = launch(["ok", "skips", "ok", "ok"], "--rs-stall-seconds", 5)
    assert wait_until((job.meeting / "skipped").exists), job.err
    time.sleep(3.5)  # for a shorter time no job of any speed is said to hang
    found = top(job, code=1)
    assert {  # by chance ranks were slow in two of three steps, and have lines of their own
        rank: (group["waits_for"], group["where"], group["waits_in"])
        for group in found["groups"]
        for rank in parse_ranks(group["ranks"])
    } == {
        **dict.fromkeys((0, 2, 3), ("1", "collective of layers.0", "all_reduce of ranks 0-3")),
        1: ("", "forward of layers.0", ""),
    }
    for group in found["groups"]:
        assert group["step"] == "train step 3" and not group["step_over"]
        assert group["age_s"][0] > 3
    assert [f["kind"] for f in found["check"]["findings"]] == ["hang"]
    places, _ = places_in(open_trace(job.out))
    assert {status.rank: status.place for status in read_status(job.out).ranks} == places
    screen = rankscope("top", job.out, "--once", "--ranks", "0,2").stdout
    assert "waits in all_reduce of ranks 0-3 for rank 1" in screen and "hang" in screen
    (finding,) = found["check"]["findings"]
    place = f"{finding['path']} {finding['slot']} {ranks_named(finding['ranks'])}, "
    narrow = Terminal("top", job.out, "--ranks", "0,2")
    try:
        narrow.read("hang: ")
        narrow.read("by rank")
    finally:
        narrow.close()
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", narrow.text)
    assert f"{place}{finding['phase']} of train step 3" in " ".join(plain.split())
    (job.meeting / "go").touch()
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs


def test_records_that_no_collector_takes_fill_the_spool_and_are_counted_there(
    launch: Start,
) -> None:
    job = launch(["ok", "ok"], "--rs-spool-bytes", "1M")
    assert wait_until(lambda: ended(job) >= 2), job.err
    assert wait_until(lambda: read_status(job.out).ranks)
    collector = job.companion()
    kill(collector, signal.SIGSTOP)
    try:
        stopped_at = ended(job)
        assert wait_until(lambda: ended(job) >= stopped_at + 5)
        found = top(job, "--no-check")
        assert found["spool"]["unsent_bytes"] > 0
        assert found["check"] == {"verdict": None, "age_s": None, "trouble": "off", "findings": []}

        def is_full() -> bool:
            fills = [status.spool_fill or 0.0 for status in read_status(job.out).ranks]
            return max(fills) > 0.8

        assert wait_until(is_full)

        def unsent() -> list[int | None]:
            asked_ns = time.time_ns()
            assert wait_until(lambda: read_status(job.out).written_ns > asked_ns)
            return [status.unsent_bytes for status in read_status(job.out).ranks]

        def is_dropping() -> bool:
            """It trains on, and writes nothing."""
            before, step = unsent(), ended(job)
            assert wait_until(lambda: ended(job) >= step + 3)
            return unsent() == before

        assert wait_until(is_dropping)
    finally:
        kill(collector, signal.SIGCONT)

    def has_lost() -> bool:
        return sum(status.lost_records for status in read_status(job.out).ranks) > 0

    assert wait_until(has_lost, 120)
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs


def children(process: int) -> list[str]:
    """The command lines of what a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text().rpartition(")")[2].split()[1] == str(process):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


def test_the_screen_says_what_the_live_check_told_and_starts_no_process(
    launch: Start, tmp_path: Path
) -> None:
    job = launch(["ok", "ok"], "--rs-live-check", 0)
    assert wait_until(lambda: ended(job) >= 3), job.err
    told = job.out / "findings.jsonl"
    found = utc_text(time.time_ns() - 3 * 3600 * 10**9)
    notice = {"found": found, "notice": "some steps are not judged: they are too large"}
    finding = {"found": found, "kind": "replica-mismatch", "message": "they differ"}
    finding |= {"mode": "train", "step": 3, "phase": "forward", "path": "layers.0"}
    finding |= {"slot": "output", "ranks": [1], "micro_batch": None, "origin": True}
    finding |= {"severity": "fault", "victims": 0, "evidence": {}, "advice": ""}
    screen = Terminal("top", job.out)
    try:
        screen.read("check: the live check is off for this job")
        assert children(screen.process.pid) == []
        told.write_text(json.dumps(notice) + "\n")
        screen.read("some steps are not judged")
        with told.open("a") as file:
            file.write(json.dumps(finding) + "\n{torn")
        screen.read("check \\(3h ago\\): replica-mismatch: they differ")
        screen.read("layers.0  output  rank 1, forward of train step 3")
        assert children(screen.process.pid) == []
    finally:
        screen.close()
    assert "no fault" not in screen.text
    judged = top(job)["check"]  # by itself, whatever was told
    assert judged["verdict"] == "incomplete" and judged["judged"] > 0 and not judged["findings"]
    assert judged["trouble"] == ""

    # more records than are judged for an answer: a file that is long, and empty behind its begin
    many = tmp_path / "many"
    shutil.copytree(job.out / REPLICA_FOLDER, many / REPLICA_FOLDER)
    (replica,) = (many / REPLICA_FOLDER).glob("rank00001*.cells")
    os.truncate(replica, 300 << 20)
    silent = top(many)["check"]
    assert silent["verdict"] is None and "0.3 GB of records" in silent["trouble"]
    (many / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    assert [f["kind"] for f in top(many, code=1)["check"]["findings"]] == ["replica-mismatch"]


def test_however_long_the_path_of_a_finding_is_step_ranks_and_path_are_whole(
    launch: Start,
) -> None:
    job = launch(["ok", "ok"])
    assert wait_until(lambda: ended(job) >= 0), job.err
    found = top(job, "--no-check")
    path = ".".join(f"decoder_layers.{number}.self_attention" for number in range(7))
    finding = {"kind": "hang", "message": "x" * 200, "origin": True, "mode": "train", "step": 123}
    finding |= {"phase": "forward", "path": path, "slot": "output", "ranks": [*range(0, 90, 2)]}
    finding |= {
        "micro_batch": None,
        "severity": "fault",
        "victims": 0,
        "evidence": {},
        "advice": "",
    }
    found["check"] |= {"verdict": "fault", "age_s": 1.0, "findings": [finding]}
    lines = screen_lines(found, Paint(io.StringIO()), 80, 24)
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    whole = "".join(line.strip() for line in lines)
    assert path in whole and "output" in whole and "train step 123" in whole
    assert ranks_text(finding["ranks"]) in whole


def test_the_page_documents_every_field(launch: Start) -> None:
    job = launch(["ok", "ok"])
    assert wait_until(lambda: ended(job) >= 3), job.err
    found = top(job)
    page = (Path(__file__).parents[3] / "docs/commands/top.md").read_text()
    names = [*found, *found["groups"][0], *found["worst"][0], *found["loss"], *found["spool"]]
    assert [name for name in names if f"`{name}`" not in page] == []
