"""Names of classes matched exactly, then as expressions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankscope.compat.classpatching import NameMap


def some_class(key: str) -> type[nn.Module]:
    return type(f"For{abs(hash(key))}", (nn.Module,), {"key": key})


def key_for(name: str, *keys: str) -> object:
    found = NameMap({key: some_class(key) for key in keys}).find(name)
    return None if found is None else vars(found)["key"]


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
    names = NameMap({"Weird[": nn.Identity, "Fine": nn.ReLU})
    assert list(names.invalid) == ["Weird["]
    assert "unterminated character set" in names.invalid["Weird["]
    assert names.find("Weird[") is nn.Identity
    assert names.find("Weird") is None


def test_nothing_is_found_in_an_empty_map() -> None:
    assert NameMap({}).find("anything") is None


def test_a_later_change_of_the_entries_given_changes_nothing() -> None:
    entries: dict[str, type[nn.Module]] = {"a": nn.Identity}
    names = NameMap(entries)
    entries["b"] = nn.ReLU
    assert dict(names) == {"a": nn.Identity} and names.find("b") is None


@given(st.lists(st.text(max_size=6), unique=True, max_size=6), st.text(max_size=6))
def test_every_text_may_be_a_key_and_equality_always_wins(keys: list[str], name: str) -> None:
    found = key_for(name, *keys)
    if name in keys:
        assert found == name
        return
    before = keys if found is None else keys[: keys.index(str(found))]
    assert all(key_for(name, key) is None for key in before)
    assert found is None or key_for(name, str(found)) == found
