"""`rankscope export`, run as a user runs it: what it says, refuses, and never leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rankscope.export.formats import FORMATS
from rankscope.tree.build import build
from tests.cli.test_commands import rankscope
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank

PAGE = Path(__file__).parents[2] / "docs/commands/export.md"


def formats():
    """The formats that can be written here, of any trace: `hf` takes forwards of a model alone."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return [name for name in FORMATS if name not in ("parquet", "hf")]
    return [name for name in FORMATS if name != "hf"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    out = folder / "rankscope-1"
    grid_job(folder / "spools", out, steps=2)
    build(out)
    return out


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    """{steps: trace}: one rank, without a tree.json."""
    made = {}
    for steps in (4, 16):
        folder = tmp_path_factory.mktemp("long")
        rank = PaperRank(folder / "spools")
        for step in range(steps):
            for number in range(150):
                with rank.call(f"layers.{number}", step=step) as call:
                    rank.value(call, "output", np.full(3, number, np.float32))
        rank.end()
        rank.ship(folder / "trace")
        build(folder / "trace", tree_mode="never")
        made[steps] = folder / "trace"
    return made


@pytest.mark.parametrize("name", formats())
def test_an_export_says_what_is_in_it_and_exits_0(out, tmp_path, name):
    code, text, errors = rankscope("export", out, "--format", name, "--out", tmp_path / "x")
    assert code == 0
    assert text.startswith(f"{tmp_path / 'x'}: ")
    assert (tmp_path / "x").is_dir() == FORMATS[name].is_folder
    assert errors == (
        "rankscope: times are the wall clocks of 2 hosts: they differ by what those differ\n"
        if name == "perfetto"
        else ""
    )
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_an_unknown_format_is_refused_with_the_list_of_those_there_are(out, tmp_path):
    for trace in (out, tmp_path / "none"):
        code, _, errors = rankscope("export", trace, "--format", "gguf", "--out", tmp_path / "x")
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert all(f"{name} (" in errors for name in FORMATS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--path", "fcc"], "'fcc' matches nothing in this trace; the nearest are fc"),
        (["--step", "9"], "the trace holds no such step; it holds setup, train step 0"),
        (["--step", "x"], "write steps as 0-2,5 or all"),
        (["--rank", "9"], "the trace holds ranks 0-3"),
        (["--rank", "-1"], "write ranks as 0-2,5 or all"),
        (["--mode", "test"], "neither train nor eval"),
        (["--phase", "forwrd"], "no phase is called 'forwrd'; choose from setup, forward"),
    ],
)
def test_a_selection_that_cannot_be_is_one_line_and_exit_2(out, tmp_path, words, said):
    line = ["export", out, "--format", "jsonl", "--out", tmp_path / "x", *words]
    code, text, errors = rankscope(*line)
    assert (code, text) == (2, "")
    assert said in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_newest_trace_here_is_exported(out, tmp_path):
    code, _, _ = rankscope(
        "export", "--format", "jsonl", "--out", tmp_path / "new" / "x", cwd=out.parent
    )
    assert code == 0
    assert len((tmp_path / "new" / "x").read_text().splitlines()) == 44


@pytest.mark.parametrize("name", formats())
def test_a_trace_without_its_tree_is_exported_and_called_incomplete(tmp_path, name):
    rank = PaperRank(tmp_path / "spools")
    with rank.call() as call:
        rank.value(call, "output", np.ones(3, np.float32))
        rank.ship(tmp_path / "trace", marker=False)
    words = ["export", tmp_path / "trace", "--format", name, "--out", tmp_path / "x"]
    code, text, errors = rankscope(*words)
    assert (code, bool(text)) == (0, True)
    assert "no finished tree" in errors
    assert f"is incomplete: see rankscope verify {tmp_path / 'trace'}" in errors


@pytest.mark.parametrize("name", formats())
def test_a_disk_that_is_full_leaves_nothing_and_is_one_line(long_job, tmp_path, name):
    words = ["export", str(long_job[4]), "--format", name, "--out", str(tmp_path / "x")]
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"from rankscope.cli.app import main; main({words!r})"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 2, run.stderr
    assert "cannot be written (" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", formats())
def test_a_killed_export_leaves_nothing_under_its_name(long_job, tmp_path, name):
    words = ["export", str(long_job[16]), "--format", name, "--out", str(tmp_path / "x")]
    process = subprocess.Popen([sys.executable, "-m", "rankscope", *words], stdout=-3, stderr=-3)
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    if process.wait(timeout=300) == -signal.SIGKILL:
        assert not (tmp_path / "x").exists()
    code, _, _ = rankscope(*words[:-1], tmp_path / "again")
    assert code == 0


def test_a_file_is_replaced_where_it_is_forced_and_a_folder_never(out, tmp_path):
    file, full = tmp_path / "x", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "x").touch()
    words = ("export", out, "--format", "jsonl", "--phase", "all", "--path", "(root)", "--out")
    code, _, errors = rankscope(*words, file)
    assert code == 2 and file.read_text() == "mine"
    assert f"{file} exists: give a new name with --out, or replace it with --force" in errors
    assert rankscope(*words, file, "--force")[0] == 0 and json.loads(file.open().readline())
    for more in ([], ["--force"]):
        code, _, errors = rankscope(*words, full, *more)
        assert code == 2 and "or remove it" in errors and (full / "x").exists()


def test_the_page_names_every_format_and_field(out, tmp_path):
    page = PAGE.read_text()
    for name in FORMATS:
        assert f"| `{name}` |" in page
    rankscope("export", out, "--format", "jsonl", "--out", tmp_path / "x")
    fields = re.findall(r"`(\w+)`", page)
    line = json.loads((tmp_path / "x").read_text().splitlines()[0])
    assert set(line) <= set(fields), set(line) - set(fields)
    if "parquet" in formats():
        from rankscope.export.parquet import CALLS, SAMPLES, VALUES

        assert {*VALUES.names, *SAMPLES.names, *CALLS.names} <= set(fields)
        assert set(VALUES.names) == set(line), "both hold the same"
