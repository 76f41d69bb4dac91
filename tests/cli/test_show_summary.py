"""What `rankscope show` says on one screen, of every sort of trace."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from rankscope.cli import show
from rankscope.cli.show import ROWS
from rankscope.cli.terminal import cut, fitted
from rankscope.cli.treetext import layout_text
from rankscope.layout.placement import Mesh
from rankscope.tree.reader import open_trace
from tests.cli.summarizedjobs import HOSTILE, JOBS
from tests.cli.test_commands import rankscope
from tests.tree.altered import Columns, alter_step
from tests.tree.deepjob import deep_job
from tests.tree.ranks_on_paper import PaperRank

JOB_VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)
BOX = (((0, 2),), ((0, 3),))


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


@pytest.mark.parametrize("columns", ["", "40", "80", "200"])
@pytest.mark.parametrize("is_judged", [True, False], ids=["judged", "not judged"])
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


def test_a_layer_of_another_dtype_is_named_with_what_differs(tmp_path: Path) -> None:
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model"):
        for layer in range(6):
            path = f"layers.{layer}"
            with rank.call(path, class_name="Block"), rank.call(f"{path}.fc") as call:
                dtype = "bfloat16" if layer == 4 else "float32"
                rank.value(call, "output", JOB_VALUE, dtype=dtype)
    rank.end()
    rank.ship(tmp_path / "trace")
    rows = [" ".join(row.split()) for row in shown(tmp_path / "trace")]
    assert "layers.0-3 4 x Block, alike" in rows
    assert "layers.4 Block differs: fc:output is bfloat16, in layers.0-3 float32" in rows
    assert "layers.5 Block" in rows


def model_of(folder: Path, calls: dict[str, str]) -> Path:
    """Return the trace of a forward of one rank: {path: class}, in the order of the calls."""
    rank = PaperRank(folder)
    with rank.call(class_name="Model"):
        for path, kind in calls.items():
            call = rank.enter(path, class_name=kind)
            rank.value(call, "output", JOB_VALUE)
            rank.exit(call)
    rank.end()
    rank.ship(folder / "trace")
    return folder / "trace"


def test_the_tree_goes_deeper_where_layers_stand_deeper_and_there_is_room(tmp_path: Path) -> None:
    calls = {"bert": "Bert", "bert.encoder": "Encoder"}
    for layer in range(5):
        calls[f"bert.encoder.layer.{layer}"] = "Layer"
        calls[f"bert.encoder.layer.{layer}.attention"] = "Attention"
        calls[f"bert.encoder.layer.{layer}.attention.self"] = "Self"
    rows = [" ".join(row.split()) for row in shown(model_of(tmp_path, calls))]
    assert "layer.0-4 5 x Layer, alike" in rows
    assert "attention Attention float32[2, 3]" in rows
    assert not any(row.startswith("self") for row in rows)


def test_modules_of_a_sequential_are_of_their_own_classes_and_nothing_is_said_of_that(
    tmp_path: Path,
) -> None:
    rows = shown(model_of(tmp_path, {"net.0": "Linear", "net.1": "ReLU", "net.2": "Linear"}))
    assert not any("differs" in row for row in rows)
    assert any(re.search(r"net.1 +ReLU +float32", row) for row in rows)


def test_a_fault_in_a_module_with_an_odd_name_is_shown_by_a_command_that_finds_it(
    tmp_path: Path,
) -> None:
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model"), rank.call("it's [0]*", class_name="Odd") as call:
        rank.value(call, "input.0", JOB_VALUE)
        rank.value(call, "output", JOB_VALUE * np.float32(np.nan))
    rank.end()
    rank.ship(tmp_path / "trace")
    (command,) = [row for row in shown(tmp_path / "trace") if "--path" in row]
    words = shlex.split(command.split("   ")[0])
    code, text, errors = rankscope(*words[1 : words.index("--path") + 2], cwd=tmp_path)
    assert code == 0, errors
    assert "it's [0]*  Odd" in text


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


def test_stages_show_the_ranks_that_call_them(made: dict[str, Path]) -> None:
    rows = [" ".join(row.split()) for row in shown(made["pipeline"])]
    assert "layers.0-1 2 x Block, alike ranks 0-1 float32[4, 6]" in rows
    assert "layers.2-3 2 x Block, alike ranks 2-3 float32[4, 6]" in rows


def test_what_has_no_room_is_counted_with_the_command_that_shows_it(made: dict[str, Path]) -> None:
    rows = shown(made["hundreds_of_modules"])
    assert len(rows) == ROWS
    (left,) = [row for row in rows if " more: " in row]
    told = re.fullmatch(r" +and ([\d,]+) modules more: rankscope show trace --depth 2 .*", left)
    assert told
    listed = [row for row in rows if row.strip().startswith("part_")]
    assert len(listed) + int(told[1].replace(",", "")) == 300 * 4


def test_very_long_names_are_cut_in_their_middle(made: dict[str, Path]) -> None:
    rows = shown(made["hostile_names"])
    text = "\n".join(rows)
    assert "x" * 50 not in text and "d." * 20 not in text
    assert "xxx...xxx" in text
    assert "a\\rb\\x1b[2J" in text
    assert len(HOSTILE) == sum("raised on rank 0" in row for row in rows)


def test_a_folder_with_a_long_name_is_written_once(tmp_path: Path) -> None:
    trace = JOBS["one_process"](tmp_path / ("long" * 20))
    code, text, _ = rankscope("show", trace)
    assert code == 0
    assert text.count("long" * 20) == 1
    assert "see more (TRACE is the folder named in the first line)" in text
    assert "rankscope show TRACE --full" in text


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


def test_a_long_placement_is_shortened(tmp_path: Path) -> None:
    mesh = Mesh(axes=("dp", "tp"), shape=(1, 1), ranks=(0,))
    texts = [
        "_MaskPartial(offset_shape=torch.Size([60000, 64]), offset_dim=0, mask_buffer=None)",
        "_StridedShard(dim=0, sf=2)",
    ]
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model") as call:
        rank.value(call, "output", JOB_VALUE, mesh=mesh, placements=texts, whole=(2, 3), box=BOX)
    rank.end()
    rank.ship(tmp_path / "trace")
    short = "dp=_MaskPartial(...) tp=StridedShard(0, 2)"
    for words in ([], ["--full"]):
        assert short in "\n".join(shown(tmp_path / "trace", *words))
    (node,) = open_trace(tmp_path / "trace").steps[0].nodes
    assert layout_text(node.slots[0]) == short


def test_a_row_that_is_cut_ends_its_colour() -> None:
    line = "plain \x1b[31mred and long\x1b[0m tail"
    assert cut(line, 80) == line
    assert cut(line, 13) == "plain \x1b[31mred ...\x1b[0m"
    assert cut("\u6a21\u578b" * 4, 9) == "\u6a21\u578b\u6a21...", "each is two columns wide"
    assert list(fitted("a  \u6a21\u578b", 6)) == ["a", "    \u6a21\u578b"]
    assert cut(line, 22) == "plain \x1b[31mred and long\x1b[0m ..."
