"""Which ranks a mark's axis runs over: those that hold different parts, and no others."""

from __future__ import annotations

from rankscope.layout.layoutfile import believed_groups

ROWS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
COLUMNS = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
CUT_IN_ROWS = {0: 10, 1: 11, 2: 10, 3: 11}
"""What ranks of a 2x2 job hold of a weight that the rows cut and the columns repeat."""


def both(*families: dict[int, tuple[int, ...]]) -> dict[int, set[tuple[int, ...]]]:
    return {rank: {family[rank] for family in families} for rank in range(4)}


def test_groups_that_hold_different_parts_are_believed_and_those_of_replicas_are_not():
    assert believed_groups(both(ROWS, COLUMNS), [CUT_IN_ROWS]) == ROWS


def test_one_duplicate_shard_does_not_hide_the_axis():
    duplicate = {0: 10, 1: 10, 2: 10, 3: 10}
    assert believed_groups(both(ROWS), [CUT_IN_ROWS, CUT_IN_ROWS, duplicate]) == ROWS


def test_without_a_parameter_that_tells_nothing_is_believed():
    assert believed_groups(both(ROWS), []) == {}
    assert believed_groups(both(ROWS), [dict.fromkeys(range(4), 7)]) == {}


def test_two_groups_that_may_be_the_axis_leave_it_unknown():
    other = {0: 1, 1: 2, 2: 3, 3: 4}
    assert believed_groups(both(ROWS, COLUMNS), [other]) == {}


def test_a_group_is_believed_only_where_all_of_its_ranks_take_it_for_theirs():
    known = {0: {(0, 1)}, 1: {(0, 1)}, 2: {(2, 3)}, 3: set()}
    assert believed_groups(known, [CUT_IN_ROWS]) == {0: (0, 1), 1: (0, 1)}


def test_ranks_that_do_not_hold_the_parameters_have_no_axis():
    assert believed_groups(both(ROWS), [{0: 10, 1: 11}]) == {0: (0, 1), 1: (0, 1)}
