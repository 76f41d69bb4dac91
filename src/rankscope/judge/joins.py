"""What ranks did together, as far as a trace shows it: the joints of the order of causes.

Recorded collectives and messages come first. Reductions of gradients run in C++ and show in no
record, so the gradients just before an optimizer step join the ranks that hold parts of one
parameter, or replicas of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.judge.observed import Call, Moment
from rankscope.judge.order import Join
from rankscope.judge.scene import Scene
from rankscope.record.call import Phase

__all__ = ["joins_of"]

Array = NDArray[Any]
_ONE_WAY: Final = {"broadcast", "scatter"}
_TO_ONE: Final = {"reduce", "gather"}
_MESSAGES: Final = {"send", "isend", "recv", "irecv"}


def joins_of(moment: Moment, scene: Scene) -> Iterator[Join]:
    """Yield the joints of one step, in order of the tree."""
    for call in moment.of(Phase.COLLECTIVE):
        if len(call.ranks) > 1 and _operation(call) not in _MESSAGES:
            yield _collective(call, scene)
    yield from _events(moment, scene)


def _operation(call: Call) -> str:
    return str(call.node.data.get("collective", {}).get("op", ""))


def _collective(call: Call, scene: Scene) -> Join:
    begins, ends = scene.clock.span(call, call.ranks)
    facts = call.node.data.get("collective", {})
    givers = takers = np.ones(len(call.ranks), bool)
    if facts.get("op") in _ONE_WAY and "src" in facts:
        givers = call.ranks == facts["src"]
    if facts.get("op") in _TO_ONE and "dst" in facts:
        takers = call.ranks == facts["dst"]
    if not givers.any() or not takers.any():
        givers = takers = np.ones(len(call.ranks), bool)
    return Join(
        givers=call.ranks[givers],
        begins=begins[givers],
        takers=call.ranks[takers],
        ends=np.maximum(ends, begins + 1)[takers],
    )


def _events(moment: Moment, scene: Scene) -> Iterator[Join]:
    """Yield one joint for every group of ranks whose gradients were reduced together."""
    seen: set[bytes] = set()
    life = scene.life(moment.incarnation)
    for held in moment.values(Phase.GRADS):
        meshes = [np.sort(np.array(m.ranks, np.int64)) for v in held.views for m in v.meshes]
        groups = meshes or list(life.replicas.lines)
        for group in groups:
            own = group[np.isin(group, held.ranks)]
            if len(own) < 2 or own.tobytes() in seen or (not meshes and held.agree(own) is False):
                continue
            seen.add(own.tobytes())
            times = scene.clock.of_call(held.call, own)
            yield Join(givers=own, begins=times - 1, takers=own, ends=times)
