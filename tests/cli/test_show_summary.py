"""What `rankscope show` says on one screen, of every sort of trace."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rankscope.cli import show
from rankscope.cli.show import ROWS
from rankscope.layout.placement import Mesh
from tests.cli.summarizedjobs import JOBS
from tests.cli.test_commands import rankscope
from tests.tree.altered import Columns, alter_step
from tests.tree.deepjob import deep_job
from tests.tree.ranks_on_paper import PaperRank

JOB_VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace of every job, by name."""
    return {name: job(tmp_path_factory.mktemp(name[:8])) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 layers on 64 ranks; rank 41 goes wrong in layers.17.attention.o_proj."""
    return deep_job(tmp_path_factory.mktemp("deep"), fault=(17, 41))


def shown(trace: Path, *words: str) -> list[str]:
    """Return the rows that `show` prints of a trace, called where the trace lies."""
    code, text, errors = rankscope("show", trace.name, *words, cwd=trace.parent)
    assert code == 0, errors
    return text.splitlines()


@pytest.mark.parametrize(
    ("is_judged", "columns"),
    [(True, ""), (True, "40"), (True, "80"), (True, "200"), (False, "40")],
)
@pytest.mark.parametrize("job", JOBS)
def test_every_trace_fits_one_screen(
    made: dict[str, Path],
    job: str,
    columns: str,
    is_judged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    if not is_judged:
        monkeypatch.setattr(show, "_MOST_NODES_BYTES", -1)
    rows = shown(made[job])
    assert len(rows) <= ROWS == 40
    assert max(map(len, rows)) <= int(columns or 320)
    assert all(row.isprintable() for row in rows)
    text = "\n".join(rows)
    assert ("not judged" in text) is not is_judged
    assert "see more" in text and "show trace --full" in " ".join(text.split())


def test_a_screen_says_whether_all_is_there_what_is_wrong_and_where(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = shown(deep)
    text = "\n".join(rows)
    assert len(rows) <= ROWS and max(map(len, rows)) <= 80
    assert rows[0] == "trace  64 ranks on 8 hosts, mesh tp=8, complete"
    assert rows[1] == "1 step: train 0"
    assert rows[2].startswith("fault: replica-mismatch, 1 origin")
    where = rows.index("where")
    assert rows[where + 1].split("  ")[1:] == [
        "layers.17.attention.o_proj:output", "rank 41", "forward of train step 0",
    ]  # fmt: skip
    assert "forward layers.17-23, norm, head" in text
    tree = [re.sub(" {2,}", "  ", row.strip()) for row in rows[rows.index("train step 0") + 1 :]]
    assert [row for row in tree if row.startswith("layers")] == [
        "layers.0-16  17 x Block, alike  infected: backward",
        "layers.17  Block  first fault: attention.o_proj:output, rank 41",
        "layers.18-23  6 x Block, alike  infected: forward, backward",
    ]
    assert "attention  Attention  float32[2, 16] tp=Replicate()" in tree
    assert "  rankscope show trace --path layers.17.attention.o_proj" in "\n".join(rows)


def test_the_page_shows_this_very_screen(
    deep: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (repository / "docs/commands/show.md").read_text()
    assert "$ rankscope show trace\n" + "\n".join(shown(deep)) + "\n```" in page


def test_a_trace_that_is_too_large_to_judge_shows_its_modules_and_what_judges_it(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "_MOST_VALUES_BYTES", 0)
    rows = shown(deep)
    text = "\n".join(rows)
    assert rows[2].startswith("not judged: 0.0 GB of records take longer: rankscope check trace")
    assert re.search(r"layers.0-16 +17 x Block, alike\n", text)
    assert re.search(r"layers.17 +Block +differs: attention.*, in layers.0-16 ", text)
    assert "first fault" not in text and "infected" not in text
    assert len(rows) <= ROWS


def test_a_job_without_a_fault_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = shown(deep_job(tmp_path, layers=32, ranks=4, wide=2, steps=2))
    assert rows[1] == "2 steps: train 0-1"
    assert rows[2].startswith("no fault found: 1,456 of 1,712 values held to another rank or run")
    assert any(re.search(r"layers.0-31 +32 x Block, alike", row) for row in rows)
    assert len(rows) < 25


def test_a_damaged_tree_is_one_clear_error(tmp_path: Path) -> None:
    trace = JOBS["one_process"](tmp_path)

    def without_dtype(_: Columns, texts: list[str]) -> None:
        texts[:] = [text.replace('"dtype"', '"dtyp"') for text in texts]

    alter_step(trace, without_dtype)
    code, text, errors = rankscope("show", trace)
    assert (code, text) == (2, "")
    assert "the trace is damaged" in errors
    assert len(errors.splitlines()) == 1


def test_full_is_the_tree_of_the_first_step_and_a_selection_asks_for_the_tree(
    deep: Path, made: dict[str, Path]
) -> None:
    trace = made["tensor_parallel"]
    full = shown(trace, "--full")
    assert full == shown(trace, "--path", "*"), "an option that says what it says anyway"
    assert any("dp=Replicate() tp=Shard(1)  mean 0  std 14.14" in row for row in full)
    assert full[-1] == "also traced: train 1; show them with --step, --mode"
    assert "see more" not in full
    for words in (["--depth", "0"], ["--slots", "none"], ["--stats", "mean"], ["--step", "all"]):
        assert "see more" not in shown(trace, *words)
    assert len(shown(deep, "--full")) > 1000


def test_the_step_of_the_first_fault_is_shown(tmp_path: Path) -> None:
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        for step in range(3):
            with rank.call(class_name="Model", step=step) as call:
                mesh = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
                value = JOB_VALUE + (number if step == 2 else 0)
                place = {"mesh": mesh, "placements": ["Replicate()"], "whole": value.shape}
                rank.value(call, "output", value, **place)
        rank.end()
        rank.ship(tmp_path / "trace")
    assert "train step 2, the first with a fault" in shown(tmp_path / "trace")


def test_what_a_job_left_when_it_ended_badly_comes_first(made: dict[str, Path]) -> None:
    crash = shown(made["crash"])
    assert crash[0].endswith("2 ranks on 1 host, incomplete; rank 1 raised; rank 0 lost")
    assert crash[1].startswith("first: ValueError: boom\\x07 long")
    assert any(re.search(r"layers.1 +Block +first fault, rank 1", row) for row in crash)
    hang = "\n".join(shown(made["hang"]))
    assert "fault: hang, 1 origin" in hang
    assert "rank 0 waits for rank 1" in hang
    steps = shown(made["no_steps"])
    assert steps[0].endswith("complete; no step was traced")
    assert any(re.search(r"layers.0-11 +12 x modules, alike", row) for row in steps)
    lives = shown(made["two_lives"])
    assert "2 lives" in lives[0] and "train step 0 (life 0 of the ranks)" in lives
    assert "3 steps: eval 0-2" in shown(made["evaluation"])


def test_a_call_that_a_running_rank_is_in_is_no_fault(made: dict[str, Path]) -> None:
    rows = [" ".join(row.split()) for row in shown(made["unfinished"])]
    assert "(root) Model not back yet on rank 0" in rows
    assert any("unfinished on ranks 0-1" in row for row in shown(made["hang"]))


def test_commands_name_no_trace_where_none_was_named(made: dict[str, Path]) -> None:
    code, text, _ = rankscope("show", cwd=made["one_process"])
    assert code == 0
    assert "\n  rankscope show --full " in text


def test_a_trace_without_a_step_file_is_shown_and_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.tree.growingtree._PART_BYTES", 0)
    trace = JOBS["tensor_parallel"](tmp_path)
    *_, last = sorted((trace / "steps").iterdir())
    last.unlink()
    rows = shown(trace)
    assert any(row.startswith("not judged: ") for row in rows)
    assert any(re.search(r"fc +Linear", row) for row in rows)
