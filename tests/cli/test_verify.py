"""What `verify` says of records that are not in the trace: where they are, and how to add them."""

from __future__ import annotations

import os
from pathlib import Path

from rankscope.run.folders import RunHeader, host_run_folder, run_key, spool_base, write_run_header
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope
from tests.tree.ranks_on_paper import PaperRank


def cut_trace(folder: Path, run_folder: Path, host: str) -> PaperRank:
    """A trace that lacks the end of its only rank, whose spool is in `run_folder`."""
    rank = PaperRank(run_folder, host=host, identity={"settings": {"spool": str(folder / "disk")}})
    for step in range(3):
        with rank.call(step=step):
            pass
    rank.end()
    rank.ship(folder / "trace", cut=64)
    build(folder / "trace")
    return rank


def test_a_spool_of_this_host_is_named_with_the_command_that_works(tmp_path: Path):
    base = spool_base(tmp_path / "disk")
    run_folder, other = (host_run_folder(base, run_key(name)) for name in ("this", "other"))
    for folder, run_id in ((run_folder, "run-1"), (other, "run-2")):
        header = RunHeader(run_id=run_id, out=tmp_path / "t", collector="shared", world_size=1)
        write_run_header(folder, header)
    cut_trace(tmp_path, run_folder, os.uname().nodename)
    code, out, _ = rankscope("verify", tmp_path / "trace")
    assert code == 1
    command = f"{run_folder} {tmp_path / 'trace'} --out {tmp_path / 'trace-whole'}"
    assert out.splitlines()[-1] == f"this host still holds records: rankscope recover {command}"
    code, out, err = rankscope("recover", *command.split())
    assert code == 0, err
    assert open_trace(tmp_path / "trace-whole").is_complete
    assert f"removed {run_folder}" in out
    assert [path.name for path in base.iterdir()] == [other.name]


def test_a_spool_of_another_host_is_looked_for_where_that_host_keeps_spools(tmp_path: Path):
    cut_trace(tmp_path, tmp_path / "far", "node7")
    code, out, _ = rankscope("verify", tmp_path / "trace")
    assert code == 1
    (line,) = [line for line in out.splitlines() if "node7 may still hold records" in line]
    assert str(spool_base(tmp_path / "disk")) in line


def test_recover_leaves_spools_that_are_asked_for_or_still_needed(tmp_path: Path):
    run_folder = host_run_folder(spool_base(tmp_path / "disk"), run_key("this"))
    header = RunHeader(run_id="run-1", out=tmp_path / "t", collector="shared", world_size=1)
    write_run_header(run_folder, header)
    rank = cut_trace(tmp_path, run_folder, os.uname().nodename)
    assert rankscope("recover", run_folder, "--out", tmp_path / "a", "--keep-spool")[0] == 0
    assert run_folder.is_dir()
    whole = (rank.folder / "000000.cells").read_bytes()
    (rank.folder / "000000.cells").unlink()
    (rank.folder / "000001.cells").write_bytes(whole)  # the first segment was freed
    code, out, _ = rankscope("recover", run_folder, tmp_path / "trace", "--out", tmp_path / "b")
    assert code == 0
    assert "incomplete" in out
    assert run_folder.is_dir()
