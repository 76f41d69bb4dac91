"""Settings: one table, three spellings, clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.errors import SettingError
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.settings import SETTINGS, parse_size, settings_from, settings_of_run


def test_a_keyword_wins_over_the_variable_and_the_variable_over_the_default() -> None:
    environ = {"RANKSCOPE_STEPS": "5", "RANKSCOPE_BATCH_DIM": "1"}
    settings = settings_from({"steps": "7-9"}, environ)
    assert 8 in settings.steps and 5 not in settings.steps
    assert settings.batch_dim == 1
    assert settings.spool_bytes == 256 << 20


def test_every_setting_has_an_option_a_variable_and_a_keyword() -> None:
    names = {s.name for s in SETTINGS}
    assert {"out", "steps", "ranks", "paths", "phases", "slots", "spool", "collector"} <= names
    assert all(s.variable == "RANKSCOPE_" + s.name.upper().replace("-", "_") for s in SETTINGS)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("0-2,10", (0, 1, 2, 10), (3, 9, 11)),
        ("every:100", (0, 100, 700), (1, 99)),
        ("all", (0, 12345), ()),
    ],
)
def test_steps_are_ranges_a_period_or_all(
    text: str, inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    steps = StepSelection.parse(text)
    assert all(s in steps for s in inside) and not any(s in steps for s in outside)


@pytest.mark.parametrize("text", ["", "2-1", "a", "1-", "every:0", "every:x", "-1", "1;2"])
def test_a_bad_step_range_says_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingError, match=r"not a step: write|write 1-2|every:100"):
        StepSelection.parse(text)


def test_a_selection_knows_when_no_later_step_can_come() -> None:
    assert StepSelection.parse("0-2").is_over(2) and not StepSelection.parse("0-2,9").is_over(5)
    assert not StepSelection.parse("every:10").is_over(1000)


def test_a_black_box_records_every_step_and_has_a_file_and_a_factor_of_its_own(tmp_path: Path):
    box = StepSelection.parse(f"last:3,at:{tmp_path}/now,spike:2.5")
    assert (box.last, box.file, box.given[Trigger.SPIKE]) == (3, tmp_path / "now", (2.5,))
    assert 0 in box and 10**6 in box and not box.is_over(10**6)
    plain, calm = StepSelection.parse("last:3"), StepSelection.parse("last:3,spike:0")
    assert plain.given == {Trigger.SPIKE: (10.0,), Trigger.WATCHED: ()}
    assert plain.waits_for(Trigger.SPIKE) and not calm.waits_for(Trigger.SPIKE)
    assert not plain.waits_for(Trigger.TOUCHED) and box.waits_for(Trigger.TOUCHED)
    watching = StepSelection.parse("last:3,watch:loss:output,spike:4, watch::*,watch:loss:output")
    assert watching.given[Trigger.WATCHED] == ("loss:output", ":*")
    assert watching.given[Trigger.SPIKE] == (4,)
    assert StepSelection.parse(watching.text) == watching
    assert StepSelection.parse(box.text) == box
    for wrong, words in (
        ("last:0", "like last:20"),
        ("last:x", "like last:20"),
        ("last:3,5", "write last:N without them"),
        ("last:3,all", "write last:N without them"),
        ("spike:3", "which only last:N waits for"),
        ("last:3,spike:1", "a factor above 1"),
        ("watch:loss:output", "which only last:N waits for"),
        ("all,watch:loss", "which only last:N waits for"),
        ("last:3,watch:", "wants a value"),
        ("last:3,watch:loss:", "wants a value"),
        ("last:3,watch:loss:output,head:output", "like watch:head:output"),
        ("last:3,watch:loss,spike:0", "leave spike:0 out"),
    ):
        with pytest.raises(SettingError, match=words):
            StepSelection.parse(wrong)


def test_a_run_goes_on_where_the_folder_of_the_file_to_touch_has_gone(tmp_path: Path) -> None:
    folder = tmp_path / "touched"
    folder.mkdir()
    settings = settings_from({"steps": f"at:{folder}/now,last:5", "stall_seconds": "7"}, {})
    texts = settings.as_text()
    folder.rmdir()
    assert settings_of_run(texts) == settings


def test_an_error_names_the_variable_it_was_read_from() -> None:
    with pytest.raises(SettingError, match="RANKSCOPE_SPOOL_BYTES"):
        settings_from({}, {"RANKSCOPE_SPOOL_BYTES": "plenty"})


def test_an_unknown_keyword_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"stepz.*steps"):
        settings_from({"stepz": "1"}, {})


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1k", 1024), ("256M", 256 << 20), ("1.5GiB", 3 << 29)]
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_phases_may_be_all_and_are_written_in_order() -> None:
    every = settings_from({"phases": "all"}, {}).phases
    assert every == settings_from({}, {}).phases and every[0] == "setup" and len(every) == 8
    with pytest.raises(SettingError, match="choose from setup, forward"):
        settings_from({"phases": "sideways"}, {})
    for phase in ("backward", "recompute"):
        with pytest.raises(SettingError, match=f"write forward,{phase}$"):
            settings_from({"phases": phase}, {})
        settings_from({"phases": f"forward,{phase}"}, {})


def test_paths_select_modules_also_of_a_model_that_was_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with rankscope.trace(model, out=tmp_path / "trace", paths="0", phases="forward") as traced:
        model(torch.ones(1, 2))
    nodes = [node for step in traced.open().steps for node in step.walk()]
    assert [node.path for node in nodes] == ["0"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ranks", "0-99999999999"),
        ("ranks", str(1 << 24)),
        ("ranks", "9" * 5000),
        ("steps", "0-99999999999"),
        ("steps", "every:" + "9" * 5000),
        ("steps", "every:\u00b2"),
    ],
)
def test_numbers_that_no_job_has_are_refused_not_counted_out(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"{name}: .*(out of range|positive number)"):
        settings_from({name: text}, {})


def test_a_layout_file_is_read_with_the_settings_and_a_bad_one_names_its_option(
    tmp_path: Path,
) -> None:
    file = tmp_path / "layout.toml"
    file.write_text('axes = "tp=2"')
    settings = settings_from({}, {"RANKSCOPE_LAYOUT": str(file)})
    assert settings.layout is not None and dict(settings.layout.axes) == {"tp": 2}
    assert settings.as_text()["layout"] == str(file)
    assert settings_from({}, {}).layout is None and settings_from({}, {}).as_text()["layout"] == ""
    file.write_text("axes = 2")
    for given, environ in [({"layout": file}, {}), ({}, {"RANKSCOPE_LAYOUT": str(file)})]:
        with pytest.raises(SettingError, match=r"(?i)layout: layout file .*: write axes = "):
            settings_from(given, environ)
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        settings_from({"layout": tmp_path / "nowhere.toml"}, {})
