"""The head of a trace: who ran what where, and how much of it is in the trace."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankscope.errors import TraceError
from rankscope.record.call import Mode
from rankscope.record.notes import Note
from rankscope.record.ranks import EndReason, others_text, parse_ranks, ranks_text
from rankscope.record.texts import untested_warning, utc_text
from rankscope.record.value import MAX_SAMPLES, SKETCH_SIZE
from rankscope.run.jobstatus import JobEnd
from rankscope.spool.recordformat import NO_SEQUENCE, TO_ITS_END, origin_text
from rankscope.tree.assembly.interning import MeshFamily, mesh_of
from rankscope.tree.assembly.layouts import layout_header
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.steprecords import Group


def run_header(streams: Sequence[RankStream]) -> dict[str, Any]:
    """Return the run header; streams in rank order, later incarnations behind earlier ones."""
    identities = [stream.identity for stream in streams]
    first = next((identity for identity in identities if identity), {})
    created = min((int(i["wall_ns"]) for i in identities if i.get("wall_ns")), default=0)
    return {
        "id": str(first.get("run_id", "")),
        "created": utc_text(created),
        "world_size": _world_size(streams),
        "ranks": [_rank(stream) for stream in streams],
        "hosts": _hosts(streams),
        "meshes": _meshes(streams),
        "groups": _groups(streams),
        "versions": _shared(streams, "versions"),
        **_untested(identities),
        "argv": [str(a) for a in first.get("argv") or ()],
        "settings": _shared(streams, "settings"),
        "environment": _shared(streams, "environment"),
        "differs": _differing(streams),
        **layout_header(streams),
        "digest": {"sketch_size": SKETCH_SIZE, "hash": "xxh3_64", "max_samples": MAX_SAMPLES},
    }


def _rank(stream: RankStream) -> dict[str, Any]:
    identity = stream.identity
    return {
        "rank": stream.stream.rank,
        "incarnation": stream.stream.incarnation,
        "host": str(identity.get("host", "")),
        "pid": int(identity.get("pid", 0)),
        "local_rank": int(identity.get("local_rank", 0)),
    }


def _hosts(streams: Sequence[RankStream]) -> list[dict[str, Any]]:
    by_host: dict[str, set[int]] = {}
    for stream in streams:
        by_host.setdefault(str(stream.identity.get("host", "")), set()).add(stream.stream.rank)
    return [{"name": name, "ranks": ranks_text(ranks)} for name, ranks in by_host.items()]


def _defined(streams: Sequence[RankStream], kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [(s.stream.rank, d) for s in streams for d in s.defined(kind).values()]


def _meshes(streams: Sequence[RankStream]) -> list[dict[str, Any]]:
    families: dict[MeshFamily, tuple[str, dict[tuple[int, ...], None]]] = {}
    for _, definition in _defined(streams, "mesh"):
        mesh = mesh_of(definition)
        family = MeshFamily(axes=mesh.axes, shape=mesh.shape)
        device_ranks = families.setdefault(family, (str(definition.get("device") or ""), {}))
        device_ranks[1][mesh.ranks] = None
    return [family.listed(over, device) for family, (device, over) in families.items()]


def _groups(streams: Sequence[RankStream]) -> list[dict[str, Any]]:
    known_groups: dict[str, tuple[dict[str, Any], set[int]]] = {}
    for rank, definition in _defined(streams, "group"):
        group = {
            "name": str(definition["name"]),
            "members": [int(r) for r in definition["ranks"]],
            "backend": str(definition.get("backend", "")),
            "description": str(definition.get("description") or ""),
        }
        known_groups.setdefault(json.dumps(group), (group, set()))[1].add(rank)
    return [group | {"seen_by": ranks_text(ranks)} for group, ranks in known_groups.values()]


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _shared(streams: Sequence[RankStream], name: str) -> dict[str, str]:
    return next((_texts(s.identity[name]) for s in streams if s.identity.get(name)), {})


def _untested(identities: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    versions = {_texts(identity.get("versions")).get("torch", "") for identity in identities}
    doubts = [doubt for version in sorted(versions) if (doubt := untested_warning(version))]
    return {"untested": "; ".join(doubts)} if doubts else {}


def _differing(streams: Sequence[RankStream]) -> list[dict[str, Any]]:
    """List what ranks do not agree in: {"what": "versions", "name": "torch", "values": [...]}."""
    differing = []
    for field in ("versions", "settings", "environment"):
        by_name: dict[str, dict[str | None, set[int]]] = {}
        texts = [(s.stream.rank, _texts(s.identity.get(field))) for s in streams if s.identity]
        for name in sorted({name for _, values_of_rank in texts for name in values_of_rank}):
            for rank, values_of_rank in texts:
                by_name.setdefault(name, {}).setdefault(values_of_rank.get(name), set()).add(rank)
        for name, values in by_name.items():
            if len(values) > 1:
                listed = [{"ranks": ranks_text(r), "value": value} for value, r in values.items()]
                differing.append({"what": field, "name": name, "values": listed})
    return differing


def how_ended(streams: Sequence[RankStream], end: JobEnd) -> dict[str, str] | None:
    """Return how a job ended from outside, without a fault that is known; None where its ranks
    ended by themselves, one failed, or it stood still.

    "interrupted": its launcher got a signal, or every rank was ended by KeyboardInterrupt.
    "killed": no rank said anything; all had ended the same step, and did nothing.
    """
    last = {stream.stream.rank: stream for stream in streams}.values()
    is_cut = [str((s.raised or {}).get("error", "")).startswith("KeyboardInterrupt") for s in last]
    ends = [None if cut else s.end for cut, s in zip(is_cut, last)]
    if end.outcome == "failed" or end.has_stood or {EndReason.RAISED, EndReason.RUNNING} & {*ends}:
        return None
    lost = [stream for stream in last if stream.end is EndReason.LOST]
    if _left_behind(last, lost):
        return None
    if end.signal or all(is_cut):
        cut_ns = (s.ended_ns + s.clock_offset_ns for s, cut in zip(last, is_cut) if cut)
        at_ns = end.at_ns or max(cut_ns)
        if _stood_still(last, at_ns):
            return None
        return {"how": "interrupted", "by": end.signal or "SIGINT", "at": utc_text(at_ns)}
    steps = {tuple(s.steps[["mode", "step"]][-1].tolist()) for s in lost if s.is_idle}
    is_idle = len(steps) == 1 and all(s.is_idle and s.committed == s.received for s in lost)
    # torchrun ends ranks like that where one of them failed; frameworks with ranks of their own do
    # where the job has returned
    has_agent = any("TORCHELASTIC_RUN_ID" in s.identity.get("environment", ()) for s in last)
    is_all = is_idle and len(lost) == len(last) and not has_agent
    return {"how": "killed"} if is_all else None


def _left_behind(streams: Iterable[RankStream], lost: Iterable[RankStream]) -> bool:
    """True where a lost rank was more than a step behind another: it was gone before the end."""

    def made(stream: RankStream) -> int:
        return int(stream.steps["step"][stream.steps["mode"] == int(Mode.TRAIN)].max(initial=0))

    return any(max(map(made, streams)) - made(stream) > 1 for stream in lost)


def _stood_still(streams: Iterable[RankStream], at_ns: int) -> bool:
    """True where ranks were inside a step and silent for thrice their longest pause, and for 3
    s."""
    waits_ns, newest_ns = [1_000_000_000], [0]
    for stream in streams:
        times = np.sort(np.concatenate([stream.enters["time_ns"], stream.exits["time_ns"]]))
        if len(times) > 1:
            waits_ns.append(int(np.diff(times).max()))
            newest_ns.append(int(times[-1]) + stream.clock_offset_ns)
    is_inside = any(not stream.is_idle for stream in streams)
    return is_inside and at_ns - max(newest_ns) > 3 * max(waits_ns)


def completeness(
    streams: Sequence[RankStream], not_understood: Sequence[int], *, has_ended: bool = False
) -> dict[str, Any]:
    """Return per rank what was committed, received and dropped, and how it ended. `not_understood`:
    per stream, values that name a call or definition which is not there; `has_ended`: the job was
    ended from outside (`how_ended`), so no rank has to say how it ended."""
    missing = _missing(streams, _world_size(streams))
    ranks = [_state(stream, lost) for stream, lost in zip(streams, not_understood)]
    last = {s.stream.rank: s.stream.incarnation for s in streams}
    # a rank that was restarted ended without a word: what counts is that all it wrote has arrived
    asked = asked_steps(streams)
    complete = (
        bool(streams)
        and not any(event["missing"] for event in asked)
        and not missing
        and all(
            state["complete"]
            or ((has_ended or state["incarnation"] < last[state["rank"]]) and _is_whole(state))
            for state in ranks
        )
    )
    report = {"complete": complete, "missing": missing, "ranks": ranks}
    return {**report, "asked": asked} if asked else report


# ---- what a job that holds its last steps back was asked for -----------------------------------


class _AskedSteps(NamedTuple):
    """Steps that an event asked for, of all ranks of a life."""

    event: str
    mode: str
    first: int
    last: int
    text: str


_Runs = list[tuple[int, int]]
"""Runs of steps, in order and apart."""


def asked_steps(streams: Sequence[RankStream]) -> list[dict[str, Any]]:
    """Return the steps that events of a black box asked for, and the ranks whose records lack them;
    [] for any other job."""
    events: list[dict[str, Any]] = []
    for life in sorted({stream.stream.incarnation for stream in streams}):
        members = [stream for stream in streams if stream.stream.incarnation == life]
        for event in dict.fromkeys(event for stream in members for event in _asked_of(stream)):
            ranks: dict[tuple[str, str], list[int]] = {}
            for stream in members:
                for lack in _lacking(stream, event):
                    ranks.setdefault(lack, []).append(stream.stream.rank)
            missing = [
                {"ranks": ranks_text(which), "steps": steps, "why": why}
                for (steps, why), which in ranks.items()
            ]
            events.append({"incarnation": life, **event._asdict(), "missing": missing})
    return events


def _asked_of(stream: RankStream) -> list[_AskedSteps]:
    events = stream.defined("asked").values()
    return [_AskedSteps(*(event[name] for name in _AskedSteps._fields)) for event in events]


def _lacking(stream: RankStream, event: _AskedSteps) -> list[tuple[str, str]]:
    """Return the asked steps that a rank's records lack, and why; steps it never made do not
    count."""
    asked = [(event.first, event.last)]
    *_, state = stream.defined("copied").values() or [None]
    if state is None:
        return _named(asked, "no record that says which steps these are has arrived")
    mode = 0 if event.mode == "train" else 1
    copied, gone, torn = (
        [(first, last) for of, first, last in state[name] if of == mode]
        for name in ("copied", "gone", "torn")
    )
    if state["is_done"] and event in _asked_of(stream):
        let_go = _both(_without(asked, copied), gone)
        return [
            *_named(let_go, "the rank no longer held them when they were copied; --rs-spool-bytes "
                    "says how many it holds, its companion's log whether they waited"),
            *_named(_both(asked, torn), "its spool was full, and it dropped records of them"),
        ]  # fmt: skip
    intact = _without(copied, torn if state["is_done"] else [*torn, (state["step"], state["step"])])
    late, early = "asked for after its records were copied", "its copy ends before their end"
    why = late if state["is_done"] else early
    return _named(_without(asked, intact), why)


def _named(runs: _Runs, why: str) -> list[tuple[str, str]]:
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return [(",".join(texts), why)] if runs else []


def _both(some: _Runs, limits: _Runs) -> _Runs:
    """Return the steps that are in both."""
    runs = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in itertools.product(some, limits)]
    return [(first, last) for first, last in runs if first <= last]


def _without(runs: _Runs, holes: _Runs) -> _Runs:
    """Return the steps of the former that are not in the latter."""
    for low, high in holes:
        parts = [[(a, min(b, low - 1)), (max(a, high + 1), b)] for a, b in runs]
        runs = [(first, last) for pair in parts for first, last in pair if first <= last]
    return runs


def _world_size(streams: Sequence[RankStream]) -> int:
    """Return how many ranks the job has, as its ranks say, and at least as many as wrote."""
    world = max((int(s.identity.get("world_size", 1)) for s in streams), default=0)
    return max(world, *(s.stream.rank + 1 for s in streams), 0)


def _missing(streams: Sequence[RankStream], world: int) -> str:
    """Return the selected ranks (setting `ranks`, default all) that have written nothing,
    folded."""
    writers = {stream.stream.rank for stream in streams}
    try:
        chosen = parse_ranks(_shared(streams, "settings").get("ranks", "all"))
    except TraceError:  # "all"
        return others_text(writers, world)
    return ranks_text(rank for rank in set(chosen) - writers if rank < world)


def _is_whole(state: Mapping[str, Any]) -> bool:
    is_all_here = state["committed"] == state["received"]
    return bool(is_all_here and not state["gaps"] and not state["notes"])


def _state(stream: RankStream, lost: int) -> dict[str, Any]:
    notes = list(stream.notes)
    if stream.end is not EndReason.RUNNING:
        notes += [
            f"{event.mode} steps {steps} are not there, which were asked for ({event.text}): {why}"
            for event in _asked_of(stream)
            for steps, why in _lacking(stream, event)
        ]
    if lost:
        notes.append(f"{lost} values name a call or a description that is not there")
    if stream.end is EndReason.SWITCHED_OFF:
        notes.append("tracing was switched off on this rank: its errors say why")
    is_complete = (
        stream.committed == stream.received
        and stream.dropped == 0
        and stream.end in (EndReason.EXIT, EndReason.CLOSED, EndReason.RAISED)
    )
    tensors = {"tensors": list(stream.kept_notes)} if stream.kept_notes else {}
    raised = {"raised": stream.raised} if stream.raised else {}
    of_no_call = stream.errors[stream.errors["sequence"] == NO_SEQUENCE]
    errors = [_note(stream, int(row["text"])) for row in of_no_call]
    facts = [note.fact for note in errors if note.fact is not None]
    return {
        "rank": stream.stream.rank,
        "incarnation": stream.stream.incarnation,
        "host": str(stream.identity.get("host", "")),
        "origin": origin_text(stream.origin),
        "committed": stream.committed,
        "received": stream.received,
        "dropped": stream.dropped,
        "end": stream.end.value,
        "complete": is_complete and not notes,
        "gaps": [_gap(gap) for gap in stream.gaps],
        **_full_from(stream),
        "errors": [str(note) for note in errors],
        "notes": notes,
        **({"facts": facts} if facts else {}),
        **tensors,
        **raised,
    }


def _full_from(stream: RankStream) -> dict[str, Any]:
    if stream.full_from is None:
        return {}
    mode, step = stream.full_from
    return {"full_from": {"mode": Mode(mode).word, "step": step}}


def _gap(gap: Any) -> dict[str, Any]:
    fields = {"mode": Mode(int(gap["mode"])).word, "first_step": int(gap["first_step"])}
    if gap["last_step"] == TO_ITS_END:
        return {**fields, "last_step": None, "records": None, "bytes": None}
    return fields | {name: int(gap[name]) for name in ("last_step", "records", "bytes")}


def _note(stream: RankStream, number: int) -> Note:
    definition = stream.definitions.get(number, {})
    return Note.read(str(definition.get("text", "")), definition.get("fact"))


def step_notes(streams: Sequence[RankStream]) -> dict[Group, list[dict[str, Any]]]:
    """Return, per group of nodes, what ranks noted when the step began, ran, or ended."""
    noted: dict[Group, dict[Note, set[int]]] = {}
    for stream in streams:
        for event in stream.steps[stream.steps["text"] != 0]:
            life, mode, step = stream.stream.incarnation, int(event["mode"]), int(event["step"])
            key = Group(life, False, mode, step)
            note = _note(stream, int(event["text"]))
            noted.setdefault(key, {}).setdefault(note, set()).add(stream.stream.rank)
    return {
        key: [{"ranks": ranks_text(ranks), **note.as_json()} for note, ranks in notes.items()]
        for key, notes in noted.items()
    }
