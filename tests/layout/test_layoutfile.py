"""Layout files: what they say, and what is wrong with one, by entry."""

from __future__ import annotations

import pytest

from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import LayoutFile

HEAD = 'axes = "dp=2,tp=2"\n'


def entry(path: str, slot: str, placements: str) -> str:
    return f'[[layout]]\npath = "{path}"\nslot = "{slot}"\nplacements = {{ {placements} }}\n'


def texts(file: LayoutFile, path: str, slot: str) -> dict[str, str]:
    return {axis: str(place) for axis, place in file.placements(path, slot).items()}


def test_globs_kinds_and_gradients_of_activations_are_described():
    file = LayoutFile.parse(
        HEAD
        + entry("layers.**.o_proj", "output", 'tp = "Replicate()"')
        + entry("layers.*", "param:*", 'tp = "Shard(0)"')
        + entry("layers.0.*", "param:weight", 'dp = "Partial(sum)"')
        + entry("(root)", "input", 'dp = "Shard(1)"')
        + entry("all", "*", 'tp = "StridedShard(1, split_factor=2)"')
    )
    o_proj = "layers.1.attn.o_proj"
    assert texts(file, o_proj, "output") == {"tp": "Replicate()"}
    assert texts(file, o_proj, "output.1.key") == {"tp": "Replicate()"}
    assert texts(file, o_proj, "grad_output.0") == {"tp": "Replicate()"}
    assert texts(file, o_proj, "returned") == texts(file, o_proj, "input.0") == {}
    assert texts(file, o_proj, "param:weight") == {"tp": "Shard(0)"}
    assert texts(file, "layers.0.fc", "param:weight") == {"tp": "Shard(0)", "dp": "Partial(sum)"}
    assert texts(file, "layers.0.fc", "grad:weight") == {}
    assert texts(file, "", "input.mask") == texts(file, "", "grad_input.0") == {"dp": "Shard(1)"}
    assert texts(file, "all", "anything") == {"tp": "StridedShard(1, split_factor=2)"}
    assert file.mesh(4).axes == ("dp", "tp") and file.mesh(4).coordinate(2) == (1, 0)


def test_what_each_rank_has_for_itself_is_declared_without_placements():
    file = LayoutFile.parse(HEAD + '[[layout]]\npath = "head"\nslot = "param:*"\nown = true')
    assert file.is_own("head", "param:bias") and file.is_own("head", "grad:bias")
    assert not file.is_own("trunk", "param:bias") and not file.is_own("head", "output")
    assert texts(file, "head", "param:bias") == {}


def test_two_entries_that_place_one_slot_differently_are_both_named():
    file = LayoutFile.parse(
        HEAD
        + entry("a", "output", 'tp = "Replicate()"')
        + entry("b", "output", 'tp = "Shard(0)"')
        + entry("*", "output*", 'tp = "Shard(0)"')
    )
    assert texts(file, "b", "output") == {"tp": "Shard(0)"}
    with pytest.raises(LayoutError) as error:
        file.placements("a", "output.0")
    for part in ("entry 1 (path 'a'", "entry 3 (path '*'", "a:output.0", "along tp"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("axes = ", "is not TOML"),
        ("", "write axes ="),
        ('axes = "dp=2,dp=2"', "write axes ="),
        ('axes = "dp=0"', "write axes ="),
        ('axis = "dp=2"', "no key 'axis'"),
        (HEAD + '[layout]\npath = "a"', "two brackets"),
        (HEAD + '[[layout]]\npath = "a"', "entry 1 has path: write path, slot and placements"),
        (HEAD + entry("a", "output", 'pp = "Shard(0)"'), "entry 1: no axis 'pp' among dp, tp"),
        (HEAD + entry("a", "output", 'tp = "Shrad(0)"'), "'Shrad(0)' is not a placement"),
        (HEAD + entry("a", "output", 'tp = "Shard(-1)"'), "entry 1: tp = 'Shard(-1)'"),
        (HEAD + entry("a", "output", "tp = 3"), "3 is not a placement"),
        (HEAD + entry("a", "output", ""), "write placements ="),
        (HEAD + '[[layout]]\npath = 1\nslot = "a"\nplacements = {}', "path and slot are texts"),
        (HEAD + '[[layout]]\npath = "a"\nslot = "*"\nown = false', "own can only be true"),
    ],
)
def test_what_is_wrong_is_said_with_the_entry(text, said):
    with pytest.raises(LayoutError, match="layout file job") as error:
        LayoutFile.parse(text, "job")
    assert said in str(error.value)


def test_a_file_of_another_world_size_or_none_at_all_is_refused(tmp_path):
    with pytest.raises(LayoutError, match=r"axes dp=2,tp=2 are those of 4 ranks, the run had 8"):
        LayoutFile.parse(HEAD).mesh(8)
    with pytest.raises(LayoutError, match="cannot be read"):
        LayoutFile.load(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="not UTF-8"):
        LayoutFile.load(tmp_path / "binary")
