"""Files that have the name of another rank, segment or chunk: each is read as what it says inside,
or not at all, and `recover` and `verify` say so.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.agent.join import RUN_FOLDER_VARIABLE
from rankscope.errors import TraceError
from rankscope.run.folders import (
    RunHeader,
    host_run_folder,
    run_key,
    spool_base,
    write_run_header,
)
from tests.cli.test_commands import rankscope as command
from tests.distributed.pool import RankPool


def train(steps: int, tensors: str, out: str) -> None:
    """Train on two ranks, each with data of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(out=out, steps="all", tensors=tensors, spool_bytes="512k"):
        for _ in range(steps):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def spools(ranks: RankPool, folder: Path, run: str, steps: int = 2, tensors: str = "") -> Path:
    """Return what a host holds of a run of two ranks: their streams, and their chunks."""
    run_folder = host_run_folder(spool_base(folder / run), run_key(run))
    header = RunHeader(run_id=run, out=folder / "t", collector="ipc://nobody", world_size=2)
    write_run_header(run_folder, header)
    env = {RUN_FOLDER_VARIABLE: str(run_folder)}
    ranks.run(train, steps, tensors, str(folder / "t"), world_size=2, env=env)
    return run_folder


@pytest.fixture(scope="module")
def held(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with tensors."""
    return spools(ranks, tmp_path_factory.mktemp("held"), "one", tensors="**:output")


@pytest.fixture(scope="module")
def long(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which each stream has several segments."""
    return spools(ranks, tmp_path_factory.mktemp("long"), "long", steps=40)


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def replicas_of(held: Path, out: Path) -> Path:
    """Return a trace folder with the streams of a host as replicas, and its chunks."""
    (out / "spool").mkdir(parents=True)
    for stream in sorted(held.glob("rank*")):
        whole = b"".join(path.read_bytes() for path in sorted(stream.glob("*.cells")))
        (out / "spool" / f"{stream.name}.cells").write_bytes(whole)
    if (held / "tensors").is_dir():
        shutil.copytree(held / "tensors", out / "tensors")
    return out


def inputs(trace: Path) -> dict[int, int]:
    """Return the hash of what each rank's model was handed first."""
    held = rankscope.open_trace(trace).value("", "input.0").per_rank
    return {rank: digest.hash for rank, digest in held.items() if digest is not None}


def recovered(folder: Path, out: Path) -> str:
    """Recover a folder; return what `verify` says of the trace, which is not that all is well."""
    code, said, err = command("recover", folder, "--out", out)
    assert code == 0, err
    assert "incomplete" in said
    assert folder.is_dir()
    code, said, _ = command("verify", out)
    assert code == 1
    return said


def test_what_is_in_its_place_is_complete(held: Path, long: Path, tmp_path: Path) -> None:
    for name, folder in (("held", held), ("long", long)):
        assert "complete" in command("recover", folder, "--out", tmp_path / name, "--keep-spool")[1]
        assert command("verify", tmp_path / name)[0] == 0
    assert len([*long.glob("rank00000.0/*.cells")]) > 2
    assert len(set(inputs(tmp_path / "held").values())) == 2


@pytest.mark.parametrize("kind", ["replicas", "stream folders"])
def test_streams_that_have_the_names_of_each_other_are_read_as_what_they_say(
    held: Path, tmp_path: Path, kind: str
) -> None:
    command("recover", held, "--out", tmp_path / "right", "--keep-spool")
    if kind == "replicas":
        folder = replicas_of(held, tmp_path / "held")
        exchange(*sorted((folder / "spool").glob("*.cells")))
    else:
        folder = Path(shutil.copytree(held, tmp_path / "held"))
        exchange(*sorted(folder.glob("rank*")))
    if kind == "replicas":  # it is read before it is recovered, too
        assert inputs(folder) == inputs(tmp_path / "right")
        assert "says that it is of rank00001.0" in command("verify", folder)[1]
    said = recovered(folder, tmp_path / "out")
    assert "its first record says that it is of rank00001.0; it was moved or renamed" in said
    assert inputs(tmp_path / "out") == inputs(tmp_path / "right")


@pytest.mark.parametrize("number", [0, 1])
def test_segments_of_two_streams_that_were_exchanged_are_not_read_as_each_others(
    long: Path, tmp_path: Path, number: int
) -> None:
    folder = Path(shutil.copytree(long, tmp_path / "long"))
    exchange(*sorted(folder.glob(f"rank*/{number:06d}.cells")))
    said = recovered(folder, tmp_path / "out")
    assert "000001.cells: says that it is of another stream" in said
    assert number == 0 or "65536..131072 are missing" in said


def test_segments_of_one_stream_that_were_exchanged_are_not_read_in_that_order(
    long: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(long, tmp_path / "long"))
    exchange(folder / "rank00000.0/000001.cells", folder / "rank00000.0/000002.cells")
    assert "or another segment of this one" in recovered(folder, tmp_path / "out")


def test_a_stream_of_another_run_is_refused_before_and_at_recovery(
    held: Path, long: Path, tmp_path: Path
) -> None:
    folder = replicas_of(held, tmp_path / "held")
    other = replicas_of(long, tmp_path / "long")
    (other / "spool/rank00001.0.cells").rename(folder / "spool/rank00001.0.cells")
    assert "records of 2 different runs" in command("verify", folder)[2]
    assert "records of 2 different runs" in command("recover", folder, "--out", tmp_path / "o")[2]


def chunks(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("tensors/rank*/*.safetensors"))


def as_left(folder: Path, is_finished: bool) -> Path:
    """Return a folder of which the chunks are finished, or as a kill leaves them."""
    if not is_finished:
        for path in chunks(folder):
            data = bytearray(path.read_bytes())
            end = 8 + int.from_bytes(data[:8], "little")
            head = bytes(data[8:end]).rstrip()
            begin = head.index(b'"xxh3":"') + 8
            blank = b"\0" + head[1:begin] + b'"}}'
            data[8:end] = blank.ljust(end - 8, b"\0")
            path.write_bytes(data)
    return folder


@pytest.mark.parametrize("is_finished", [True, False])
def test_chunks_of_two_ranks_that_were_exchanged_are_not_handed_out(
    held: Path, tmp_path: Path, is_finished: bool
) -> None:
    folder = as_left(replicas_of(held, tmp_path / "held"), is_finished)
    exchange(*chunks(folder))
    found = rankscope.open_trace(folder)
    for rank in (0, 1):
        with pytest.raises(TraceError, match="says it is chunk 1 of rank"):
            found.value("0", "output").local(rank)
    said = recovered(folder, tmp_path / "out")
    assert "tensors/rank00000/000001.safetensors: says it is chunk 1 of rank" in said


def test_chunks_that_are_exchanged_in_a_finished_trace_are_named_and_not_read(
    held: Path, tmp_path: Path
) -> None:
    command("recover", held, "--out", tmp_path / "out", "--keep-spool")
    exchange(*chunks(tmp_path / "out"))
    code, said, _ = command("verify", tmp_path / "out")
    assert code == 1
    for one, other in ((0, 1), (1, 0)):
        path = f"tensors/rank{one:05d}/000001.safetensors"
        assert f"{path}: says it is chunk 1 of rank{other:05d}.0; it was moved or renamed" in said
    found = rankscope.open_trace(tmp_path / "out")
    with pytest.raises(TraceError, match="it was moved or renamed"):
        found.value("0", "output").local(0)


def test_a_chunk_that_has_another_number_is_named_and_not_read(held: Path, tmp_path: Path) -> None:
    folder = replicas_of(held, tmp_path / "held")
    first = folder / "tensors/rank00000/000001.safetensors"
    first.rename(first.with_name("000002.safetensors"))
    said = recovered(folder, tmp_path / "out")
    assert "000002.safetensors: says it is chunk 1 of rank00000.0" in said
