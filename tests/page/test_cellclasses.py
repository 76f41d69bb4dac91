"""What alarms on a map: only what the trace of a program that went wrong has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.tree.reader import open_trace
from rankscope.words.page.cellplanes import CALL_KIND, CellClass, CellPlanes, ModuleRows
from rankscope.words.page.pages import check_page
from tests.diagnosis.paper import module, numbers, setup
from tests.page.papertraces import written
from tests.page.test_contents import calls, cells
from tests.tree.ranks_on_paper import PaperRank


def caught(rank: PaperRank) -> None:
    """A module raises; the program catches that and goes on."""
    setup(rank, {"head.weight": numbers(1)})
    for step in range(2):
        top = rank.enter(class_name="Model", step=step)
        rank.value(top, "input.0", numbers(step))
        inside = rank.enter("head", class_name="Linear", step=step, parent=top)
        for call in (inside, top):
            rank.exit(call, CallStatus.RAISED, "ValueError: too long")
        with rank.call(class_name="Model", step=step, micro_batch=1) as top:
            rank.value(top, "input.0", numbers(step))
            module(rank, "head", numbers(step), numbers(step + 9), step=step, micro_batch=1)


def page_of(folder: Path, ends=None):
    trace = open_trace(written(folder, caught, ends, world=2))
    page, _ = check_page(trace)
    return page


def alarms(page) -> set[int]:
    return {int(cell) for plane in cells(page).values() for cell in np.unique(plane)}


def test_what_a_program_catches_is_no_alarm(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    told = {end for call in calls(page) for end in call.get("end", ())}
    assert "raised on ranks 0-1: ValueError: too long" in told
    assert alarms(page) <= {CellClass.NOTHING, CellClass.NOT_JUDGED, CellClass.ALIKE}


def test_what_ends_a_rank_is_one(tmp_path: Path) -> None:
    assert CellClass.RAISED in alarms(page_of(tmp_path, {1: EndReason.RAISED}))


def test_deep_models_have_rows() -> None:
    rows = ModuleRows()
    deep = ".".join(["inner"] * 3_000)
    assert rows.of(deep, "Last") == 3_000
    assert rows.paths[:2] == ["", "inner"]
    assert rows.as_json()["parents"][:3] == [-1, 0, 1]
    assert rows.of("@Other.x") and rows.as_json()["parents"][rows.known("@Other")] == -1


def test_planes_grow_with_the_modules_and_keep_the_greatest_class() -> None:
    rows = ModuleRows()
    planes = CellPlanes(rows, 3)
    for number in range(50):
        row = rows.of(f"layer{number}")
        planes.raise_to(0, Phase.FORWARD, CALL_KIND, row, [0, 2], CellClass.ALIKE)
    planes.close()
    planes.raise_to(0, Phase.FORWARD, CALL_KIND, rows.of("layer7"), [2], CellClass.DIFFERS)
    planes.raise_to(0, Phase.FORWARD, CALL_KIND, rows.of("layer8"), [0], CellClass.NOT_JUDGED)
    merged = planes.merged(0, Phase.FORWARD)
    assert merged.shape == (51, 3)
    assert merged[rows.of("layer7")].tolist() == [CellClass.ALIKE, 0, CellClass.DIFFERS]
    assert merged[rows.of("layer8")].tolist() == [CellClass.ALIKE, 0, CellClass.ALIKE]
    assert planes.alike_ranks() == [[0], [1], [2]]
