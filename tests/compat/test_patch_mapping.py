"""The mapping of classes: taken whole or not at all."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
from torch import nn

from rankscope.compat import (
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)


class First(nn.Module):
    pass


class Second(nn.Module):
    pass


class NoModule:
    pass


def test_what_is_registered_is_returned_in_order_as_a_copy() -> None:
    register_patch_mapping({"B": First})
    register_patch_mapping({"A.*": Second})
    mapping = get_patch_mapping()
    assert list(mapping.items()) == [("B", First), ("A.*", Second)]
    mapping["C"] = First
    assert "C" not in get_patch_mapping()


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        ({"Bad": First()}, TypeError, "'Bad' must be a class, got First"),
        (
            {"Bad": NoModule},
            TypeError,
            "'Bad' must be a subclass of nn.Module, unlike .*NoModule",
        ),
        ({"Bad": "First"}, TypeError, "'Bad' must be a class, got str"),
        ({First: Second}, TypeError, "not type <class"),
        ({"Taken": Second}, ValueError, "'Taken'.* already .* overwrite=True"),
    ],
)
def test_one_bad_entry_in_the_middle_and_nothing_is_registered(
    bad: Any, error: type[Exception], words: str
) -> None:
    register_patch_mapping({"Taken": First})
    with pytest.raises(error, match=words):
        register_patch_mapping({"Before": First, **bad, "After": Second})
    assert get_patch_mapping() == {"Taken": First}


def test_overwrite_replaces_an_entry_where_it_stands() -> None:
    register_patch_mapping({"A": First, "B": First})
    register_patch_mapping({"A": Second, "C": Second}, overwrite=True)
    assert list(get_patch_mapping().items()) == [("A", Second), ("B", First), ("C", Second)]


def test_a_bad_entry_overwrites_nothing_either() -> None:
    register_patch_mapping({"A": First})
    with pytest.raises(TypeError):
        register_patch_mapping({"A": Second, "B": NoModule}, overwrite=True)  # type: ignore[dict-item]
    assert get_patch_mapping() == {"A": First}


NOT_FOUND = r"Cannot unregister \['{}'\]: not found in monkey patch mapping cache"
"""Programs look for these words in the message of transformers."""


def test_unregistering_removes_all_keys_or_none() -> None:
    register_patch_mapping({"A": First, "B": First, "C": First})
    with pytest.raises(ValueError, match=NOT_FOUND.format("Unknown")):
        unregister_patch_mapping(["A", "Unknown", "B"])
    assert list(get_patch_mapping()) == ["A", "B", "C"]
    unregister_patch_mapping(["A", "C"])
    assert list(get_patch_mapping()) == ["B"]


def test_one_key_may_be_given_as_a_string() -> None:
    register_patch_mapping({"Attention": First})
    unregister_patch_mapping("Attention")
    assert get_patch_mapping() == {}


def test_a_key_is_removed_by_the_text_it_was_registered_under_not_by_what_it_matches() -> None:
    register_patch_mapping({".*Attention$": First})
    with pytest.raises(ValueError, match=NOT_FOUND.format("LlamaAttention")):
        unregister_patch_mapping(["LlamaAttention"])


def test_clearing_leaves_nothing_and_may_be_repeated() -> None:
    register_patch_mapping({"A": First})
    clear_patch_mapping()
    clear_patch_mapping()
    assert get_patch_mapping() == {}


def test_a_key_that_is_no_expression_is_said_once_and_taken_as_a_plain_name() -> None:
    with pytest.warns(UserWarning, match=r"'Broken\[' is not a regular expression") as said:
        register_patch_mapping({"Broken[": First})
    assert len(said) == 1 and said[0].filename == __file__
    assert get_patch_mapping() == {"Broken[": First}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_patch_mapping({"Other": First})


def test_registering_from_many_threads_loses_no_entry() -> None:
    start = threading.Barrier(8)

    def register(worker: int) -> None:
        start.wait(120)
        for number in range(20):
            register_patch_mapping({f"Class{worker}x{number}": First})

    workers = [threading.Thread(target=register, args=(worker,)) for worker in range(8)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    assert len(get_patch_mapping()) == 160
