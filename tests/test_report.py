"""`rankscope.report`: the page by one call, and verdict and page in real experiment trackers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rankscope
from rankscope.errors import FolderError, LayoutError, RankscopeError, TrackerError
from tests.models import DividesByZero


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One trace that is clean and one in which the module `1` makes infinities."""
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for name, middle in (("clean", torch.nn.ReLU()), ("fault", DividesByZero())):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), middle, torch.nn.Linear(4, 1))
        with rankscope.trace(model, out=folder / name):
            model(torch.ones(2, 4)).sum().backward()
        found[name] = folder / name
    return found


def run(code: str, folder: Path, *arguments: object) -> str:
    """Run a program of a user of a tracker, in an empty folder; return what it prints."""
    given = {
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": folder,
        "WANDB_CACHE_DIR": folder,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, **{name: str(value) for name, value in given.items()}},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_page(text: str) -> bool:
    return text.lstrip().lower().startswith("<!doctype html>") and "<title>rankscope" in text


# ------------------------------------------------------------------------------------- the page


def test_write_makes_the_page_and_returns_its_file(traces: dict[str, Path], tmp_path: Path):
    out = tmp_path / "page.html"
    for given in (traces["fault"], str(traces["fault"]), rankscope.open_trace(traces["fault"])):
        assert rankscope.report.write(given, out) == out
        page = out.read_text()
        assert is_page(page) and "nonfinite-origin" in page
        out.unlink()


def test_write_says_what_it_cannot_read(traces: dict[str, Path], tmp_path: Path):
    with pytest.raises(FolderError, match="no such folder"):
        rankscope.report.write(tmp_path / "none", tmp_path / "page.html")
    with pytest.raises(LayoutError, match="cannot be read"):
        rankscope.report.write(traces["clean"], tmp_path / "page.html", layout=tmp_path / "none")
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------------------------------- trackers


def test_a_tracker_that_is_not_known_is_refused_with_those_that_are(traces: dict[str, Path]):
    with pytest.raises(TrackerError, match="choose from wandb, mlflow, tensorboard"):
        rankscope.report.to("neptune", traces["clean"])
    with pytest.raises(RankscopeError, match="SummaryWriter"):
        rankscope.report.to("tensorboard", traces["clean"])


def test_a_package_that_is_missing_is_named_with_what_installs_it(
    traces: dict[str, Path], tmp_path: Path
):
    code = """if True:
        import sys
        sys.modules["wandb"] = sys.modules["mlflow"] = sys.modules["tensorboard"] = None
        import rankscope
        for name, run in (("wandb", None), ("mlflow", None), ("tensorboard", "log")):
            try:
                rankscope.report.to(name, sys.argv[1], run=run)
            except rankscope.errors.TrackerError as error:
                print(error)
    """
    lines = run(code, tmp_path, traces["clean"]).splitlines()
    assert [line.split("; ")[-1] for line in lines] == [
        f"pip install {name}" for name in ("wandb", "mlflow", "tensorboard")
    ]
