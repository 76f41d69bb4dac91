"""The reading commands, run as a user runs them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope as tracing
from rankscope.cli.app import COMMANDS, main
from rankscope.cli.arguments import SELECTIONS, ExitCode
from rankscope.cli.terminal import fitted
from rankscope.layout.placement import Mesh
from rankscope.record.call import CallStatus
from rankscope.record.ranks import EndReason
from rankscope.run.prepare import command_text
from rankscope.settings import SETTINGS
from rankscope.tree.build import build
from tests import forked
from tests.models import Residual
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    out = folder / "rankscope-1"
    grid_job(folder / "spools", out, steps=2)
    build(out)
    return out


def rankscope(*words, cwd=None):
    """Run a command in this process; return exit code, stdout and stderr."""
    here, out, err, code = Path.cwd(), io.StringIO(), io.StringIO(), None
    os.chdir(cwd or here)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([*map(str, words)])
    except SystemExit as left:
        code = left.code or 0
    finally:
        os.chdir(here)
    return code, out.getvalue(), err.getvalue()


def test_help_explains_the_tool_and_lists_the_commands():
    code, text, _ = rankscope("--help")
    assert code == 0
    for word in ("rankscope run", "tree.json", "show", "verify", "recover"):
        assert word in text


def test_reading_commands_import_no_torch(out):
    script = (
        "import sys; from rankscope.cli.app import main\n"
        f"try: main(['show', {str(out)!r}])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'zmq', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_show_prints_the_tree_with_placements_and_numbers(out):
    code, text, _ = rankscope("show", out, "--full")
    assert code == 0
    assert "4 ranks on 2 hosts, mesh dp=2,tp=2, complete" in text
    assert "train step 0" in text
    assert "dp=Replicate() tp=Shard(1)  mean 0  std 14.14" in text
    assert "also traced: train 1" in text
    assert "\x1b" not in text


def test_show_marks_ranks_that_differ_and_lists_their_values(out):
    _, text, _ = rankscope("show", out, "--path", "(root)", "--stats", "mean")
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "input.0" in line)
    assert "2 values" in lines[at]
    assert lines[at + 1].split()[:2] == ["ranks", "0-1"]
    assert lines[at + 2].split()[:2] == ["ranks", "2-3"]


def test_show_narrows_to_path_phase_step_rank_and_depth(out):
    _, text, _ = rankscope("show", out, "--path", "fc", "--phase", "backward", "--step", "1")
    assert text.count("fc  Linear") == 1
    assert "(root)" not in text
    assert "train step 1" in text
    _, text, _ = rankscope("show", out, "--depth", "0", "--slots", "none")
    assert "fc" not in text
    assert "input" not in text
    _, text, _ = rankscope("show", out, "--rank", "3", "--stats", "hash", "--slots", "output")
    assert "2 values" not in text
    _, text, _ = rankscope("show", out, "--phase", "setup", "--step", "all")
    assert "param:weight" in text


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """A real run: token ids and a mask, layers in a list, one checkpointed, a loss."""
    out = tmp_path_factory.mktemp("layered") / "of any name"

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(60_000, 4)
            self.layers = torch.nn.ModuleList(Residual() for _ in range(3))
            self.head = torch.nn.Linear(4, 1)

        def forward(self, ids, mask):
            x = self.embed(ids) * mask[..., None]
            for layer in self.layers[:2]:
                x = layer(x)
            x = torch.utils.checkpoint.checkpoint(self.layers[2], x, use_reentrant=False)
            return self.head(x)

    model, loss = Net(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, mask = torch.tensor([[7, 50_256, 3]]), torch.tensor([[True, True, False]])
    with tracing.trace(model, out=out):
        loss(model(ids, mask), torch.zeros(1, 3, 1)).backward()
        optimizer.step()
    return out


def test_a_depth_bounds_every_phase_and_says_what_it_leaves_out(layered):
    """Gradients and parameters of all modules are one flat list in the tree."""
    _, text, _ = rankscope("show", layered, "--depth", "1", "--slots", "none", "--phase", "setup")
    heads = [line.split()[0] for line in text.splitlines()[2:-2]]
    assert heads == ["(root)", "embed", "head"]
    _, text, _ = rankscope("show", layered, "--depth", "1", "--slots", "none")
    lines = text.splitlines()
    shown = {line.split()[0] for line in lines[2:-1]} - {"stopped", "rank"}  # notes of the step
    layers = {f"layers.{number}" for number in range(3)}
    assert shown == {"(root)", "@MSELoss", "embed", "head", *layers}
    assert {tuple(line.split()[::2][:2]) for line in lines} >= {
        ("embed", "grads"),
        ("head", "params"),
        ("layers.2", "recompute"),
    }
    assert lines[-1].strip() == (
        "left out below --depth 1: 6 forward, 2 recompute, 6 backward, 6 grads, 6 params"
    )
    _, text, _ = rankscope("show", layered, "--depth", "0", "--slots", "none")
    assert not [line for line in text.splitlines() if "layers" in line or "embed" in line]
    _, everything, _ = rankscope("show", layered, "--slots", "none", "--full")
    _, deep, _ = rankscope("show", layered, "--slots", "none", "--depth", "2")
    assert deep == everything, "nothing is left out, and nothing is said of it"


def test_a_depth_counts_from_the_modules_that_are_asked_for(layered):
    words = ["--path", "layers.*", "--slots", "none", "--depth"]
    _, text, _ = rankscope("show", layered, *words, "0")
    assert ".up" not in text and text.count("layers.0 ") == 2, "its forward, its backward"
    _, text, _ = rankscope("show", layered, *words, "1")
    assert "layers.0.up  Linear  grads" in text


def test_numbers_of_integers_and_bools_are_those_that_mean_something(layered):
    _, text, _ = rankscope("show", layered, "--phase", "forward", "--depth", "1")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "input.0 int64[1, 3] count 3 min 3 max 50256" in lines
    assert "input.1 bool[1, 3] count 3 true 2" in lines
    assert any(line.startswith("output float32[1, 3, 4] mean ") for line in lines)
    _, text, _ = rankscope("show", layered, "--path", "embed", "--stats", "mean,zero")
    assert "int64[1, 3]  mean 1.676e+04  zero 0" in text, "what is asked for is shown"


@pytest.mark.parametrize("command", ["show", "check", "verify", "tensor", "export"])
def test_a_command_without_a_trace_reads_the_one_it_is_called_in(layered, tmp_path, command):
    (layered / "mine" / "notes").mkdir(parents=True, exist_ok=True)
    words = ["--format", "jsonl", "--out", tmp_path / "x"] if command == "export" else []
    for place in (layered, layered / "mine" / "notes"):
        code, text, errors = rankscope(command, *words, cwd=place)
        assert str(layered) in text + errors or command in ("verify", "export")
        assert (code, "no full tensors" in errors) == (
            (2, True) if command == "tensor" else (0, False)
        )
        (tmp_path / "x").unlink(missing_ok=True)


def test_a_trace_here_is_meant_before_the_one_around_and_folders_of_others_are_no_traces(
    layered, out, tmp_path
):
    inner = layered / "inner" / "rankscope-1"
    shutil.copytree(out, inner)
    assert rankscope("show", cwd=inner.parent)[1].startswith(f"{inner} ")
    shutil.rmtree(inner.parent)
    (tmp_path / "spool").mkdir()  # as in /var
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    for place in (tmp_path, tmp_path / "spool"):
        code, _, errors = rankscope("show", cwd=place)
        assert code == 2 and "is in no trace; name the trace to read" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sho"], "no command 'sho'; did you mean show? "),
        (["c"], "did you mean collect or check or capture or clean? "),
        (["zzz"], "no command 'zzz'; `rankscope --help`"),
        (["--versio"], "did you mean --version? "),
        (["show", "--dept", "1"], "no option --dept of rankscope show; did you mean --depth? "),
        (["show", "--steps=1"], "did you mean --step? "),
        (["check", "--jsn"], "did you mean --json? "),
        (["tensor", "--prnt"], "did you mean --print? "),
        (["verify", "--layout", "x"], "no option --layout of rankscope verify; `rankscope verify"),
    ],
)
def test_a_word_that_is_no_command_or_option_is_one_line_with_the_nearest(words, said):
    code, text, errors = rankscope(*words)
    assert (code, text) == (2, "")
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_show_takes_the_newest_trace_here(out):
    code, text, _ = rankscope("show", cwd=out.parent)
    assert code == 0
    assert text.startswith(str(out))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--path", "fcc"], "--path 'fcc' matches nothing in this trace; the nearest are fc"),
        (["--slots", "outptu"], "--slots 'outptu' matches nothing"),
        (["--step", "9"], "the trace holds no train step 9; it holds train 0-1"),
        (["--step", "x"], "write steps as 0-2,5 or all"),
        (["--mode", "test"], "neither train nor eval"),
        (["--phase", "forwrd"], "no phase is called 'forwrd'; choose from setup, forward"),
        (["--rank", "9"], "the trace holds ranks 0-3"),
        (["--stats", "median"], "no column 'median'"),
    ],
)
def test_a_selection_that_cannot_be_is_one_line_and_exit_2(out, words, said):
    code, text, errors = rankscope("show", out, *words)
    assert (code, text) == (2, "")
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_folders_that_cannot_be_read_are_one_line_and_exit_2(tmp_path):
    for words in (["show", tmp_path / "none"], ["verify", tmp_path], ["show"]):
        code, _, errors = rankscope(*words, cwd=tmp_path)
        assert code == 2
        assert len(errors.splitlines()) == 1, errors


def test_verify_lists_every_rank_and_exits_0_when_all_is_there(out):
    code, text, _ = rankscope("verify", out)
    assert code == 0
    assert text.count(" exit\n") == 4
    assert "complete" in text


def test_verify_exits_1_when_something_is_missing(tmp_path):
    trace = tmp_path / "trace"
    rank = PaperRank(tmp_path / "spools", 0, 2)
    with rank.call() as call:
        rank.value(call, "output", np.ones(3, np.float32))
    rank.ship(trace, cut=64)
    build(trace)
    code, text, _ = rankscope("verify", trace)
    assert code == 1
    assert "nothing at all from rank 1" in text
    assert "rankscope recover" in text
    code, text, _ = rankscope("verify", trace, "--json")
    answer = json.loads(text)
    report = answer["result"]
    assert (code, answer["status"]) == (1, "incomplete")
    assert (report["missing"], report["ranks"][0]["end"]) == ("1", "lost")


def test_verify_as_json_says_trouble_as_json(tmp_path):
    code, text, errors = rankscope("verify", tmp_path / "none", "--json")
    assert code == 2
    assert "no such folder" in json.loads(text)["errors"][0]
    assert "no such folder" in errors


def test_an_unfinished_trace_is_shown_with_a_word_on_stderr(tmp_path):
    rank = PaperRank(tmp_path / "spools")
    with rank.call() as call:
        rank.value(call, "output", np.ones(3, np.float32))
        rank.ship(tmp_path / "trace", marker=False)
    code, text, errors = rankscope("show", tmp_path / "trace", "--full")
    assert code == 0
    assert "unfinished on rank 0" in text
    assert "incomplete" in text
    assert "no finished tree" in errors


def test_recover_makes_a_trace_of_spool_folders(tmp_path):
    rank = PaperRank(tmp_path / "spools")
    with rank.call():
        pass
    rank.end()
    code, text, _ = rankscope("recover", tmp_path / "spools", "--out", tmp_path / "new")
    assert code == 0
    assert text.splitlines() == [
        f"{tmp_path / 'new'}: 1 of 1 ranks, complete",
        f"removed {tmp_path / 'spools'}: all of it is in {tmp_path / 'new'}",
    ]
    assert rankscope("verify", tmp_path / "new")[0] == 0
    again = PaperRank(tmp_path / "spools")
    again.end()
    code, _, errors = rankscope("recover", tmp_path / "spools", "--out", tmp_path / "new")
    assert code == 2
    assert "not an empty folder" in errors


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Two stages of a pipeline, of which the second raised; and two replicas on one mesh."""
    folder = tmp_path_factory.mktemp("stages")
    mesh = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
    for number in range(2):
        rank = PaperRank(folder / "spools", number, 2)
        root = rank.enter()
        rank.value(root, "input.0", np.ones((2, 3)), dtype=("int64", "float32")[number])
        rank.value(root, "output", np.ones((2, 3 + number), np.float32))
        place = {"mesh": mesh, "placements": ["Replicate()"], "whole": (2,)}
        rank.value(root, "held", np.ones(2), dtype=("bfloat16", "float32")[number], **place)
        rank.exit(root, *((CallStatus.RAISED, "ValueError: boom") if number else ()))
        rank.end(EndReason.RAISED if number else EndReason.EXIT)
        rank.ship(folder / "trace", end="raised" if number else "exit")
    build(folder / "trace")
    return folder / "trace"


def test_a_rank_that_raised_is_said_first_with_its_exception(stages):
    first, second, *_ = rankscope("show", stages)[1].splitlines()
    assert first.endswith("2 ranks on 1 host, mesh tp=2, complete; rank 1 raised")
    assert second == "first: ValueError: boom  in (root), train step 0 (rank 1)"
    code, text, _ = rankscope("verify", stages)
    assert code == 0
    assert "raised: ValueError: boom  in (root)" in text
    assert text.splitlines()[-1].endswith("did not end in order: rank 1 raised")
    report = json.loads(rankscope("verify", stages, "--json")[1])["result"]
    assert [(r["rank"], r["path"], r["error"]) for r in report["raised"]] == [
        (1, "", "ValueError: boom")
    ]


def test_names_of_a_trace_cannot_steer_the_terminal(tmp_path):
    rank = PaperRank(tmp_path / "spools")
    with rank.call(class_name="Model\x1b[2J") as top:
        inner = rank.enter("a\rb", parent=top)
        rank.value(inner, "input.\x1b[31mx", np.ones(2))
        rank.exit(inner, CallStatus.RAISED, "ValueError: \x07 boom")
    rank.end()
    rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    for words, slots in ([], ()), (["--full"], ["input.\\x1b[31mx", "ValueError: \\x07 boom"]):
        code, text, errors = rankscope("show", tmp_path / "trace", *words)
        assert code == 0, errors
        assert text.replace("\n", "").isprintable()
        for shown in ("Model\\x1b[2J", "a\\rb", *slots):
            assert shown in text


def test_stages_that_hold_different_things_are_no_fault_and_replicas_are(stages):
    text = rankscope("show", stages, "--full")[1]
    assert re.search(r"input.0 +int64\[2, 3\]  rank 0  differs by rank: dtype", text)
    assert re.search(r"input.0 +float32\[2, 3\]  rank 1  differs by rank: dtype", text)
    assert re.search(r"held +bfloat16\[2\] .* rank 0 disagree in dtype", text)
    assert re.search(r"output +float32\[2, \*\]  2 values", text)
    assert re.search(r"output +float32\[2, 4\] ", rankscope("show", stages, "--rank", "1")[1])
    assert "ranks 0 " not in text and "ranks 1 " not in text


def test_a_slot_that_some_ranks_alone_have_names_them(tmp_path):
    """As where a hook replaces what a module gives on one rank alone."""
    for number in (0, 1):
        rank = PaperRank(tmp_path / "spools", number, 2)
        with rank.call(class_name="Model") as top:
            rank.value(top, "output", np.ones(2))
            if number == 0:
                rank.value(top, "returned", np.full(2, 3.0))
                rank.value(top, "returned.told", None, note="3", dtype="python")
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    text = rankscope("show", tmp_path / "trace", "--full")[1]
    assert "(root)  Model  ranks 0-1" in text
    assert re.search(r"output +float32\[2\]  mean 1  std 0$", text, re.M)
    assert re.search(r"returned +float32\[2\]  mean 3  std 0  on rank 0$", text, re.M)
    assert re.search(r"returned.told = 3  on rank 0$", text, re.M)


def test_a_file_is_called_a_file(tmp_path):
    (tmp_path / "train.py").write_text("")
    code, _, errors = rankscope("show", tmp_path / "train.py")
    assert code == 2 and "train.py: is a file" in errors


def test_colours_appear_on_a_terminal_only_and_never_with_no_color(out):
    import pty

    def on_a_terminal(**environment):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "rankscope", "show", str(out)],
            stdout=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(theirs)
        text = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:
                break
            if not block:
                break
            text += block
        process.wait(timeout=300)
        os.close(ours)
        return text

    assert b"\x1b[" in on_a_terminal()
    assert b"\x1b[" not in on_a_terminal(NO_COLOR="1")


def test_a_reader_that_goes_away_makes_no_noise(out):
    line = f"{sys.executable} -m rankscope show {out} | head -1"
    run = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in run.stderr


def test_lines_fit_a_narrow_terminal_and_are_never_broken_in_a_pipe(out, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    narrow = rankscope("show", out, "--full")[1]
    monkeypatch.delenv("COLUMNS")
    plain = rankscope("show", out, "--full")[1]
    longest = max(map(len, narrow.splitlines()[1:]))  # a path is one word, however long
    assert longest <= 50 < max(map(len, plain.splitlines()[1:]))
    assert narrow.split() == plain.split(), "not a word is lost"


def test_a_long_placement_is_broken_between_words_and_keeps_its_colour():
    layout = "dp_replicate=Replicate() dp_shard=Shard(0) tp=_StridedShard(dim=0, sf=2)"
    line = f"    output         float32[4096, 1024]  \x1b[36m{layout}\x1b[0m  mean 1  std 2"
    assert list(fitted(line, 0)) == list(fitted(line, 200)) == [line]
    rows = list(fitted(line, 60))
    assert all(len(re.sub(r"\x1b\[\d+m", "", row)) <= 60 for row in rows)
    assert " ".join(rows).split() == line.split()
    assert rows[0].startswith("    output         float32[4096, 1024]")
    assert all(row.startswith("        ") for row in rows[1:])


def test_globs_of_the_setting_paths_that_matched_nothing_are_shown(tmp_path):
    with tracing.trace(out=tmp_path / "t", paths="nothing.*"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    code, text, _ = rankscope("show", tmp_path / "t")
    assert code == 0 and "rank 0: paths: 'nothing.*' matched no module" in text
    assert "'nothing.*' matched no module" in rankscope("verify", tmp_path / "t")[1]


def test_a_trace_of_a_newer_build_of_the_same_version_says_so(out, tmp_path):
    document = json.loads((out / "trace.json").read_text())
    document["format"] = "rankscope.trace/9"
    document["run"]["versions"]["rankscope"] = tracing.__version__
    (tmp_path / "trace.json").write_text(json.dumps(document))
    code, _, err = rankscope("show", tmp_path)
    assert code == 2 and "a newer build than this one" in err


def test_help_of_run_breaks_no_word():
    done = forked.run(
        [sys.executable, "-m", "rankscope", "run", "--help"],
        env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = done.stdout.split("usage: ")[1]
    known = [word for setting in SETTINGS for word in f"{setting.help} {setting.default}".split()]
    for word in known:
        assert word.strip("()") in ours, word


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--json", "--python", "'"],
        ["doctor", "--json", "--nproc-per-node", "x"],
        ["doctor", "--json", "--out", "x" * 300],
        ["verify", "--json", "x" * 300],
        ["verify", "--json", "--no-such-option"],
        ["chekc", "--json"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_whatever_cannot_be_answered_is_one_json_object_and_exit_code_2(words, tmp_path):
    done = forked.run(
        [sys.executable, "-m", "rankscope", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    said = json.loads(done.stdout)
    assert said["format"] == "rankscope/1"
    assert said["command"] == ("" if words[0] == "chekc" else words[0])
    if done.returncode == 1:
        assert (said["status"], said["errors"]) == ("failed", [])
    else:
        assert (said["status"], said["result"], len(said["errors"])) == ("error", None, 1)


def test_the_page_of_all_commands_has_every_exit_code_and_shared_option():
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    codes = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert [*map(int, codes)] == [*ExitCode]
    for name, (metavar, _) in SELECTIONS.items():
        word = metavar if metavar != "MODE" else "train|eval"
        assert f"`--{name} {word}`" in page
    for name in COMMANDS:
        assert f"(commands/{name}.md)" in page


def test_a_page_of_the_root_alone_is_asked_for_as_it_is_shown(stages, tmp_path):
    page = tmp_path / "page.html"
    for _ in range(2):
        assert rankscope("report", stages, "--path", "(root)", "--out", page)[0] == 0
    page.write_text("mine")
    code, _, errors = rankscope("report", stages, "--out", page)
    assert code == 2 and "--force" in errors and page.read_text() == "mine"
    assert rankscope("report", stages, "--out", page, "--force")[0] == 0


def test_a_command_that_is_printed_may_be_pasted_whatever_the_paths_hold(tmp_path):
    words = shlex.split(command_text("recover", tmp_path / "a b", "it's ü", out=tmp_path / "c d"))
    assert words == [
        "rankscope", "recover", f"{tmp_path}/a b", "it's ü", "--out", f"{tmp_path}/c d",
    ]  # fmt: skip
