"""Who came first: only what joins ranks orders them."""

from __future__ import annotations

import numpy as np

from rankscope.diagnosis.finalreport import FaultPlace, Join, sort_causes


def place(**times: int) -> FaultPlace:
    """A fault on ranks r0, r1 ... at these times."""
    ranks = np.array([int(name[1:]) for name in times], np.int64)
    return FaultPlace(ranks=ranks, times_ns=np.array(list(times.values()), np.int64))


def join(begins: dict[int, int], ends: dict[int, int]) -> Join:
    return Join(
        givers=np.array(list(begins), np.int64),
        begins=np.array(list(begins.values()), np.int64),
        takers=np.array(list(ends), np.int64),
        ends=np.array(list(ends.values()), np.int64),
    )


def test_on_one_rank_the_earlier_fault_is_the_cause():
    order = sort_causes([place(r0=20), place(r0=10), place(r0=30)], [])
    assert order.origin_of == [1, None, 1]


def test_faults_of_one_event_have_no_order():
    order = sort_causes([place(r0=10), place(r0=10)], [])
    assert order.origin_of == [None, None]
    assert order.unordered == []


def test_ranks_that_nothing_joins_are_unordered_whatever_their_clocks_say():
    order = sort_causes([place(r0=10), place(r1=9_000)], [])
    assert order.origin_of == [None, None]
    assert order.unordered == [(0, 1)]


def test_a_collective_carries_a_fault_to_all_of_its_members():
    together = join({0: 15, 1: 500}, {0: 20, 1: 510})
    assert sort_causes([place(r0=10), place(r1=600)], [together]).origin_of == [None, 0]
    assert sort_causes([place(r0=10), place(r1=505)], [together]).origin_of == [None, None]
    assert sort_causes([place(r0=17), place(r1=600)], [together]).origin_of == [None, None]


def test_clocks_that_are_off_do_not_turn_the_order_round():
    """Rank 1's clock is far behind: the fault it caught seems to be the first."""
    together = join({0: 1_015, 1: 5}, {0: 1_020, 1: 9})
    assert sort_causes([place(r0=1_010), place(r1=12)], [together]).origin_of == [None, 0]


def test_chains_of_joints_are_followed_whatever_order_they_come_in():
    joins = [join({1: 40, 2: 7}, {1: 45, 2: 9}), join({0: 15, 1: 30}, {0: 20, 1: 35})]
    assert sort_causes([place(r0=10), place(r2=11)], joins).origin_of == [None, 0]


def test_a_message_goes_one_way():
    sent = join({0: 15}, {1: 30})
    assert sort_causes([place(r1=10), place(r0=50)], [sent]).origin_of == [None, None]
    assert sort_causes([place(r0=10), place(r1=50)], [sent]).origin_of == [None, 0]


def test_faults_that_are_before_each_other_are_one():
    order = sort_causes([place(r0=10, r1=40), place(r0=30, r1=20)], [])
    assert order.origin_of == [None, None]
