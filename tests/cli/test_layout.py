"""`rankscope layout`: a file that can be read back, with a reason for each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.tree.build import build
from tests.cli.test_commands import rankscope
from tests.diagnosis.paper import event, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank


def traced(
    folder: Path,
    world: int = 2,
    other: str = "",
    names: Sequence[str] = ("layers.0.fc", "layers.1.fc"),
    raised: bool = False,
) -> Path:
    """Ranks with replicas of two layers; one named `other` differs."""
    for number in range(world):
        rank = PaperRank(folder, number, world)
        seeds = {name: n + 100 * number * (name == other) for n, name in enumerate(names)}
        setup(rank, {f"{name}.weight": numbers(seeds[name]) for name in names})
        for name in names:
            module(rank, name, numbers(7), numbers(8 + seeds[name]))
        grads = {f"{name}.weight": numbers(20 + seeds[name]) for name in names}
        event(rank, Phase.GRADS, "grad", grads)
        rank.end(EndReason.RAISED if raised and number else EndReason.EXIT)
        rank.ship(folder / "trace")
    build(folder / "trace")
    return folder / "trace"


def test_the_proposal_is_a_layout_file_with_a_reason_for_each_entry(tmp_path: Path):
    file = tmp_path / "layout.toml"
    code, out, _ = rankscope("layout", traced(tmp_path), "--out", file)
    assert code == 0 and f"--layout {file}" in out
    text = file.read_text()
    layouts = LayoutFile.load(file)
    found = layouts.placements("layers.1.fc", "param:weight")
    assert [str(placement) for placement in found.values()] == ["Replicate()"]
    reasons = text.count("the same bytes on all ranks in 2 of 2 records")
    assert reasons == len(layouts.entries) - text.count("in 1 of 1 records") > 0
    assert rankscope("check", tmp_path / "trace", "--layout", file)[0] == 0


def test_without_a_file_it_is_printed(tmp_path: Path):
    code, out, _ = rankscope("layout", traced(tmp_path))
    assert code == 0 and LayoutFile.parse(out).entries


def test_a_file_that_exists_is_not_replaced(tmp_path: Path):
    file = tmp_path / "layout.toml"
    file.write_text("mine")
    code, _, err = rankscope("layout", traced(tmp_path), "--out", file)
    assert code == 2 and "replace it with --force" in err and file.read_text() == "mine"
    assert rankscope("layout", tmp_path / "trace", "--out", file, "--force")[0] == 0
    assert LayoutFile.load(file).entries


def test_the_folder_of_a_file_is_made(tmp_path: Path):
    file = tmp_path / "new" / "layout.toml"
    assert rankscope("layout", traced(tmp_path), "--out", file)[0] == 0 and file.exists()


def test_a_file_that_cannot_be_written_is_refused_in_words(tmp_path: Path):
    file = tmp_path / ("x" * 300)
    code, _, err = rankscope("layout", traced(tmp_path), "--out", file)
    assert code == 2 and "Errno" not in err
    assert "cannot be written: File name too long; give another file with --out" in err


def test_a_proposal_from_a_job_that_crashed_says_so(tmp_path: Path):
    _, out, _ = rankscope("layout", traced(tmp_path / "fine"))
    assert "whole run" not in out
    _, out, _ = rankscope("layout", traced(tmp_path / "crashed", raised=True))
    assert "# The trace does not show a whole run (complete; rank 1 raised)" in out
    assert LayoutFile.parse(out).entries


def test_one_rank_has_no_layout(tmp_path: Path):
    code, _, err = rankscope("layout", traced(tmp_path, world=1))
    assert code == 2 and "one rank" in err


def test_siblings_that_disagree_are_left_out(tmp_path: Path):
    _, out, _ = rankscope("layout", traced(tmp_path, other="layers.1.fc"))
    layouts = LayoutFile.parse(out)
    assert not layouts.placements("layers.0.fc", "param:weight")
    assert layouts.placements("layers.0.fc", "input.0")


def test_a_pattern_matches_siblings_and_nothing_below_them(tmp_path: Path):
    _, out, _ = rankscope("layout", traced(tmp_path))
    layouts = LayoutFile.parse(out)
    assert layouts.placements("layers.7.fc", "param:weight")
    assert not layouts.placements("layers.0.x.fc", "param:weight")
    assert not layouts.placements("layers.0.fc.lora", "param:weight")


def test_a_name_with_signs_of_globs_or_beyond_ascii_stands_for_itself(tmp_path: Path):
    odd = ("br[x].s*r.fc", "\N{GRINNING FACE}?.fc")
    code, out, _ = rankscope("layout", traced(tmp_path, names=odd))
    layouts = LayoutFile.parse(out)
    assert code == 0
    for name in odd:
        assert layouts.placements(name, "param:weight")
    assert not layouts.placements("brx.star.fc", "param:weight")
