"""What has lost the last steps of a black box: four causes, on one host and on two.

    relay stalled            every relay, or one of two, stands still for 7 to 14 s
    relay restarted          it is killed, and started 10 s later
    spool full               from about the event on, so that no copy fits, or a part of one; for
                             seconds, or for good
    rank and relay vanish    at once, while the others end in order

The program meets a value that is not finite, and goes on for longer than its ring lasts.
"""

from __future__ import annotations

import random

from tests.lab.soak.faults import CAUSES, Fault
from tests.lab.soak.job import Shape
from tests.lab.soak.network import can_have_hosts
from tests.lab.soak.schedule import Schedule

__all__ = ["draw_black_box"]

_CAUSES = ("relay stalled", "relay restarted", "spool full", "rank and relay vanish")
_PAUSE_MS = 80


def draw_black_box(seed: int) -> Schedule:
    """Draw a job and its cause: of eight seeds that follow on each other, each of the four on one
    host and on two; of 24, four through the launcher."""
    chosen = random.Random(f"black box {seed}")
    cause, hosts = _CAUSES[seed % 4], 1 + seed // 4 % 2
    is_launched = hosts == 1 and seed // 8 % 3 == 0
    is_full, is_vanishing = cause == "spool full", cause == "rank and relay vanish"
    name = f"{cause}, for {chosen.choice(['seconds', 'good'])}" if is_full else cause
    is_large = is_full and chosen.random() < 0.5  # its copy takes several segments
    happens = chosen.randint(35, 60)
    goes_on = 60 if is_full or is_vanishing else 185
    at = happens + (chosen.randint(-10, 20) if is_vanishing else chosen.randint(-6, 3))
    nans: tuple[tuple[int, int], ...] = ((happens, chosen.randrange(2)),)
    if is_vanishing and chosen.random() < 0.6:
        nans = ()
    shape = Shape(
        way="launched" if is_launched else "direct",
        transport=chosen.choice(["shared", "keyed"] if hosts > 1 else ["own", "shared"]),
        ranks=2,
        steps=happens + goes_on,
        pause_ms=_PAUSE_MS,
        gloo=not is_vanishing and chosen.random() < 0.7,
        spool_disk="tmpfs" if is_full else "",
        spool_mebibytes=24 if is_large else 2,
        last=30 if is_large else chosen.randint(3, 6),
        nans=nans,
        blocks=16 if is_large else 3,
        hosts=hosts,
        namespaces=hosts > 1 and can_have_hosts(),
        finish_seconds=20.0,
    )
    fault = Fault(
        name=name,
        at_s=0.0,
        lasts_s=chosen.uniform(*CAUSES[name].lasts_s),
        seed=chosen.randrange(1 << 30),
        at_step=at,
    )
    return Schedule(seed=seed, shape=shape, faults=(fault,))
