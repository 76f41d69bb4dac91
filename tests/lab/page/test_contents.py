"""Pages of two runs, of pipelines, and cut to what fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.record.ranks import parse_ranks
from rankscope.testing import save_golden
from rankscope.tree.reader import open_trace
from rankscope.words.page.cellplanes import DistanceClass
from rankscope.words.page.pagecontent import (
    chosen_values,
    page_html,
    served_data,
)
from rankscope.words.page.pages import check_page, diff_page
from tests.page.test_contents import calls, cells, charts
from tests.page.test_contents import made as made
from tests.torches import GLOO_SUMS_FOR_AVERAGES


def test_a_pipeline_s_stages_are_groups_of_ranks_that_are_alike(made) -> None:
    _, page, _ = made("pipeline")
    groups = [parse_ranks(text) for text in page.data["alike"]]
    assert sorted(rank for group in groups for rank in group) == list(range(page.data["world"]))
    assert len(groups) > 1


def test_a_page_that_would_be_too_large_keeps_the_values_around_the_findings(trace_of) -> None:
    trace = open_trace(trace_of("replica-mismatch") / "trace")
    whole, report = check_page(trace)
    fixed = sum(len(each) for name, each in whole.packed.items() if not name.startswith("d"))
    most = int(4 / 3 * fixed) + 15_000
    assert whole.size > most and whole.data["left_out"] == ""
    page, _ = check_page(trace, most_bytes=most)
    assert page.size <= most
    assert "rankscope report TRACE --path" in page.data["left_out"]
    paths = page.data["modules"]["paths"]
    held = {(paths[call["m"]], call["t"]) for call in calls(page)}
    first = report.origins[0]
    setup = [step["key"] for step in page.data["steps"]].index("setup")
    assert (first.path, setup) in held
    assert len(held) < len({(call["m"], call["t"]) for call in calls(whole)})
    assert page.data["planes"] == whole.data["planes"]


def test_a_page_of_two_runs_tells_errors_in_units_of_noise(trace_of) -> None:
    folder = trace_of("diff-divergence")
    page, report = diff_page(open_trace(folder / "reference"), open_trace(folder / "trace"))
    first = report.origins[0]
    row = page.data["modules"]["paths"].index(first.path)
    step = [each["key"] for each in page.data["steps"]].index(str(first.step))
    plane = cells(page)[step, first.phase.word]
    assert plane[row, first.ranks[0]] >= DistanceClass.ABOVE
    slots = [
        slot
        for call in calls(page)
        if (call["m"], call["t"], call["p"]) == (row, step, first.phase.word)
        for slot in call["s"]
    ]
    off = [slot for slot in slots if slot["error"] > slot["allowed"]]
    assert first.slot in [slot["n"] for slot in off]
    assert [name for name, _ in off[0]["sides"]] == ["reference", "this run"]
    before = cells(page)[step, "forward"][page.data["modules"]["paths"].index("embed")]
    assert (before <= DistanceClass.BELOW).all()


@pytest.mark.skipif(
    GLOO_SUMS_FOR_AVERAGES, reason="FSDP2's gradients over gloo are wrong in torch 2.8"
)
def test_two_topologies_that_agree_have_no_cell_above_noise(trace_of) -> None:
    folder = trace_of("diff-topologies")
    page, report = diff_page(open_trace(folder / "reference"), open_trace(folder / "trace"))
    assert report.verdict.value == "clean"
    above = [int((plane >= DistanceClass.ABOVE).sum()) for plane in cells(page).values()]
    assert sum(above) == 0
    errors = [each for step in charts(page) for each in step.get("error", {}).values()]
    assert all(  # a spike above CLEAN is no error of its own
        error < 100 * each["noise"][row] for each in errors for row, error in each["error"].items()
    )
    assert errors
    near = (DistanceClass.SAME, DistanceClass.FAR_BELOW, DistanceClass.BELOW)
    assert sum(int(np.isin(plane, near).sum()) for plane in cells(page).values()) > 200


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=12, max_size=12), min_size=1, max_size=30),
    st.sets(st.integers(0, 11), max_size=4),
    st.integers(20, 2000),
)
def test_what_is_chosen_fits_and_what_is_left_out_is_said(steps, near, limit) -> None:
    entries = [np.array(each) for each in steps]
    choice = chosen_values(entries, {*near} - {0}, near, {0}, limit)
    taken = sum(
        int(entries[step].sum() if rows is None else entries[step][sorted(rows)].sum())
        for step, rows in choice.rows_of.items()
    )
    whole = sum(int(each.sum()) for each in entries)
    is_all = len(choice.rows_of) == len(entries) and not any(
        rows is not None for rows in choice.rows_of.values()
    )
    assert bool(choice.left_out) is not is_all
    assert is_all is (whole <= limit)
    assert taken <= limit


def test_numbers_without_bound_are_no_trouble(trace_of, tmp_path: Path) -> None:
    folder = trace_of("unbounded")
    trace = open_trace(folder / "trace")
    page, report = check_page(trace)
    assert report.verdict.value == "clean"
    page, report = diff_page(trace, open_trace(folder / "trace"))
    assert report.verdict.value == "clean"
    slots = [slot for call in calls(page) for slot in call["s"]]
    assert any(slot.get("allowed", 0) >= 1e300 for slot in slots)
    json.loads(served_data(page))


def test_a_golden_file_has_a_page_of_its_differences(trace_of, tmp_path: Path) -> None:
    trace = open_trace(trace_of("clean") / "trace")
    golden = tmp_path / "clean.golden"
    save_golden(trace, golden)
    page, report = diff_page(trace, open_trace(golden, takes_golden=True))
    assert report.verdict.value == "clean"
    assert "<title>" in page_html(page)
