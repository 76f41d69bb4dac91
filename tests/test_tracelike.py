"""Every public function that reads a trace takes it open or by its place, and says in one way what
is no trace."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope
from rankscope.errors import FolderError, TraceError
from rankscope.testing import assert_same, save_golden

Read = Callable[[Any, "Traces"], object]


class Traces:
    """One small model traced: finished, and as its rank's records alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole, self.unfinished = folder / "whole", folder / "unfinished"
        self.empty, self.file = folder / "empty", folder / "file"
        self.empty.mkdir()
        self.file.write_text("no trace")
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        with rankscope.trace(
            self.model, out=self.whole, tensors="**", keep_spool=True
        ) as self.handle:
            self.model(torch.ones(2, 4)).sum().backward()
        shutil.copytree(self.whole, self.unfinished)
        for name in ("trace.json", "tree.json"):
            (self.unfinished / name).unlink()
        shutil.rmtree(self.unfinished / "steps")
        self.golden = folder / "golden"
        save_golden(self.whole, self.golden)


READERS: dict[str, Read] = {
    "open_trace": lambda trace, _: rankscope.open_trace(trace),
    "check": lambda trace, _: rankscope.check(trace),
    "diff, reference": lambda trace, made: rankscope.diff(trace, made.whole),
    "diff, run": lambda trace, made: rankscope.diff(made.whole, trace),
    "replay": lambda trace, made: rankscope.replay(made.model[1], trace, "1"),
    "report.write": lambda trace, made: rankscope.report.write(trace, made.folder / "page.html"),
    "report.to": lambda trace, made: rankscope.report.to(
        "tensorboard", trace, run=made.folder / "log"
    ),
    "report.fragment": lambda trace, _: rankscope.report.fragment(trace),
    "assert_same, reference": lambda trace, made: assert_same(trace, made.whole),
    "assert_same, run": lambda trace, made: assert_same(made.whole, trace),
    "save_golden": lambda trace, made: save_golden(trace, made.folder / "again"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def reader(name: str) -> Read:
    if name == "report.to":
        pytest.importorskip("tensorboard", reason="pip install -e '.[trackers]'")
    return READERS[name]


def mapped(folder: Path) -> list[str]:
    """The files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["str", "Path", "trace.json", "open", "handle"])
def test_a_trace_is_taken_by_its_place_and_open(reader: Read, kind: str, made: Traces) -> None:
    given = {
        "str": lambda: str(made.whole),
        "Path": lambda: made.whole,
        "trace.json": lambda: made.whole / "trace.json",
        "open": lambda: rankscope.open_trace(made.whole),
        "handle": lambda: made.handle,
    }[kind]()
    reader(given, made)
    if kind == "open":  # and stays open
        assert given.value("1", "output").local(0).shape == (2, 4)
        assert len(given.steps) == 1


NO_TRACES = {
    "missing": "nowhere: no such folder",
    "file": "file: is a file",
    "golden": "golden: is a file",
    "empty": "empty: is empty",
    "None": "NoneType is not a trace",
    "int": "int is not a trace",
    "model": "Sequential is not a trace",
}
TAKES_GOLDEN = {name for name in READERS if "reference" in name or "run" in name}
TAKEN = {("open_trace", "None"), *((name, "golden") for name in TAKES_GOLDEN)}
"""The newest trace here, and golden traces."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in READERS for kind in NO_TRACES if (name, kind) not in TAKEN],
)
def test_what_is_no_trace_is_one_error_that_says_what_to_give(
    kind: str, reader: Read, made: Traces
) -> None:
    given = {
        "missing": made.folder / "nowhere",
        "file": made.file,
        "golden": made.golden,
        "empty": str(made.empty),
        "None": None,
        "int": 3,
        "model": made.model,
    }[kind]
    with pytest.raises(FolderError, match=NO_TRACES[kind]) as raised:
        reader(given, made)
    assert "; give " in str(raised.value)


def test_a_noise_trace_that_is_none_is_the_same_error(made: Traces) -> None:
    for given in (made.folder / "nowhere", made.file, str(made.empty), 3):
        with pytest.raises(FolderError, match="; give "):
            rankscope.diff(made.whole, made.whole, noise=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", READERS)
def test_an_unfinished_trace_is_read_as_far_as_it_came(
    name: str, reader: Read, made: Traces
) -> None:
    if name == "save_golden":
        with pytest.raises(TraceError, match="has to be complete"):
            reader(made.unfinished, made)
    elif name.startswith("assert_same"):
        with pytest.raises(AssertionError, match="incomplete"):
            reader(made.unfinished, made)
    else:
        reader(made.unfinished, made)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in READERS if name != "open_trace" for kind in ("Path", "handle")),
        *((name, "golden") for name in sorted(TAKES_GOLDEN)),
    ],
)
def test_what_a_function_opened_it_closes(name: str, kind: str, reader: Read, made: Traces) -> None:
    """Nothing of the folder stays mapped: not by what it returns, nor by the module itself."""
    given = {"Path": made.whole, "handle": made.handle, "golden": made.golden}[kind]
    gc.collect()
    gc.disable()
    try:
        returned = reader(given, made)
        if name not in ("replay", "save_golden"):
            gc.collect()  # the calls of a step know each other
        assert not mapped(made.whole), returned
    finally:
        gc.enable()
