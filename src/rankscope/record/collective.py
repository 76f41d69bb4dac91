"""What a collective is, apart from its numbers and from when it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text

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
