"""status.json: where each rank of a running job is, whom it waits for, how fast it is, what its
spool holds. The process beside the job writes it again and again; everybody else reads it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rankscope.errors import SpoolError, TraceError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import RankPlace, parse_ranks, ranks_text
from rankscope.run.filenames import REPLICA_FOLDER, RUN_ID_NAME, STATUS_FORMAT, STATUS_NAME
from rankscope.run.files import read_json_map, write_by_rename

OLD_S: Final = 10.0
"""Age from which a status is called old: nobody has read the records since."""
_TOLD_STEPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """A train step that ended on one rank."""

    step: int
    seconds: float
    waited_s: float
    """Part of these spent inside collectives that the program waited for where it issued them."""
    loss: float | None
    """Last scalar that a root's forward returned; None if there was none."""
    grad_norm: float | None
    """Norm of the gradients that this rank holds; None if none was recorded."""

    @property
    def own_s(self) -> float:
        """Time outside those collectives."""
        return max(0.0, self.seconds - self.waited_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as far as it was read. Times in seconds; None where a number is not known."""

    rank: int
    incarnation: int = 0
    host: str
    place: RankPlace
    is_step_over: bool = False
    """Its last step has ended: the rank is between traced steps."""
    mode: Mode = Mode.TRAIN
    step: int | None = None
    record_ns: int = 0
    """Wall clock of its last record; 0 if unknown."""
    waits_for: tuple[int, ...] = ()
    """Ranks missing from the collective in which it waits."""
    step_s: float | None = None
    own_s: float | None = None
    """Part of `step_s` outside collectives that it waited for."""
    beside_all: float | None = None
    """`own_s` divided by the median of all ranks in the same step."""
    beside_history: float | None = None
    """`step_s` divided by the median of its earlier steps."""
    slow_steps: int = 0
    """Those of its last steps in which `own_s` was 10 % above the median of all ranks."""
    compared_steps: int = 0
    ended: tuple[EndedStep, ...] = ()
    """Last train steps that ended; the file has eight of them."""
    missed: tuple[tuple[Mode, int], ...] = ()
    lost_records: int = 0
    unsent_bytes: int | None = None
    """Bytes in the head host's spool that are not in the trace folder yet; None elsewhere."""
    spool_fill: float | None = None
    """Unsent bytes as a part of `--rs-spool-bytes`."""

    @property
    def age_s(self) -> float | None:
        """Seconds since its last record, by the wall clocks of its host and of this one."""
        return max(0.0, (time.time_ns() - self.record_ns) / 1e9) if self.record_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """Sums since the job began, or since its records were read again; earlier lives count too."""

    records: int = 0
    received_bytes: int = 0
    lost_records: int = 0
    steps_ended: int = 0
    """Traced train steps of the rank that has ended most."""
    unread_bytes: int = 0
    bytes_per_s: float | None = None
    records_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A running job."""

    run: Mapping[str, Any] = field(default_factory=lambda: {"id": "", "settings": {}})
    """`id` and `settings` of the job, as the head of a trace has them."""
    world_size: int = 0
    written_ns: int = 0
    """Wall clock; 0 for a status that nobody wrote."""
    totals: JobTotals = field(default_factory=JobTotals)
    ranks: tuple[RankStatus, ...] = ()
    """The last life of every rank that has written anything, lowest first."""

    @property
    def age_s(self) -> float | None:
        """Seconds since the status was written; None if nobody wrote it."""
        return max(0.0, (time.time_ns() - self.written_ns) / 1e9) if self.written_ns else None


def fullest_spool(statuses: Sequence[RankStatus]) -> dict[str, Any] | None:
    """Return how full the fullest spool of this host is; None where none is here."""
    full = [status for status in statuses if status.spool_fill is not None]
    if not full:
        return None
    fullest = max(full, key=lambda status: status.spool_fill or 0.0)
    return {
        "fill": fullest.spool_fill,
        "rank": fullest.rank,
        "unsent_bytes": sum(status.unsent_bytes or 0 for status in full),
    }


def write_status(out: Path, status: JobStatus) -> None:
    """Replace the status of a trace folder, or raise SpoolError."""
    text = json.dumps(
        {
            "format": STATUS_FORMAT,
            "run": dict(status.run),
            "world_size": status.world_size,
            "written_ns": status.written_ns,
            "totals": asdict(status.totals),
            "ranks": [_rank_json(rank) for rank in status.ranks],
        }
    )
    write_by_rename(out / REPLICA_FOLDER / STATUS_NAME, f"{text}\n")


def read_status(out: Path) -> JobStatus:
    """Return the status of a trace folder; without one, at most whose records are there."""
    with contextlib.suppress(SpoolError, TraceError, KeyError, TypeError, ValueError):
        fields = read_json_map(out / REPLICA_FOLDER / STATUS_NAME)
        if fields["format"] == STATUS_FORMAT:
            run = {"id": str(fields["run"]["id"]), "settings": dict(fields["run"]["settings"])}
            return JobStatus(
                run=run,
                world_size=int(fields["world_size"]),
                written_ns=int(fields["written_ns"]),
                totals=JobTotals(**fields["totals"]),
                ranks=tuple(map(_rank_status, fields["ranks"])),
            )
    run_id = ""
    with contextlib.suppress(OSError):
        run_id = (out / REPLICA_FOLDER / RUN_ID_NAME).read_text(errors="replace").strip()
    return JobStatus(run={"id": run_id, "settings": {}})


_PLAIN_TYPES: Final = ("int", "str", "bool", "int | None", "float | None")
_PLAIN: Final = [field.name for field in fields(RankStatus) if field.type in _PLAIN_TYPES]


def _rank_json(status: RankStatus) -> dict[str, Any]:
    place = status.place
    return {
        **{name: getattr(status, name) for name in _PLAIN},
        "end": place.end,
        "in": place.step,
        "phase": None if place.phase is None else place.phase.word,
        "path": place.path,
        "collective": place.op,
        "members": ranks_text(place.members),
        "waits_for": ranks_text(status.waits_for),
        "mode": status.mode.word,
        "ended": [_step_json(field) for field in status.ended[-_TOLD_STEPS:]],
        "missed": [[mode.word, step] for mode, step in status.missed],
    }


def _rank_status(fields: Mapping[str, Any]) -> RankStatus:
    phase = fields["phase"]
    return RankStatus(
        **{name: fields[name] for name in _PLAIN},
        place=RankPlace(
            end=fields["end"],
            step=fields["in"],
            phase=None if phase is None else Phase[phase.upper()],
            path=fields["path"],
            op=fields["collective"],
            members=_ranks(fields["members"]),
        ),
        waits_for=_ranks(fields["waits_for"]),
        mode=Mode[fields["mode"].upper()],
        ended=tuple(map(_ended_step, fields["ended"])),
        missed=tuple((Mode[mode.upper()], int(step)) for mode, step in fields["missed"]),
    )


def _ranks(text: str) -> tuple[int, ...]:
    return parse_ranks(text) if text else ()


def _step_json(step: EndedStep) -> dict[str, Any]:
    """JSON has no number that is not finite: it is a word there."""
    return {
        name: str(number) if isinstance(number, float) and not math.isfinite(number) else number
        for name, number in asdict(step).items()
    }


def _ended_step(fields: Mapping[str, Any]) -> EndedStep:
    numbers: dict[str, Any] = {k: float(v) if isinstance(v, str) else v for k, v in fields.items()}
    return EndedStep(**numbers)
