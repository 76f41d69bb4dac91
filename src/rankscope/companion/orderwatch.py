"""Orders of `rankscope capture` on one host: the relay looks into the trace folder, its ranks do
not. An order that it finds there goes to the run folder, where a rank looks once a step.

A relay that does not see the trace folder, because its records go through a socket to another
folder, hears of no order: whoever orders on its host writes into its run folder by himself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rankscope.companion.log import log
from rankscope.errors import SpoolError
from rankscope.record.streams import StreamId
from rankscope.run.eventboard import ABSENT, file_time
from rankscope.run.filenames import ORDER_NAME, REPLICA_FOLDER
from rankscope.run.folders import RunHeader
from rankscope.run.orders import Order, OrderSeen, order_in, orders_come_to, put_order, tell_seen
from rankscope.run.prepare import Collection

__all__ = ["OrderWatch"]

_LOOK_S: Final = 0.2


class OrderWatch:
    """The relay's eye on the orders of one run."""

    def __init__(self, run_folder: Path, header: RunHeader, relay: str) -> None:
        self._run_folder, self._out, self._relay = run_folder, header.out, relay
        self._folder = orders_come_to(run_folder, header)
        self._is_elsewhere = Collection.of_run(header).is_elsewhere
        self._file_time = file_time(self._folder / ORDER_NAME)
        self._seen = ABSENT
        self._looked_at = float("-inf")
        self._said: OrderSeen | None = None
        self._trouble = ""
        self.order: Order | None = None

    def look(self, now: float, streams: Iterable[StreamId], told: str = "") -> None:
        """See whether there is an order, hand it to the ranks, and say that it was seen.

        Args:
            now: monotonic seconds.
            streams: of the ranks of this host.
            told: of a black box: what it says of the last order.
        """
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            self._take()
            if self.order is not None and not self._is_elsewhere:
                self._say(self.order, streams, told)
        except SpoolError as error:  # a full disk: tried again
            if str(error) != self._trouble:
                log(f"an order was not handed on: {error}")
            self._trouble = str(error)

    def _take(self) -> None:
        seen = self._file_time()
        if seen in (ABSENT, self._seen):
            return
        order = order_in(self._folder)
        if order is None:
            log(f"{self._folder / ORDER_NAME} is no order, and is ignored: use rankscope capture")
        elif order_in(self._run_folder) != order:
            put_order(self._run_folder, order)
            log(f"handed an order to the ranks: {order.text}")
        self._seen = seen
        self.order = order or self.order

    def _say(self, order: Order, streams: Iterable[StreamId], told: str) -> None:
        ranks = tuple(sorted({stream.rank for stream in streams}))
        seen = OrderSeen(number=order.number, host=socket.gethostname(), ranks=ranks, told=told)
        if seen != self._said and (self._out / REPLICA_FOLDER).is_dir():  # gone with its job
            tell_seen(self._out, self._relay, seen)
            self._said = seen
