"""When the collector stops waiting."""

import pytest

from rankscope.companion.waitingrule import Decision, JobState, PeerState, decide
from rankscope.record.ranks import EndReason, StreamId

EXIT, LOST, RAISED, RUNNING = EndReason.EXIT, EndReason.LOST, EndReason.RAISED, None
ALIVE = PeerState(silent_s=0.1, job=JobState.UNKNOWN)
SILENT = PeerState(silent_s=14.0, job=JobState.UNKNOWN, held=2, alive=2)
OVER = PeerState(silent_s=0.1, job=JobState.OVER)
GONE = PeerState(silent_s=60.0, job=JobState.UNKNOWN)
LAUNCHED = PeerState(silent_s=0.1, job=JobState.LAUNCHED)
LAUNCHER_GONE = PeerState(silent_s=60.0, job=JobState.LAUNCHED)
UNTOLD = PeerState(silent_s=0.1, job=JobState.OVER, held=2)
EARLIER = PeerState(silent_s=0.1, job=JobState.UNKNOWN, held=4)
EARLIER_OVER = PeerState(silent_s=0.1, job=JobState.OVER, held=4)
THROUGH = PeerState(silent_s=0.1, job=JobState.OVER, held=1, alive=0)
ENDED = PeerState(silent_s=0.1, job=JobState.UNKNOWN, held=1, alive=0)
NOT_BEGUN = PeerState(silent_s=0.1, job=JobState.UNKNOWN, held=0, alive=0)
QUIET = PeerState(silent_s=0.1, job=JobState.UNKNOWN, held=1, alive=0, quiet=1)
QUIET_GONE = PeerState(silent_s=60.0, job=JobState.OVER, held=1, alive=0, quiet=1)
WITHOUT_RANKS = PeerState(silent_s=0.1, job=JobState.OVER, alive=0)
ELASTIC = PeerState(silent_s=0.1, job=JobState.UNKNOWN, max_restarts=1)


def streams(*ends, incarnation=0):
    return {StreamId(rank=rank, incarnation=incarnation): end for rank, end in enumerate(ends)}


def decided(known, peers, *, idle_s=0.0, expected_ranks=2):
    return decide(
        known, peers, expected_ranks=expected_ranks, idle_s=idle_s, drain_s=10.0, finish_s=60.0
    )


@pytest.mark.parametrize(
    ("why", "known", "peers", "idle_s", "expected"),
    [
        ("nothing happened on any host", {}, [QUIET, QUIET], 0, Decision.QUIET),
        ("one relay is gone since it said so", {}, [QUIET, QUIET_GONE], 0, Decision.QUIET),
        ("one host still works", {}, [QUIET, LAUNCHED], 1000, Decision.WAIT),
        ("one rank called no module", {}, [QUIET, WITHOUT_RANKS], 10, Decision.QUIET),
        ("one host is silent for a while", {}, [QUIET, LAUNCHER_GONE], 5, Decision.WAIT),
        ("one host vanished", {}, [QUIET, LAUNCHER_GONE], 10, Decision.VANISHED),
        ("it did, and nobody answers", {}, [QUIET, LAUNCHER_GONE], 60, Decision.NOTHING),
        ("it did, and the other is gone", {}, [QUIET_GONE, LAUNCHER_GONE], 10, Decision.NOTHING),
        ("nothing happened yet", {}, [], 0, Decision.WAIT),
        ("no relay for a long time", {}, [], 1000, Decision.WAIT),
        ("all ended in order", streams(EXIT, EndReason.CLOSED), [ALIVE], 0, Decision.COMPLETE),
        (
            "switched off is in order",
            streams(EXIT, EndReason.SWITCHED_OFF),
            [],
            0,
            Decision.COMPLETE,
        ),
        ("one still runs", streams(EXIT, RUNNING), [ALIVE], 1000, Decision.WAIT),
        ("one is still to come", streams(EXIT), [ALIVE], 5, Decision.WAIT),
        ("one never came", streams(EXIT), [ALIVE], 10, Decision.INCOMPLETE),
        ("one is lost, it may come back", streams(EXIT, LOST), [ALIVE], 5, Decision.WAIT),
        (
            "one is lost, it did not come back",
            streams(EXIT, LOST),
            [ALIVE],
            10,
            Decision.INCOMPLETE,
        ),
        ("one is lost, the job is over", streams(EXIT, LOST), [OVER], 0, Decision.INCOMPLETE),
        ("one host's job is over", streams(EXIT, LOST), [OVER, ALIVE], 5, Decision.WAIT),
        ("over, one host not here yet", streams(EXIT), [OVER], 5, Decision.WAIT),
        ("ranks run, relays gone just now", streams(RUNNING, RUNNING), [GONE], 5, Decision.WAIT),
        ("ranks run, relays gone", streams(RUNNING, RUNNING), [GONE], 10, Decision.INCOMPLETE),
        ("one relay gone, one alive", streams(RUNNING, RUNNING), [GONE, ALIVE], 99, Decision.WAIT),
        (
            "one host died",
            streams(EXIT, RUNNING),
            [THROUGH, LAUNCHER_GONE],
            10,
            Decision.INCOMPLETE,
        ),
        ("one host died now", streams(EXIT, RUNNING), [THROUGH, LAUNCHER_GONE], 5, Decision.WAIT),
        (
            "one host died before it was heard of a rank",
            streams(EXIT),
            [THROUGH, LAUNCHER_GONE],
            10,
            Decision.INCOMPLETE,
        ),
        ("one host died, untold", streams(EXIT, RUNNING), [ENDED, GONE], 10, Decision.INCOMPLETE),
        ("one host died, a rank lives", streams(RUNNING, RUNNING), [OVER, GONE], 99, Decision.WAIT),
        ("one host died, one begins", streams(RUNNING), [NOT_BEGUN, GONE], 99, Decision.WAIT),
        (
            "one host died, one launcher works",
            streams(EXIT, RUNNING),
            [THROUGH, LAUNCHED, GONE],
            99,
            Decision.WAIT,
        ),
        ("one host died, nobody traced", {}, [THROUGH, GONE], 10, Decision.WAIT),
        ("one host died, nobody ever traced", {}, [THROUGH, GONE], 60, Decision.NOTHING),
        ("over, a stream stopped", streams(EXIT, RUNNING), [OVER], 30, Decision.WAIT),
        (
            "over, a stream stopped long ago",
            streams(EXIT, RUNNING),
            [OVER],
            60,
            Decision.INCOMPLETE,
        ),
        ("over, nobody traced", {}, [OVER], 10, Decision.NOTHING),
        ("over, what traced is not told yet", {}, [UNTOLD], 30, Decision.WAIT),
        ("over, what traced is never told", {}, [UNTOLD], 60, Decision.NOTHING),
        ("over, one more is not told yet", streams(EXIT), [UNTOLD], 30, Decision.WAIT),
        ("earlier lives not told yet", streams(EXIT, EXIT), [EARLIER], 30, Decision.WAIT),
        ("earlier lives never told", streams(EXIT, EXIT), [EARLIER], 60, Decision.INCOMPLETE),
        ("over, they are not told yet", streams(EXIT, LOST), [EARLIER_OVER], 30, Decision.WAIT),
        ("nobody traced yet", {}, [ALIVE], 1000, Decision.WAIT),
        ("nobody traced yet, relays silent", {}, [GONE], 10, Decision.WAIT),
        ("nobody traced, relays gone", {}, [GONE], 60, Decision.NOTHING),
        ("steps are held back, the relay stands still", {}, [SILENT], 3600, Decision.WAIT),
        ("so it does while a host is quiet", {}, [QUIET, SILENT], 3600, Decision.VANISHED),
        ("all raised, nobody restarts", streams(RAISED, RAISED), [ALIVE], 0, Decision.COMPLETE),
        ("all raised, they may come back", streams(RAISED, RAISED), [ELASTIC], 5, Decision.WAIT),
        ("one raised, it may come back", streams(EXIT, RAISED), [ELASTIC], 5, Decision.WAIT),
        ("raised, none came back", streams(EXIT, RAISED), [ELASTIC], 10, Decision.INCOMPLETE),
        (
            "raised, no restart is left",
            streams(RAISED, RAISED, incarnation=1),
            [ELASTIC],
            0,
            Decision.COMPLETE,
        ),
        ("all ended, could restart", streams(EXIT, EXIT), [ELASTIC], 0, Decision.COMPLETE),
        ("raised, the job is over", streams(RAISED, RAISED), [OVER], 0, Decision.COMPLETE),
        ("all ended, launcher at work", streams(EXIT, EXIT), [LAUNCHED], 1000, Decision.WAIT),
        ("raised, launcher at work", streams(RAISED, LOST), [LAUNCHED], 1000, Decision.WAIT),
        ("one launcher still at work", streams(EXIT, EXIT), [OVER, LAUNCHED], 0, Decision.WAIT),
        ("launcher's host gone", streams(EXIT, EXIT), [LAUNCHER_GONE], 0, Decision.COMPLETE),
        ("nobody traced, launcher at work", {}, [LAUNCHED], 1000, Decision.WAIT),
    ],
)
def test_the_decision(why, known, peers, idle_s, expected):
    assert decided(known, peers, idle_s=idle_s) is expected, why


def test_a_grace_of_nothing_gives_up_no_relay_between_two_beats():
    for peer in (ALIVE, LAUNCHED):
        assert (
            decide(
                streams(RUNNING, RUNNING),
                [peer],
                expected_ranks=2,
                idle_s=1.0,
                drain_s=0.0,
                finish_s=60.0,
            )
            is Decision.WAIT
        )


def test_only_the_newest_incarnation_of_a_rank_has_to_end_in_order():
    newest = StreamId(rank=1, incarnation=1)
    known = {**streams(EXIT, LOST), newest: EXIT}
    assert decided(known, [ALIVE]) is Decision.COMPLETE
    assert decided(dict(reversed(known.items())), [ALIVE]) is Decision.COMPLETE
    assert decided({**known, newest: LOST}, [ALIVE]) is Decision.WAIT


def test_an_older_incarnation_that_has_not_ended_is_waited_for():
    known = {**streams(RUNNING), **streams(EXIT, incarnation=1)}
    assert decided(known, [ALIVE], expected_ranks=1) is Decision.WAIT
