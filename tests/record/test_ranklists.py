"""Lists of ranks as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import TraceError
from rankscope.record.ranklists import parse_ranks, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8"), ([2, 0, 2], "0,2")]
)
def test_runs_of_ranks_are_folded(ranks, text):
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_what_was_folded_reads_back_the_same(ranks):
    assert parse_ranks(ranks_text(ranks)) == tuple(sorted(ranks))


@pytest.mark.parametrize("text", ["a", "-1", "1;2", "1-b"])
def test_a_text_that_is_no_list_of_ranks_is_refused(text):
    with pytest.raises(TraceError, match="no list of ranks"):
        parse_ranks(text)
