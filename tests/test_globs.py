"""The glob dialect that every option and file shares."""

from __future__ import annotations

from rankscope.globs import glob_matches, slot_matches


def test_globs_match_the_whole_path_and_two_stars_are_one() -> None:
    assert glob_matches("layers.*.attn", "layers.0.attn")
    assert not glob_matches("layers", "layers.0")
    assert glob_matches("layers.**", "layers.0.attn.q")


def test_a_slot_stands_for_all_that_is_nested_in_it_and_for_no_longer_word() -> None:
    assert slot_matches("output", "output") and slot_matches("output", "output.1.key")
    assert slot_matches("out*", "output.0") and slot_matches("input.cache", "input.cache.key")
    assert not slot_matches("output.1", "output.10")
    assert not slot_matches("param:weight", "param:weight_norm")
