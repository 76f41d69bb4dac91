"""The ranks of a job: who is who, how each ended, where each is, lists of ranks as people write
them ("0-3,8"), and the collectives that they issue together.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

from rankscope.errors import TraceError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase


class EndReason(str, enum.Enum):
    """How a rank's life ended, as far as its spool tells."""

    EXIT = "exit"
    """The end record was committed: the interpreter shut down in order."""
    CLOSED = "closed"
    """Tracing was closed by the program itself (`with rankscope.trace`)."""
    SWITCHED_OFF = "switched_off"
    """Repeated failures inside rankscope switched tracing off on this rank."""
    LOST = "lost"
    """The process is gone and left no end record (killed, aborted, os._exit)."""
    RUNNING = "running"
    """No end had arrived when the trace was read."""
    RAISED = "raised"
    """The end record was committed while an uncaught exception ended the program."""


MAX_RANKS = 1 << 20
"""More ranks than any job has: the limit for counts and ranks read from outside."""
MAX_INCARNATIONS = 1 << 16
MINIMUM_LIMIT_BYTES = 64 << 10
LEAST_BLACK_BOX_BYTES = 16 * MINIMUM_LIMIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamId:
    """One rank's spool in one incarnation: `rank00003.0`."""

    rank: int
    incarnation: int

    def __post_init__(self) -> None:
        if not (0 <= self.rank < MAX_RANKS and 0 <= self.incarnation < MAX_INCARNATIONS):
            raise ValueError(f"rank {self.rank} incarnation {self.incarnation} is out of range")

    @property
    def name(self) -> str:
        """Folder and file stem; built from integers only."""
        return f"rank{self.rank:05d}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Who a traced process is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    incarnation: int
    host: str
    pid: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} outside a world of {self.world_size}: check RANK and WORLD_SIZE"
            )

    @property
    def stream(self) -> StreamId:
        """Name of this process's spool."""
        return StreamId(rank=self.rank, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """A process group as one rank sees it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    backend: str
    description: str = ""


_PART: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_EXCERPT: Final = 60


def ranks_text(ranks: Iterable[int]) -> str:
    """Return sorted distinct ranks with runs folded: {0, 1, 2, 8} -> "0-2,8"; "" for none."""
    listed = getattr(ranks, "tolist", None)  # numpy's own integers are ten times slower
    return _folded(tuple(ranks if listed is None else listed()))


@lru_cache(maxsize=1024)  # thousands of values lie on the same few ranks
def _folded(ranks: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_named(ranks: Iterable[int] | str) -> str:
    """Return `rank 3` for one, `ranks 0-2,8` for several; a text is as `ranks_text` made it."""
    text = ranks if isinstance(ranks, str) else ranks_text(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def others_text(ranks: Iterable[int], world_size: int) -> str:
    """Return the ranks of a world that are not among some, folded, however large the world."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for rank in sorted({*ranks, world_size}):
        if begin < rank <= world_size:
            runs.append((begin, rank - 1))
        begin = rank + 1
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@lru_cache(maxsize=4096)  # small traces ask for the same few ranks thousands of times
def parse_ranks(text: str, world_size: int = MAX_RANKS) -> tuple[int, ...]:
    """Return the ranks of `ranks_text`, sorted. Raises TraceError for ranks outside this world."""
    ranks: list[int] = []
    behind = 0
    for part in filter(None, text.split(",")):
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not behind <= first <= last < world_size:
            excerpt = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
            raise TraceError(
                f"{excerpt!r} is not a list of ranks in a world of {world_size}: "
                "expected one like 0-3,8"
            )
        ranks.extend(range(first, last + 1))
        behind = last + 1
    return tuple(ranks)


NOTHING: Final = "-"
STATES: Final = {
    EndReason.EXIT.value: "ended",
    EndReason.CLOSED.value: "closed by the program",
    EndReason.RAISED.value: "raised",
    EndReason.LOST.value: "lost",
    EndReason.SWITCHED_OFF.value: "rankscope switched off",
    EndReason.RUNNING.value: "running",
}


def step_label(mode: Mode, step: int, incarnation: int, *, is_setup: bool) -> str:
    """Return a step in words: `train step 3`, `setup`, `eval step 0 (life 1)`."""
    name = "setup" if is_setup else f"{mode.word} step {step}"
    return f"{name} (life {incarnation})" if incarnation else name


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank is: in the innermost open call, else behind the call that began last."""

    end: str
    """Value of an `EndReason`."""
    step: str = ""
    """Step as `step_label` writes it; "" where no call is known."""
    phase: Phase | None = None
    path: str = ""
    op: str = ""
    members: tuple[int, ...] = ()

    @property
    def state(self) -> str:
        """Whether it runs, or how it ended."""
        return STATES.get(self.end, self.end)

    @property
    def where(self) -> str:
        """Phase and module."""
        if self.phase is None:
            return NOTHING
        return f"{self.phase.word} of {self.path or '(root)'}"

    @property
    def waits_in(self) -> str:
        """The collective in which it stands, and its ranks."""
        return f"{self.op} of {ranks_named(self.members)}" if self.op else NOTHING


def alike_places(places: Mapping[int, RankPlace]) -> list[tuple[RankPlace, tuple[int, ...]]]:
    """Return each place with its ranks, in order of the lowest rank."""
    ranks_by_place: dict[RankPlace, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_by_place.setdefault(place, []).append(rank)
    return [(place, tuple(ranks)) for place, ranks in ranks_by_place.items()]


# ---- what ranks issue together -------------------------------------------------------------------

ISSUERS = (*(phase.word for phase in Phase if phase.facts.is_activation), "optimizer", "outside")

OPS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_reduce": ("reduce",), "all_reduce_coalesced": ("reduce",),
    "reduce": ("reduce", "dst"), "broadcast": ("src",), "scatter": ("src",),
    "gather": ("dst",), "gather_into_tensor": ("dst",),
    "all_gather": (), "all_gather_coalesced": (),
    "all_gather_into_tensor": (), "all_gather_into_tensor_coalesced": (),
    "reduce_scatter": ("reduce",), "reduce_scatter_tensor": ("reduce",),
    "reduce_scatter_tensor_coalesced": ("reduce",),
    "all_to_all": (), "all_to_all_single": (), "barrier": (), "monitored_barrier": (),
    "send": ("peer",), "recv": ("peer",),
}  # fmt: skip
"""The only list of ops, with the fields of each beside its group and members."""
MESSAGES: Final = frozenset(op for op, facts in OPS.items() if "peer" in facts)
_ALWAYS_SAID: Final = ("is_async", "issuer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective or point-to-point call as one rank issued it. Ranks are global."""

    op: str
    """torch.distributed's word without an object or async form: "all_reduce", "send" ..."""
    reduce: str | None = None
    group: str
    """Name of the process group, as in the definitions of groups; "" where it is not known."""
    members: tuple[int, ...]
    """Ranks in the group's own order; () where they are not known."""
    is_async: bool = False
    """The program waits for the result in a call of its own."""
    src: int | None = None
    dst: int | None = None
    peer: int | None = None
    """Other end of a send or recv; -1 for a recv from anybody."""
    tag: int | None = None
    is_object: bool = False
    """Pickled objects are sent: their bytes are not digested."""
    issuer: str = "outside"
    since: str = ""
    """Where every rank starts to count sends and recvs: "start" (of the process), "train 5" (after
    the optimizer step of train step 4), "run 3" (of a pipeline schedule). "" where earlier ones
    may be missing from the records, so that the count would mislead."""
    at: str = ""
    """The issuing line, `file.py:12 function`; "" where no line of Python issued it."""

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as definitions and trees hold them: what does not apply is left out."""
        fields_said: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name in _ALWAYS_SAID:
                name = field.name.removeprefix("is_")
                fields_said[name] = list(value) if field.name == "members" else value
        return fields_said

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> Collective:
        """Return the collective of `as_fields`. Raises KeyError, TypeError or ValueError."""
        names = ("src", "dst", "peer", "tag")
        numbers = {name: int(data[name]) for name in names if data.get(name) is not None}
        return cls(
            op=str(data["op"]),
            reduce=None if data.get("reduce") is None else str(data["reduce"]),
            group=str(data["group"]),
            members=tuple(map(int, data["members"])),
            is_async=bool(data["async"]),
            **numbers,
            is_object=bool(data.get("object", False)),
            issuer=str(data["issuer"]),
            since=str(data.get("since", "")),
            at=str(data.get("at", "")),
        )


def collective_words(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the op with its reduction and ranks, then whether it is async or of objects."""
    op = str(facts.get("op", "collective"))
    words = [f"{op}({facts['reduce']})" if facts.get("reduce") else op]
    way = {"send": "to", "recv": "from"}.get(op, "with")
    for name, word in (("peer", way), ("src", "from"), ("dst", "to")):
        rank = facts.get(name)
        if rank is not None:
            words.append(f"{word} {'anybody' if rank == -1 else rank}")
    yield " ".join([*words, f"over {ranks_text(facts.get('members', ()))}"])
    after = (("async", "async"), ("object", "objects"))
    yield from (word for name, word in after if facts.get(name))
