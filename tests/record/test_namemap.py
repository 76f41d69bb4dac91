"""Names matched exactly, then as expressions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.record.namelookup import NameMap


def key_for(name: str, *keys: str) -> str | None:
    found = NameMap({key: key for key in keys}).find(name)
    return None if found is None else found.value


def test_a_key_that_equals_the_name_comes_before_every_pattern_wherever_it_stands() -> None:
    assert key_for("LlamaAttention", ".*Attention$", "LlamaAttention") == "LlamaAttention"
    assert key_for("LlamaAttention", "LlamaAttention", ".*Attention$") == "LlamaAttention"
    assert key_for("BertAttention", ".*Attention$", "LlamaAttention") == ".*Attention$"


def test_of_several_patterns_that_match_the_first_given_is_taken() -> None:
    assert key_for("LlamaAttention", "Attention$", "^Llama") == "Attention$"
    assert key_for("LlamaAttention", "^Llama", "Attention$") == "^Llama"


def test_a_pattern_without_anchors_matches_anywhere_in_the_name() -> None:
    assert key_for("MobileBertAttention", "BertAttention") == "BertAttention"
    assert key_for("MobileBertAttention", "^BertAttention$") is None


def test_a_key_that_is_no_expression_is_a_plain_name_and_is_reported() -> None:
    names = NameMap({"Weird[": 1, "Fine": 2})
    assert list(names.invalid) == ["Weird["]
    assert "unterminated character set" in names.invalid["Weird["]
    found = names.find("Weird[")
    assert found is not None and (found.value, found.match) == (1, None)
    assert names.find("Weird") is None


def test_the_groups_of_a_pattern_rewrite_a_name() -> None:
    names = NameMap({r"^layers\.(\d+)\.attn$": r"h.\1.attention", "embed": "wte"})
    found = names.find("layers.11.attn")
    assert found is not None and found.match is not None
    assert found.match.expand(found.value) == "h.11.attention"
    exact = names.find("embed")
    assert exact is not None and exact.match is None and exact.value == "wte"


def test_nothing_is_found_in_an_empty_map() -> None:
    assert NameMap[int]({}).find("anything") is None
    assert len(NameMap[int]({})) == 0


def test_a_later_change_of_the_entries_given_changes_nothing() -> None:
    entries = {"a": 1}
    names = NameMap(entries)
    entries["b"] = 2
    assert dict(names) == {"a": 1}
    with pytest.raises(KeyError):
        names["b"]


@given(st.lists(st.text(max_size=6), unique=True, max_size=6), st.text(max_size=6))
def test_every_text_may_be_a_key_and_equality_always_wins(keys: list[str], name: str) -> None:
    names = NameMap({key: index for index, key in enumerate(keys)})
    found = names.find(name)
    if name in keys:
        assert found is not None and found.value == keys.index(name) and found.match is None
    elif found is not None:
        assert found.match is not None and found.key not in names.invalid
        assert all(
            key in names.invalid or NameMap({key: 0}).find(name) is None
            for key in keys[: found.value]
        )


def test_importing_it_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, rankscope.record.namelookup\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
