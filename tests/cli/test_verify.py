"""What `verify` says of records that are not in the trace: where they are, and how to add them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rankscope.errors import TraceError
from rankscope.run.folders import RunHeader, host_run_folder, run_key, spool_base, write_run_header
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from rankscope.tree.stepfile import map_columns
from tests import forked
from tests.cli.test_commands import rankscope
from tests.tree.jobs import grid_job
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


KEEPS = """
import rankscope, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
with rankscope.trace(model, out=sys.argv[1], tensors="**", keep_spool=True, spool=sys.argv[2]):
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
"""


def kept_tensors(trace: Path) -> int:
    return sum(
        len(safe_open(path, "np").keys()) for path in (trace / "tensors").rglob("*.safetensors")
    )


def trace_without_records(folder: Path) -> tuple[Path, Path]:
    """A trace with full tensors that lacks its rank's last record and has none of its own any more,
    and the host's run folder that has all records.
    """
    script, disk = folder / "script.py", folder / "disk"
    script.write_text(KEEPS)
    forked.run([sys.executable, str(script), folder / "trace", disk], check=True)
    run_id = json.loads((folder / "trace/trace.json").read_text())["run"]["id"]
    run_folder = host_run_folder(spool_base(disk), run_key("this"))
    header = RunHeader(run_id=run_id, out=folder / "t", collector="shared", world_size=1)
    write_run_header(run_folder, header)
    (replica,) = (folder / "trace/spool").glob("*.cells")
    spool = run_folder / replica.stem
    spool.mkdir()
    whole = replica.read_bytes()
    (spool / "000000.cells").write_bytes(whole)
    replica.write_bytes(whole[:-64])  # without the record of its end
    replica.with_suffix(".json").unlink()
    code, _, err = rankscope("recover", folder / "trace", "--out", folder / "cut")
    assert code == 0, err
    return folder / "cut", run_folder


def test_the_command_that_is_named_makes_a_trace_with_no_tensor_less(tmp_path: Path):
    cut, run_folder = trace_without_records(tmp_path)
    before = kept_tensors(cut)
    assert before > 20
    code, out, _ = rankscope("verify", cut)
    assert code == 1
    command = out.splitlines()[-1].removeprefix("this host still holds records: rankscope ")
    assert str(run_folder) in command
    code, _, err = rankscope(*command.split())
    assert code == 0, err
    whole = Path(command.split()[-1])
    assert rankscope("verify", whole)[0] == 0
    assert kept_tensors(whole) == before


def test_no_command_is_named_that_would_lose_what_the_trace_has(tmp_path: Path):
    cut, run_folder = trace_without_records(tmp_path)
    (segment,) = run_folder.glob("rank*/*.cells")
    segment.rename(segment.with_name("000001.cells"))  # the first one was freed
    code, out, _ = rankscope("verify", cut)
    assert code == 1
    assert "rankscope recover" not in out
    assert f"this host still holds records in {run_folder}, but the trace was written" in out


def test_a_spool_that_holds_nothing_more_is_not_advised(tmp_path: Path):
    """As where a relay was killed after its last word: steps were dropped, and nothing brings them
    back."""
    base = spool_base(tmp_path / "disk")
    run_folder = host_run_folder(base, run_key("this"))
    header = RunHeader(run_id="run-1", out=tmp_path / "t", collector="shared", world_size=1)
    write_run_header(run_folder, header)
    identity = {"settings": {"spool": str(tmp_path / "disk")}}
    rank = PaperRank(run_folder, host=os.uname().nodename, identity=identity)
    with rank.call():
        pass
    rank.gap(records=3, first=1, last=2)
    rank.end()
    rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    code, out, _ = rankscope("verify", tmp_path / "trace")
    assert code == 1
    assert "spool full" in out
    assert "rankscope recover" not in out


def test_tensors_that_were_removed_are_named(tmp_path: Path):
    (tmp_path / "script.py").write_text(KEEPS)
    words = [sys.executable, str(tmp_path / "script.py"), tmp_path / "trace", tmp_path / "disk"]
    forked.run(words, check=True)
    assert rankscope("verify", tmp_path / "trace")[0] == 0
    for path in (tmp_path / "trace/tensors").rglob("*.safetensors"):
        path.unlink()
    code, out, _ = rankscope("verify", tmp_path / "trace")
    assert code == 1
    assert "tensors/rank00000/000001.safetensors: is not there" in out


def test_one_changed_bit_of_any_column_is_seen(tmp_path: Path):
    """Also where the number is one that a rank may have."""
    grid_job(tmp_path / "spools", tmp_path / "trace")
    build(tmp_path / "trace")
    path = tmp_path / "trace/steps/000000.safetensors"
    whole = path.read_bytes()
    assert rankscope("verify", tmp_path / "trace")[0] == 0
    begin = 8 + int.from_bytes(whole[:8], "little")
    with safe_open(path, "np") as file:
        assert len(file.metadata()["xxh3_64"]) == 16
    places = json.loads(whole[8:begin])
    changed = bytearray(whole)
    changed[begin + places["values.mean"]["data_offsets"][0]] ^= 1
    path.write_bytes(changed)
    with safe_open(path, "np") as file:
        assert np.isfinite(file.get_tensor("values.mean")).all()
    code, out, _ = rankscope("verify", tmp_path / "trace")
    assert code == 1
    assert "steps/000000.safetensors: was changed since it was written" in out
    for name in (b"values.mean", b"xxh3_64"):  # the header is held to it too
        path.write_bytes(whole.replace(name, name[:-1] + b"X", 1))
        with pytest.raises(TraceError, match="was changed"):
            map_columns(path, is_checked=True)
