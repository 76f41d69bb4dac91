"""What a page holds is what the trace says: classes of cells, values behind them, where they came
from."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import zlib
from pathlib import Path

import numpy as np
import pytest

from rankscope.errors import FolderError, SelectionError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Report, Severity
from rankscope.record.ranks import parse_ranks
from rankscope.record.texts import visible
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from rankscope.words.page.cellplanes import CellClass
from rankscope.words.page.pagecontent import (
    DATA_BYTES,
    PageContent,
    page_html,
    served_data,
)
from rankscope.words.page.pages import check_page
from rankscope.words.page.verdicthtml import job_html
from tests.lab.faults.model import GPT
from tests.lab.faults.setup import Shape
from tests.page.driven import write_page
from tests.page.papertraces import PAPER

OF_CHECK = [
    *("nonfinite-origin", "crash", "hang", "unbounded"),
    *(
        pytest.param(name, marks=pytest.mark.lab)
        for name in ("clean", "pipeline", "replica-mismatch", *PAPER)
        if name not in ("crash", "hang", "unbounded")
    ),
]


@pytest.fixture(scope="package")
def made(trace_of):
    found: dict[str, tuple[Trace, PageContent, Report]] = {}

    def of(name: str) -> tuple[Trace, PageContent, Report]:
        if name not in found:
            folder = trace_of(name)
            file = folder / "layout.toml"
            trace = open_trace(folder / "trace")
            layouts = LayoutFile.load(file) if file.exists() else None
            found[name] = (trace, *check_page(trace, layouts))
        return found[name]

    return of


def planes(page: PageContent) -> dict[tuple[int, str, str], np.ndarray]:
    shape = (len(page.data["modules"]["paths"]), page.data["world"])
    return {
        (step, phase, kind): np.frombuffer(zlib.decompress(page.packed[name]), np.uint8).reshape(
            shape
        )
        for step, phase, kind, name in page.data["planes"]
    }


def cells(page: PageContent) -> dict[tuple[int, str], np.ndarray]:
    """{(step, phase): [modules, ranks] the greatest class}."""
    found: dict[tuple[int, str], np.ndarray] = {}
    for (step, phase, _), plane in planes(page).items():
        found[step, phase] = np.maximum(found.get((step, phase), 0), plane)
    return found


def calls(page: PageContent) -> list[dict]:
    blocks = [f"d{number}" for number in page.data["blocks"]]
    return [call for name in blocks for call in json.loads(zlib.decompress(page.packed[name]))]


@pytest.mark.parametrize("name", OF_CHECK)
def test_a_cell_is_marked_where_a_finding_is_and_nowhere_else(name: str, made) -> None:
    trace, page, report = made(name)
    paths = page.data["modules"]["paths"]
    named = set()
    for finding in report.findings:
        if finding.severity is Severity.FAULT:
            named |= {(visible(finding.path), finding.phase.word, r) for r in finding.ranks}
    ends = {rank["rank"]: rank["end"] for rank in trace.completeness["ranks"]}
    found = set()
    for (_, phase), plane in cells(page).items():
        for row, rank in zip(*np.nonzero(plane >= CellClass.DIFFERS)):
            cell = plane[row, rank]
            if (paths[row], phase, rank) in named:
                found.add((paths[row], phase, rank))
            elif cell == CellClass.MISSING:
                assert ends.get(rank, "none") not in ("exit", "closed")
            else:
                assert cell in (CellClass.NOT_FINITE, CellClass.NOT_LEFT, CellClass.RAISED)
    known = {(path, phase, rank) for path, phase, rank in named if path in paths}
    assert found == known


@pytest.mark.parametrize("name", OF_CHECK)
def test_a_cell_is_there_where_a_rank_made_the_call(name: str, made) -> None:
    trace, page, _ = made(name)
    row_of = {path: row for row, path in enumerate(page.data["modules"]["paths"])}
    called = set()
    for number, step in enumerate((*trace.setup, *trace.steps)):
        for node in step.walk():
            row = row_of[visible(node.path)]
            called |= {(number, node.phase.word, row, rank) for rank in node.ranks}
    said = {
        (step, phase, row, rank)
        for (step, phase), plane in cells(page).items()
        for row, rank in zip(*np.nonzero((plane > 0) & (plane != CellClass.MISSING)))
    }
    missing = {
        (step, phase, row, rank)
        for (step, phase), plane in cells(page).items()
        for row, rank in zip(*np.nonzero(plane == CellClass.MISSING))
    }
    assert said <= called <= said | missing


@pytest.mark.parametrize(
    "name", ["hostile", pytest.param("pipeline", marks=pytest.mark.lab), "missing"]
)
def test_the_values_behind_the_cells_are_those_of_the_trace(name: str, made) -> None:
    trace, page, _ = made(name)
    names = list(page.data["numbers"])
    told = {}
    for call in calls(page):
        for slot in call.get("s", ()):
            for fold in slot.get("f", ()):
                for rank in parse_ranks(fold["r"]):
                    key = (call["m"], call["t"], call["p"], call.get("b"), call.get("o", 0))
                    told[(*key, slot["n"], rank)] = fold
    row_of = {path: row for row, path in enumerate(page.data["modules"]["paths"])}
    held = 0
    for number, step in enumerate((*trace.setup, *trace.steps)):
        for node in step.walk():
            key = (row_of[visible(node.path)], number, node.phase.word)
            for view in node.slots:
                if view.dtype == "python":
                    continue
                for rank, digest in view.per_rank().items():
                    place = (*key, node.micro_batch, node.ordinal, visible(view.slot), rank)
                    fold = told[place]
                    assert tuple(fold["s"]) == view.shapes()[rank]
                    assert ("v" in fold) == (digest is not None)
                    if digest is not None:
                        own = fold["v"][names.index("l2")]
                        assert own == pytest.approx(digest.l2, rel=1e-5, nan_ok=True)
                        assert fold["h"] == f"{digest.hash:016x}"
                        held += 1
    assert held > 20 or name == "hostile"


def test_inputs_name_the_call_they_came_from(made) -> None:
    _, page, _ = made("clean")
    paths = page.data["modules"]["paths"]
    came = {
        (paths[call["m"]], slot["n"]): (paths[slot["from"][0]], slot["from"][2])
        for call in calls(page)
        for slot in call.get("s", ())
        if call["p"] == "forward" and "from" in slot
    }
    assert came["layers.1", "input.0"] == ("layers.0", "output")
    assert came["head", "input.0"][0] == "norm"
    assert came["layers.1.attention_norm", "input.0"] == ("layers.0", "output")


def test_a_narrow_page_holds_what_was_asked_for(made) -> None:
    trace, _, _ = made("clean")
    page, _ = check_page(trace, path="layers.1*", steps=(range(1, 2),))
    paths = page.data["modules"]["paths"]
    held = {(paths[call["m"]], page.data["steps"][call["t"]]["key"]) for call in calls(page)}
    assert held
    assert {step for _, step in held} == {"1"}
    assert all(path.startswith("layers.1") for path, _ in held)
    with pytest.raises(SelectionError, match="matches nothing"):
        check_page(trace, path="no.such*")


def charts(page: PageContent) -> list[dict]:
    found: list[dict] = json.loads(zlib.decompress(page.packed["charts"]))
    return found


def test_the_loss_is_drawn_where_one_scalar_is_it_with_the_spread_of_the_ranks(made) -> None:
    _, page, _ = made("losses")
    drawn = {
        page.data["steps"][number]["key"]: step["loss"]
        for number, step in enumerate(charts(page))
        if "loss" in step
    }
    assert drawn == {
        "0": [4.75, 4.25, 5.25],
        "1": [3.75, 3.25, 4.25],
        "2": [2.75, 2.25, 3.25],
        "3": [None, None, None],
    }
    assert not any("loss" in step for step in charts(made("clean")[1])), "no module returns one"


def test_the_head_says_how_where_and_when_the_job_ran_and_how_large_it_was(made, trace_of) -> None:
    trace, page, _ = made("clean")
    job = html.unescape(page.sections["job"])
    assert f"<code>{shlex.join(trace.run['argv'])}</code>" in job
    assert f"on {trace.run['hosts'][0]['name']}" in job
    assert trace.run["created"][:19].replace("T", " ") in job
    assert f"torch {trace.run['versions']['torch']}" in job
    assert re.search(r"\d\.\d s from the first traced call to the last", job)
    size = sum(each.numel() for each in GPT(Shape(layers=3, hidden=24)).parameters())
    assert f"; {size:,} parameters;" in job
    by_hand = job_html("", open_trace(trace_of("diff-tp") / "trace"))
    assert re.search(r"; [\d,]+ parameters on the lowest rank;", by_hand), "slices not declared"
    stages = re.search(r"; ([\d,]+) parameters;", job_html("", made("pipeline")[0]))
    assert stages is not None and int(stages[1].replace(",", "")) == size


def test_a_page_replaces_a_page_and_nothing_else(tmp_path: Path, made) -> None:
    trace, _, _ = made("clean")
    out = tmp_path / "report.html"
    assert write_page(trace, out) == out
    write_page(trace, out)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    mine = tmp_path / "mine.html"
    mine.write_text("<title>my thesis</title>")
    with pytest.raises(FolderError, match=r"not a page of rankscope"):
        write_page(trace, mine)
    assert mine.read_text() == "<title>my thesis</title>"
    with pytest.raises(FolderError, match="cannot be written"):
        write_page(trace, tmp_path / "no" / "such.html")


def test_a_page_is_for_its_owner_and_goes_where_a_link_points(tmp_path: Path, made) -> None:
    trace, _, _ = made("clean")
    target, link, empty = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "empty.html"
    link.symlink_to(target)
    write_page(trace, link)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o600
    empty.touch()
    write_page(trace, empty)
    assert empty.stat().st_size
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for wrong in (pipe, tmp_path, Path("."), Path("/dev/null")):
        with pytest.raises(FolderError, match="not a page of rankscope"):
            write_page(trace, wrong)
    write_page(trace, tmp_path / f"{'x' * 245}.html")


def test_what_is_served_is_what_is_written(made) -> None:
    _, page, _ = made("clean")
    served = json.loads(served_data(page))
    text = page_html(page)
    assert served["data"] == json.loads(json.dumps(page.data))
    for section in page.sections.values():
        assert section in text
    for name, packed in served["packed"].items():
        assert f'id="packed-{name}">{packed}</script>' in text
    assert page.size < DATA_BYTES
