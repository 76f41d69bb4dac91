"""One screen of every sort of trace, in detail."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np

from rankscope.cli.show import ROWS
from rankscope.cli.terminal import cut, fitted
from rankscope.cli.trees import layout_text
from rankscope.layout.placement import Mesh
from rankscope.tree.reader import open_trace
from tests.cli.summarizedjobs import HOSTILE, JOBS
from tests.cli.test_commands import rankscope
from tests.cli.test_show_summary import JOB_VALUE, shown
from tests.cli.test_show_summary import made as made
from tests.tree.ranks_on_paper import PaperRank

BOX = (((0, 2),), ((0, 3),))


def test_a_layer_of_another_dtype_is_named_with_what_differs(tmp_path: Path) -> None:
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model"):
        for layer in range(6):
            path = f"layers.{layer}"
            with rank.call(path, class_name="Block"), rank.call(f"{path}.fc") as call:
                dtype = "bfloat16" if layer == 4 else "float32"
                rank.value(call, "output", JOB_VALUE, dtype=dtype)
    rank.end()
    rank.ship(tmp_path / "trace")
    rows = [" ".join(row.split()) for row in shown(tmp_path / "trace")]
    assert "layers.0-3 4 x Block, alike" in rows
    assert "layers.4 Block differs: fc:output is bfloat16, in layers.0-3 float32" in rows
    assert "layers.5 Block" in rows


def model_of(folder: Path, calls: dict[str, str]) -> Path:
    """Return the trace of a forward of one rank: {path: class}, in the order of the calls."""
    rank = PaperRank(folder)
    with rank.call(class_name="Model"):
        for path, kind in calls.items():
            call = rank.enter(path, class_name=kind)
            rank.value(call, "output", JOB_VALUE)
            rank.exit(call)
    rank.end()
    rank.ship(folder / "trace")
    return folder / "trace"


def test_the_tree_goes_deeper_where_layers_stand_deeper_and_there_is_room(tmp_path: Path) -> None:
    calls = {"bert": "Bert", "bert.encoder": "Encoder"}
    for layer in range(5):
        calls[f"bert.encoder.layer.{layer}"] = "Layer"
        calls[f"bert.encoder.layer.{layer}.attention"] = "Attention"
        calls[f"bert.encoder.layer.{layer}.attention.self"] = "Self"
    rows = [" ".join(row.split()) for row in shown(model_of(tmp_path, calls))]
    assert "layer.0-4 5 x Layer, alike" in rows
    assert "attention Attention float32[2, 3]" in rows
    assert not any(row.startswith("self") for row in rows)


def test_modules_of_a_sequential_are_of_their_own_classes_and_nothing_is_said_of_that(
    tmp_path: Path,
) -> None:
    rows = shown(model_of(tmp_path, {"net.0": "Linear", "net.1": "ReLU", "net.2": "Linear"}))
    assert not any("differs" in row for row in rows)
    assert any(re.search(r"net.1 +ReLU +float32", row) for row in rows)


def test_a_fault_in_a_module_with_an_odd_name_is_shown_by_a_command_that_finds_it(
    tmp_path: Path,
) -> None:
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model"), rank.call("it's [0]*", class_name="Odd") as call:
        rank.value(call, "input.0", JOB_VALUE)
        rank.value(call, "output", JOB_VALUE * np.float32(np.nan))
    rank.end()
    rank.ship(tmp_path / "trace")
    (command,) = [row for row in shown(tmp_path / "trace") if "--path" in row]
    words = shlex.split(command.split("   ")[0])
    code, text, errors = rankscope(*words[1 : words.index("--path") + 2], cwd=tmp_path)
    assert code == 0, errors
    assert "it's [0]*  Odd" in text


def test_stages_show_the_ranks_that_call_them(made: dict[str, Path]) -> None:
    rows = [" ".join(row.split()) for row in shown(made["pipeline"])]
    assert "layers.0-1 2 x Block, alike ranks 0-1 float32[4, 6]" in rows
    assert "layers.2-3 2 x Block, alike ranks 2-3 float32[4, 6]" in rows


def test_what_has_no_room_is_counted_with_the_command_that_shows_it(made: dict[str, Path]) -> None:
    rows = shown(made["hundreds_of_modules"])
    assert len(rows) == ROWS
    (left,) = [row for row in rows if " more: " in row]
    told = re.fullmatch(r" +and ([\d,]+) modules more: rankscope show trace --depth 2 .*", left)
    assert told
    listed = [row for row in rows if row.strip().startswith("part_")]
    assert len(listed) + int(told[1].replace(",", "")) == 300 * 4


def test_very_long_names_are_cut_in_their_middle(made: dict[str, Path]) -> None:
    rows = shown(made["hostile_names"])
    text = "\n".join(rows)
    assert "x" * 50 not in text and "d." * 20 not in text
    assert "xxx...xxx" in text
    assert "a\\rb\\x1b[2J" in text
    assert len(HOSTILE) == sum("raised on rank 0" in row for row in rows)


def test_a_folder_with_a_long_name_is_written_once(tmp_path: Path) -> None:
    trace = JOBS["one_process"](tmp_path / ("long" * 20))
    code, text, _ = rankscope("show", trace)
    assert code == 0
    assert text.count("long" * 20) == 1
    assert "see more (TRACE is the folder named in the first line)" in text
    assert "rankscope show TRACE --full" in text


def test_a_long_placement_is_shortened(tmp_path: Path) -> None:
    mesh = Mesh(axes=("dp", "tp"), shape=(1, 1), ranks=(0,))
    texts = [
        "_MaskPartial(offset_shape=torch.Size([60000, 64]), offset_dim=0, mask_buffer=None)",
        "_StridedShard(dim=0, sf=2)",
    ]
    rank = PaperRank(tmp_path)
    with rank.call(class_name="Model") as call:
        rank.value(call, "output", JOB_VALUE, mesh=mesh, placements=texts, whole=(2, 3), box=BOX)
    rank.end()
    rank.ship(tmp_path / "trace")
    short = "dp=_MaskPartial(...) tp=StridedShard(0, 2)"
    for words in ([], ["--full"]):
        assert short in "\n".join(shown(tmp_path / "trace", *words))
    (node,) = open_trace(tmp_path / "trace").steps[0].nodes
    assert layout_text(node.slots[0]) == short


def test_a_row_that_is_cut_ends_its_colour() -> None:
    line = "plain \x1b[31mred and long\x1b[0m tail"
    assert cut(line, 80) == line
    assert cut(line, 13) == "plain \x1b[31mred ...\x1b[0m"
    assert cut("\u6a21\u578b" * 4, 9) == "\u6a21\u578b\u6a21...", "each is two columns wide"
    assert list(fitted("a  \u6a21\u578b", 6)) == ["a", "    \u6a21\u578b"]
    assert cut(line, 22) == "plain \x1b[31mred and long\x1b[0m ..."
