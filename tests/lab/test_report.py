"""`rankscope.report` in real experiment trackers."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankscope
from tests.test_report import is_page, run
from tests.test_report import traces as traces


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: pip install -e '.[trackers]'",
    )


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: frames of a log in blocks of 32 KB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last frame of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@needs("wandb")
def test_wandb_gets_the_verdict_in_the_summary_and_the_page_as_artifact(
    traces: dict[str, Path], tmp_path: Path
):
    code = """if True:
        import sys, wandb, rankscope
        with wandb.init(mode="offline", project="tests") as run:
            run.log({"loss": 1.0})
            rankscope.report.to("wandb", sys.argv[1])
            run.log({"loss": 2.0})
        try:
            rankscope.report.to("wandb", sys.argv[1])
        except rankscope.errors.TrackerError as error:
            print(error)
    """
    said = run(code, tmp_path, traces["fault"])
    assert said == "no run of W&B is active here; call wandb.init() before, or give run=\n"
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file))
    summary = {
        each.key: each.value_json
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for each in record.summary.update
    }
    assert summary["rankscope/verdict"] == '"fault"'
    assert summary["rankscope/findings"] == "1" and summary["rankscope/coverage"] == "0.0"
    assert summary["rankscope/first_finding"].startswith('"1:output: 2 +inf')
    assert "step" not in " ".join(key for key in summary if key.startswith("rankscope/"))
    (artifact,) = [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    (page,) = artifact.manifest.contents
    assert page.path == "rankscope-report.html"
    assert is_page(Path(page.local_path).read_text())
    history = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    keys = {
        name for each in history for item in each.item for name in (item.key or item.nested_key[0],)
    }
    assert "loss" in keys and not any("rankscope" in key for key in keys), "no series"
    assert [each.step.num for each in history] == [0, 1], "its steps are those of the program"


@needs("mlflow")
@pytest.mark.parametrize("is_over", [False, True], ids=["active run", "run that has ended"])
def test_mlflow_gets_the_verdict_in_tags_and_the_page_as_artifact(
    traces: dict[str, Path], tmp_path: Path, is_over: bool
):
    code = """if True:
        import sys, mlflow, rankscope
        mlflow.set_tracking_uri(sys.argv[2])
        try:
            rankscope.report.to("mlflow", sys.argv[1])
        except rankscope.errors.TrackerError as error:
            assert "no run of MLflow is active here" in str(error)
        with mlflow.start_run() as run:
            if sys.argv[3] == "False":
                rankscope.report.to("mlflow", sys.argv[1], step=7)
        if sys.argv[3] == "True":
            rankscope.report.to("mlflow", sys.argv[1], run=mlflow.last_active_run(), step=7)
        found = mlflow.get_run(run.info.run_id)
        assert not found.data.metrics and not found.data.params
        print({k: v for k, v in found.data.tags.items() if k.startswith("rankscope.")})
        print(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, dst_path="got"))
    """
    store = (tmp_path / "store").as_uri()
    lines = run(code, tmp_path, traces["fault"], store, is_over).splitlines()
    tags = eval(lines[0])
    assert tags["rankscope.verdict"] == "fault" and tags["rankscope.step"] == "7"
    assert tags["rankscope.first_finding"].startswith("1:output: 2 +inf")
    assert tags["rankscope.trace"] == str(traces["fault"])
    (page,) = (tmp_path / "got").rglob("*.html")
    assert page.name == "rankscope-report-step7.html" and is_page(page.read_text())


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own graph export
@pytest.mark.parametrize("is_folder", [False, True], ids=["writer", "log folder"])
def test_tensorboard_gets_a_text_and_the_page_beside_its_events(
    traces: dict[str, Path], tmp_path: Path, is_folder: bool
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    log = tmp_path / "log"
    writer = SummaryWriter(str(log))
    writer.add_scalar("loss", 1.0, 0)
    writer.flush()
    report = rankscope.report.to("tensorboard", traces["fault"], run=log if is_folder else writer)
    assert report.verdict.value == "fault"
    rankscope.report.to("tensorboard", traces["clean"], run=writer, step=5)
    writer.add_scalar("loss", 2.0, 1)  # the writer is still the program's
    writer.close()
    events = EventAccumulator(str(log), size_guidance={"tensors": 0})
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"] and len(events.Scalars("loss")) == 2
    assert events.Tags()["tensors"] == ["rankscope/text_summary"]
    texts = {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("rankscope/text_summary")
    }
    assert "    verdict: fault\n" in texts[0] and "    first_finding: 1:output: 2 +inf" in texts[0]
    assert f"    page: {log / 'rankscope-report.html'}" in texts[0]
    assert "    verdict: clean\n" in texts[5] and "first_finding" not in texts[5]
    assert all(line.startswith("    ") for text in texts.values() for line in text.splitlines())
    assert is_page((log / "rankscope-report.html").read_text())
    assert is_page((log / "rankscope-report-step5.html").read_text())
