"""Golden traces: what `diff` needs of a trace in one small file."""

from __future__ import annotations

import lzma
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.cli.app import main
from rankscope.errors import FolderError, TraceError, TraceVersionError
from rankscope.record.finding import Report
from rankscope.testing import assert_same, save_golden
from rankscope.tree.goldenfile import GOLDEN_FORMAT
from tests.distributed import global_tensors_job as job
from tests.distributed.pool import RankPool


def run(folder: Path, epsilon: float = 1e-5) -> Path:
    """Trace a training step of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=epsilon), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=folder):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return folder


def told(report: Report) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [(f.path, f.slot, f.ranks, f.kind.value) for f in report.findings]


def test_a_golden_file_has_a_few_kb_and_judges_as_the_trace_does(tmp_path: Path) -> None:
    trace, golden = run(tmp_path / "trace"), tmp_path / "tests" / "train.golden"
    size = save_golden(trace, golden)
    assert size == golden.stat().st_size < 5000
    assert_same(golden, trace)
    wrong = run(tmp_path / "wrong", epsilon=1e-2)
    with pytest.raises(AssertionError, match=r": 1:output: "):
        assert_same(golden, wrong)
    whole, small = rankscope.diff(trace, wrong), rankscope.diff(golden, wrong)
    assert told(whole) == told(small) != []
    assert whole.preflight == small.preflight
    assert (whole.compared, whole.recorded, whole.skipped) == (
        (small.compared, small.recorded, small.skipped)
    )
    for ours, theirs in zip(whole.findings, small.findings):
        errors = [each.evidence["relative_error"] for each in (ours, theirs)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-2)
    assert told(rankscope.diff(golden, golden)) == []


def test_the_same_run_gives_the_same_bytes_and_nothing_of_the_machine(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.golden", "b.golden")]
    for number, file in enumerate(files):
        save_golden(run(tmp_path / f"t{number}"), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = lzma.decompress(files[0].read_bytes())
    for word in (str(tmp_path), socket.gethostname(), "argv", "environment"):
        assert word.encode() not in text


def test_shards_of_ranks_and_batches_that_are_split_in_another_way(
    ranks: RankPool, tmp_path: Path
) -> None:
    for kind, size in (("fsdp x tp", 4), ("ddp", 2)):
        ranks.run(job.run, kind, str(tmp_path / kind), "", world_size=size)
    golden = tmp_path / "cut.golden"
    save_golden(tmp_path / "fsdp x tp", golden)
    assert_same(golden, tmp_path / "fsdp x tp")
    with rankscope.trace(out=tmp_path / "alone"):
        job.train(job.net(), job.batch())
    save_golden(tmp_path / "alone", tmp_path / "plain.golden")
    save_golden(tmp_path / "alone", tmp_path / "samples.golden", has_samples=True)
    plain, samples, whole = (
        rankscope.diff(tmp_path / each, tmp_path / "ddp")
        for each in ("plain.golden", "samples.golden", "alone")
    )
    assert told(plain) == told(samples) == told(whole) == []
    assert (samples.compared, samples.skipped) == (whole.compared, whole.skipped)


def test_the_command_diff_takes_golden_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, golden = run(tmp_path / "trace"), tmp_path / "g"
    save_golden(trace, golden)
    for words, answer in (([], "no fault found"), (["--exact"], "clean"), (["--matrix"], "clean")):
        with pytest.raises(SystemExit) as left:
            main(["diff", *words, str(golden), str(trace)])
        assert not left.value.code
        assert answer in capsys.readouterr().out


def test_what_is_no_golden_trace_is_refused(tmp_path: Path) -> None:
    trace, golden = run(tmp_path / "trace"), tmp_path / "g"
    save_golden(trace, golden)
    packed = golden.read_bytes()
    golden.write_bytes(packed[:-40])
    with pytest.raises(TraceError, match="no golden trace, or a damaged one"):
        rankscope.diff(golden, trace)
    golden.write_bytes(lzma.compress(b"something else"))
    with pytest.raises(TraceError, match="no golden trace"):
        rankscope.diff(golden, trace)
    text = lzma.decompress(packed).replace(GOLDEN_FORMAT.encode(), b"rankscope.golden/9", 1)
    golden.write_bytes(lzma.compress(text))
    with pytest.raises(TraceVersionError, match="golden/9"):
        rankscope.diff(golden, trace)
    (tmp_path / "file").write_text("here")
    with pytest.raises(FolderError, match="cannot be written"):
        save_golden(trace, tmp_path / "file" / "g")
    with pytest.raises(FolderError, match="is not a trace"):
        save_golden(3, golden)  # type: ignore[arg-type]
