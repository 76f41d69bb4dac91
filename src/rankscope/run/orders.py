"""Orders of `rankscope capture`: what stands in a trace folder while a job runs, and who says what.

    TRACE/spool/order.json           the last order
    TRACE/spool/order-<relay>.json   the relay of a host has seen it, and who its ranks are
    TRACE/spool/orders.<life>/1      the first order that ranks took: "train 42 <number> <order>"
                             /1.1    "stands": a rank began step 42 (`agent.steps.chosen`)
                             /1.over its last step has ended on some rank

A relay copies the order to its run folder, on the disk of its host, because ranks look there once a
step. The copy bears the number of the order as its time, so it is the same on every host.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rankscope.errors import SettingError, SpoolError
from rankscope.record.call import Mode
from rankscope.run.eventboard import agreed
from rankscope.run.filenames import ORDER_FOLDER, ORDER_NAME, ORDER_SEEN_PREFIX, REPLICA_FOLDER
from rankscope.run.filepieces import piece_of
from rankscope.run.folders import RunHeader
from rankscope.run.prepare import Collection
from rankscope.run.replacing import read_json_map, replacing, write_by_rename

STANDS: Final = "stands"
OVER: Final = "over"
MOST_STEPS: Final = 100_000
_LONGEST: Final = 2048
"""Characters of an order: it is the text of a symbolic link too."""
_MOST_BYTES: Final = 2 * _LONGEST
"""Read of its file, in which blanks may stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is asked for."""

    number: int
    steps: int = 1
    paths: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.number < 1 << 63:  # a copy of the order has it as its time
            raise SettingError(f"an order of the time {self.number}: expected nanoseconds")
        if not 1 <= self.steps <= MOST_STEPS:
            raise SettingError(f"--steps {self.steps}: expected 1 to {MOST_STEPS}")
        if len(self.text) > _LONGEST:
            raise SettingError(f"the globs are too long: {_LONGEST} characters is the most")

    @property
    def text(self) -> str:
        """The order as JSON, on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Order | None:
        """Return an order, None where the text is none."""
        try:
            fields = json.loads(text)
            number, steps = fields["number"], fields["steps"]
            globs = fields["paths"], fields["tensors"]
            if [*map(type, (number, steps, *globs))] != [int, int, list, list]:
                return None
            paths, tensors = (tuple(map(str, each)) for each in globs)
            return cls(number=number, steps=steps, paths=paths, tensors=tensors)
        except (ValueError, KeyError, TypeError, RecursionError, SettingError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSeen:
    """What the relay of one host says of an order."""

    number: int
    host: str
    ranks: tuple[int, ...]
    told: str = ""
    """Of a black box: which step it has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOrder:
    """An order on which ranks have agreed."""

    order: Order
    life: int
    mode: Mode
    first: int
    stands: bool
    is_over: bool

    @property
    def last(self) -> int:
        """Its last step."""
        return self.first + self.order.steps - 1


def put_order(folder: Path, order: Order) -> None:
    """Write an order into the folder of replicas or a run folder, or raise SpoolError."""
    path = folder / ORDER_NAME
    try:
        with replacing(path, is_synced=False) as file:
            file.write(order.text.encode())
            file.flush()
            os.utime(file.fileno(), ns=(order.number, order.number))
    except OSError as error:
        raise SpoolError(f"{path}: cannot be written: {error.strerror}") from error


def order_in(folder: Path) -> Order | None:
    """Return the last order there, None without one, or where what is there is none."""
    try:
        return Order.read(piece_of(folder / ORDER_NAME, 0, _MOST_BYTES))
    except OSError:
        return None


def orders_come_to(run_folder: Path, header: RunHeader) -> Path:
    """Return the folder that orders come to: in the trace folder where ranks see it."""
    is_elsewhere = Collection.of_run(header).is_elsewhere
    return run_folder if is_elsewhere else header.out / REPLICA_FOLDER


def agreement_folder(run_folder: Path, header: RunHeader, life: int) -> Path:
    """Return where the ranks of one life agree on orders."""
    return orders_come_to(run_folder, header) / f"{ORDER_FOLDER}.{life}"


def taken_in(folder: Path) -> list[TakenOrder]:
    """Return the orders that ranks took, of all lives, which agree in folders of this one."""
    found = []
    for place in folder.glob(f"{ORDER_FOLDER}.*"):
        life = place.name.rpartition(".")[2]
        for number in range(1, MOST_STEPS) if life.isdecimal() else ():
            text = agreed(place, str(number))
            if text is None:
                break
            taken = _taken(place, int(life), number, text)
            if taken is not None:
                found.append(taken)
    return found


def _taken(place: Path, life: int, number: int, text: str) -> TakenOrder | None:
    mode, step, _, words = text.split(" ", 3)
    order = Order.read(words)
    if order is None:
        return None
    first, attempt = int(step), 1
    while (answer := agreed(place, f"{number}.{attempt}")) not in (None, STANDS):
        first, attempt = int(answer or first), attempt + 1
    return TakenOrder(
        order=order,
        life=life,
        mode=Mode[mode.upper()],
        first=first,
        stands=answer == STANDS,
        is_over=agreed(place, f"{number}.{OVER}") is not None,
    )


def is_taken_before(agreement: Path, number: int) -> bool:
    """True where ranks of an earlier life took an order: it ended with them."""
    life = int(agreement.name.rpartition(".")[2])
    earlier = (taken for taken in taken_in(agreement.parent) if taken.life < life)
    return any(taken.order.number == number for taken in earlier)


def tell_seen(out: Path, relay: str, seen: OrderSeen) -> None:
    """Say that a relay has seen an order, or raise SpoolError."""
    path = out / REPLICA_FOLDER / f"{ORDER_SEEN_PREFIX}{relay}.json"
    write_by_rename(path, json.dumps(asdict(seen)) + "\n")


def seen_by(out: Path, number: int) -> list[OrderSeen]:
    """Return what the relays said of an order."""
    found = []
    for path in sorted((out / REPLICA_FOLDER).glob(f"{ORDER_SEEN_PREFIX}*.json")):
        with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError, OverflowError):
            fields: dict[str, Any] = read_json_map(path)
            if fields["number"] == number:
                host, told = str(fields["host"]), str(fields["told"])
                ranks = tuple(map(int, fields["ranks"]))
                found.append(OrderSeen(number=number, host=host, ranks=ranks, told=told))
    return found
