"""`rankscope export`: memory, interrupts, and what it imports."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest

from rankscope.export.formats import Selection, export
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope
from tests.cli.test_export import formats
from tests.cli.test_export import long_job as long_job
from tests.cli.test_export import out as out


def test_an_interrupted_export_leaves_nothing_at_all(long_job, tmp_path, monkeypatch):
    def interrupt(what, part):
        if part > 0.5:
            raise KeyboardInterrupt

    for name in formats():
        with pytest.raises(KeyboardInterrupt):
            export(open_trace(long_job[4]), name, tmp_path / "x", Selection(), interrupt)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", formats())
def test_memory_does_not_grow_with_the_steps(long_job, tmp_path, name):
    def peak(steps):
        trace = open_trace(long_job[steps])
        tracemalloc.start()
        export(trace, name, tmp_path / str(steps), Selection(), lambda what, part: None)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(4)  # what is imported and interned once
    (tmp_path / "4").rename(tmp_path / "first")
    few, many = peak(4), peak(16)
    assert many < 1.5 * few, (few, many)


def test_exporting_imports_neither_torch_nor_what_another_format_needs(out, tmp_path):
    for name in ("jsonl", "perfetto"):
        words = ["export", str(out), "--format", name, "--out", str(tmp_path / name)]
        script = (
            "import sys; from rankscope.cli.app import main\n"
            f"try: main({words!r})\nexcept SystemExit as left: assert not left.code\n"
            "assert not {'torch', 'zmq', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
        )
        subprocess.run(
            [sys.executable, "-c", script], check=True, timeout=300, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def test_a_layout_of_the_variable_counts_where_one_is_asked_for(out, tmp_path, monkeypatch):
    file = tmp_path / "layout.toml"
    file.write_text('axes = "dp=1"\n')
    monkeypatch.setenv("RANKSCOPE_LAYOUT", str(file))
    words = ("export", out, "--format", "jsonl", "--out", tmp_path / "x")
    assert rankscope(*words)[0] == 0
    code, _, errors = rankscope(*words, "--force", "--layout", file)
    assert code == 2 and "give --global" in errors
