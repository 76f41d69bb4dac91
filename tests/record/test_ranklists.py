"""Lists of ranks as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import TraceError
from rankscope.record.ranks import others_text, parse_ranks, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8"), ([2, 0, 2], "0,2")]
)
def test_runs_of_ranks_are_folded(ranks, text):
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_what_was_folded_reads_back_the_same(ranks):
    assert parse_ranks(ranks_text(ranks)) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    "text", ["a", "-1", "1;2", "1-b", "3-1", "2,1", "1,1", "0-1048576", "9" * 5000, "\u0663"]
)
def test_a_text_that_is_no_list_of_ranks_is_refused(text):
    with pytest.raises(TraceError, match="not a list of ranks"):
        parse_ranks(text)


def test_a_list_is_no_longer_than_its_world():
    assert parse_ranks("0-3", 4) == (0, 1, 2, 3)
    for text in ("0-4", "4", "0-30000000", "0,5"):
        with pytest.raises(TraceError, match="in a world of 4"):
            parse_ranks(text, 4)


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_the_others_of_a_world_are_those_that_are_not_listed(ranks, world):
    assert others_text(ranks, world) == ranks_text(set(range(world)) - ranks)


def test_the_others_of_a_huge_world_are_told_in_a_few_words():
    assert others_text({0, 5}, 1 << 60) == f"1-4,6-{(1 << 60) - 1}"
