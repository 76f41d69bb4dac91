"""Entries on which the ranks and relays of a job agree: events of a job that holds its last steps
back, and orders of `rankscope capture`.

An entry is a symbolic link to its text: made in one call, whole or not at all, on every shared
disk, by the first process that comes.

    <events>/1                       the first event: its trigger, mode, step and text
    TRACE/spool/order.json           the last order
    TRACE/spool/order-<relay>.json   the relay of a host has seen the order, and who its ranks are
    TRACE/spool/orders.<life>/1      the first order that ranks took: "train 42 <number> <order>"
                             /1.1    "stands": a rank began step 42 (`agent.steps.chosen`)
                             /1.over its last step has ended on some rank

Ranks look for entries before they let go of steps, relays from time to time. What an event asks
for, of all ranks of that life, is a `Window`: steps that have to be in the trace; `mark_copied`
says beside each rank's ring how far they were copied. A relay copies an order to its run folder, on
the disk of its host, because ranks look there once a step. The copy bears the number of the order
as its time, so it is the same on every host.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rankscope.errors import SettingError, SpoolError, os_errors_as
from rankscope.record.call import Mode
from rankscope.record.stepselection import Trigger
from rankscope.run.files import mount_of, piece_of, read_json_map, replacing, write_by_rename
from rankscope.run.folders import (
    EVENT_FOLDER,
    HELD_FOLDER,
    ORDER_FOLDER,
    ORDER_NAME,
    ORDER_SEEN_PREFIX,
    REPLICA_FOLDER,
    RunHeader,
    streams,
)
from rankscope.run.prepare import Collection

ABSENT = -1
_MOST_EVENTS = 256
"""Most events of one life; later ones are not reported."""
_OF_ENDS = 16
"""Places among these for events that end a job."""
_MOST_CHARACTERS = 500
MOST_AHEAD: Final = 4
"""Most steps between ranks when an event happens; ranks hold these beyond the requested ones."""
_COPIED_NAME: Final = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened: the steps before it become a trace."""

    trigger: Trigger
    mode: Mode
    step: int
    text: str

    @classmethod
    def read(cls, entry: str) -> Happening:
        """Return the event that an entry of the board says."""
        word, mode, step, text = entry.split(" ", 3)
        return cls(
            trigger=Trigger[word.upper()], mode=Mode[mode.upper()], step=int(step), text=text
        )

    @property
    def entry(self) -> str:
        """The event as an entry of the board."""
        text = self.text[:_MOST_CHARACTERS]
        return f"{self.trigger.word} {self.mode.word} {self.step} {text}"

    def window(self, steps: int) -> Window:
        """Return what it asks for of a job that holds its last `steps` back."""
        ahead = MOST_AHEAD if self.trigger.value.is_end else 0
        return Window(**asdict(self), first=self.step - steps, last=self.step + ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Happening):
    """Steps that an event asks for, both ends included."""

    first: int
    last: int
    """Last step to keep: beyond `step` where other ranks may be ahead."""

    @property
    def asked(self) -> tuple[int, int]:
        """The steps that have to be in the trace."""
        return max(0, self.first), self.step


class EventBoard:
    """The events of one life of the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[Happening] = []
        """Events read so far: entries never change."""

    def events(self) -> list[Happening]:
        """Return the events so far, in the order in which they were reported."""
        # numbered without a hole: the first number without an entry is the end of the board
        while (entry := agreed_text(self._folder, str(len(self._events) + 1))) is not None:
            self._events.append(Happening.read(entry))
        return [*self._events]

    def tell(self, event: Happening) -> bool:
        """Write an event, or raise OSError; False if there are too many."""
        limit = _MOST_EVENTS - (0 if event.trigger.value.is_end else _OF_ENDS)
        # of ranks that tell at once each gets another number: the links decide
        numbers = range(len(self.events()) + 1, limit)
        return any(self._agree(str(number), event.entry) == event.entry for number in numbers)

    def was_told(self, trigger: Trigger, text: str) -> bool:
        """True if this event was reported; an end counts for any event of its trigger."""
        texts = [event.text for event in self.events() if event.trigger is trigger]
        return bool(texts) if trigger.value.is_end else text[:_MOST_CHARACTERS] in texts

    def first_time(self, time: int) -> int:
        """Return the time of a watched file before any touch that counts, or raise OSError."""
        return int(self._agree("0", str(time)))

    def tell_taken(self, number: int) -> None:
        """Write that a glob of values to watch, by its number, took one, or raise OSError."""
        if not self.has_taken(number):
            self._agree(f"watch.{number}", "taken")

    def has_taken(self, number: int) -> bool:
        """True where a glob took a value on any rank."""
        return agreed_text(self._folder, f"watch.{number}") is not None

    def _agree(self, name: str, text: str) -> str:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return agree(self._folder, name, text)


def event_folder(run_folder: Path, header: RunHeader, incarnation: int) -> Path:
    """Return the folder in which ranks and relays of one life report events: all of them see it."""
    return shared_folder(run_folder, header) / f"{EVENT_FOLDER}.{incarnation}"


def shared_folder(run_folder: Path, header: RunHeader) -> Path:
    """Return the folder that all hosts of a run see, or else this host."""
    return header.out / REPLICA_FOLDER if Collection.of_run(header).is_shared else run_folder


def mark_copied(ring_folder: Path, windows: int, offset: int) -> None:
    """Note beside a ring that the bytes before `offset` are in the copy, as far as the first
    `windows` events of its life ask for them. Raises OSError."""
    draft = ring_folder / f"{_COPIED_NAME}.new"
    # a link cannot be changed: the new one is renamed over the old
    draft.unlink(missing_ok=True)
    os.symlink(f"{windows} {offset}", draft)
    os.rename(draft, ring_folder / _COPIED_NAME)


def copied_so_far(ring_folder: Path) -> tuple[int, int]:
    """Return the last numbers of `mark_copied`; (0, 0) before the first."""
    try:
        windows, offset = map(int, (agreed_text(ring_folder, _COPIED_NAME) or "0 0").split())
    except ValueError:
        return 0, 0
    return windows, offset


def held_anything(run_folder: Path) -> bool:
    """True if a rank of this host held steps back."""
    folder = run_folder / HELD_FOLDER
    return folder.is_dir() and bool(streams(folder))


def file_time(path: Path) -> Callable[[], int]:
    """Return what tells when a file was touched last, in nanoseconds; `ABSENT` without one."""
    mount, name = mount_of(path), str(path)
    # an NFS client keeps the attributes of a file that is not opened for up to a minute
    has_to_open = mount is not None and mount.revalidates_on_open

    def mtime_ns() -> int:
        try:
            if not has_to_open:
                return os.stat(name).st_mtime_ns
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ABSENT
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    return mtime_ns


def agree(folder: Path, name: str, text: str) -> str:
    """Return the text that was put first under this name, or raise OSError."""
    entry = folder / name
    try:
        # one call that makes the name with its text, or finds it taken: no reader sees half of it,
        # on any disk
        os.symlink(text, entry)
    except FileExistsError:
        return os.readlink(entry)
    return text


def agreed_text(folder: Path, name: str) -> str | None:
    """Return the text under this name, None before any was put there."""
    try:
        return os.readlink(folder / name)
    except OSError:
        return None


STANDS: Final = "stands"
OVER: Final = "over"
MOST_STEPS: Final = 100_000
_LONGEST: Final = 2048
"""Most characters of an order, which is the text of a symbolic link too."""
_MOST_BYTES: Final = 2 * _LONGEST
"""Most bytes read of an order's file, blanks included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of `rankscope capture`."""

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
        """Return an order, None for any other text."""
        try:
            fields = json.loads(text)
            number, steps = fields["number"], fields["steps"]
            globs = fields["paths"], fields["tensors"]
            if [*map(type, (number, steps, *globs))] != [int, int, list, list]:
                return None
            paths, tensors = (tuple(map(str, texts)) for texts in globs)
            return cls(number=number, steps=steps, paths=paths, tensors=tensors)
        except (ValueError, KeyError, TypeError, RecursionError, SettingError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSeen:
    """The answer of the relay of one host to an order."""

    number: int
    host: str
    ranks: tuple[int, ...]
    told: str = ""
    """Of a black box: the steps that it asked for."""


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
    trouble = os_errors_as(SpoolError, f"{path}: cannot be written")
    with trouble, replacing(path, is_synced=False) as file:
        file.write(order.text.encode())
        file.flush()
        # before the rename: whoever sees the file sees its number as its time, the same on every
        # host
        os.utime(file.fileno(), ns=(order.number, order.number))


def order_in(folder: Path) -> Order | None:
    """Return the last order there, None without a readable one."""
    try:
        return Order.read(piece_of(folder / ORDER_NAME, 0, _MOST_BYTES))
    except OSError:
        return None


def orders_come_to(run_folder: Path, header: RunHeader) -> Path:
    """Return the folder that orders come to: in the trace folder where ranks see it."""
    is_elsewhere = Collection.of_run(header).is_elsewhere
    return run_folder if is_elsewhere else header.out / REPLICA_FOLDER


def agreement_folder(run_folder: Path, header: RunHeader, life: int) -> Path:
    """Return the folder in which ranks of one life agree on orders."""
    return orders_come_to(run_folder, header) / f"{ORDER_FOLDER}.{life}"


def taken_orders(folder: Path) -> list[TakenOrder]:
    """Return the orders that ranks took, of all lives, which agree in folders of this one."""
    orders = []
    for place in folder.glob(f"{ORDER_FOLDER}.*"):
        life = place.name.rpartition(".")[2]
        for number in range(1, MOST_STEPS) if life.isdecimal() else ():
            text = agreed_text(place, str(number))
            if text is None:
                break
            order = _taken(place, int(life), number, text)
            if order is not None:
                orders.append(order)
    return orders


def _taken(place: Path, life: int, number: int, text: str) -> TakenOrder | None:
    mode, step, _, words = text.split(" ", 3)
    order = Order.read(words)
    if order is None:
        return None
    first, attempt = int(step), 1
    while (answer := agreed_text(place, f"{number}.{attempt}")) not in (None, STANDS):
        first, attempt = int(answer or first), attempt + 1
    return TakenOrder(
        order=order,
        life=life,
        mode=Mode[mode.upper()],
        first=first,
        stands=answer == STANDS,
        is_over=agreed_text(place, f"{number}.{OVER}") is not None,
    )


def is_taken_before(agreement: Path, number: int) -> bool:
    """True where ranks of an earlier life took an order: it ended with them."""
    life = int(agreement.name.rpartition(".")[2])
    earlier = (order for order in taken_orders(agreement.parent) if order.life < life)
    return any(order.order.number == number for order in earlier)


def tell_seen(out: Path, relay: str, sighting: OrderSeen) -> None:
    """Say that a relay has seen an order, or raise SpoolError."""
    path = out / REPLICA_FOLDER / f"{ORDER_SEEN_PREFIX}{relay}.json"
    write_by_rename(path, json.dumps(asdict(sighting)) + "\n")


def sightings(out: Path, number: int) -> list[OrderSeen]:
    """Return the relays' answers to an order."""
    orders = []
    for path in sorted((out / REPLICA_FOLDER).glob(f"{ORDER_SEEN_PREFIX}*.json")):
        with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError, OverflowError):
            fields: dict[str, Any] = read_json_map(path)
            if fields["number"] == number:
                host, told = str(fields["host"]), str(fields["told"])
                ranks = tuple(map(int, fields["ranks"]))
                orders.append(OrderSeen(number=number, host=host, ranks=ranks, told=told))
    return orders
