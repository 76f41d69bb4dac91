"""What is written of a job while it runs, and of its end.

status.json says where each rank is, whom it waits for, how fast it is, what its spool holds. The
process beside the job writes it again and again; everybody else reads it.

A stall is a time in which no rank of a host moved: `stalls/<relay>.json`, one file for each relay,
in the trace folder for `check`, and in the run folder for the launcher and for a relay started
again.

Whether the job failed or was cancelled, and which rank a signal killed before others were ended
because of it, its launcher alone knows: the first launcher of a run that ends notes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rankscope.errors import SpoolError, TraceError, os_errors_as
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import RankPlace, parse_ranks, ranks_text
from rankscope.record.texts import utc_text
from rankscope.run.agreements import agree, agreed_text
from rankscope.run.files import own_subfolder, read_json_map, write_by_rename
from rankscope.run.folders import (
    JOB_END_NAME,
    REPLICA_FOLDER,
    RUN_ID_NAME,
    STALL_FOLDER,
    STATUS_FORMAT,
    STATUS_NAME,
)

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


_NS = 1_000_000_000
_LARGEST_NS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What one relay noticed. Times are wall-clock nanoseconds of its host."""

    since_ns: int
    """When the last record of any rank was written, or the last rank ended."""
    noticed_ns: int
    over_ns: int = 0
    is_by_end: bool = False
    """The standstill is over because ranks ended, not because one wrote a record."""
    host: str
    where: str = ""

    def sentence(self, now_ns: int | None) -> str:
        """Return a sentence without a full stop; `now_ns` is None where the job is over."""
        since = _clock(self.since_ns)
        where = f": {self.where}" if self.where else ""
        subject = f"no rank of {self.host}"
        if self.over_ns:
            ending = "then its ranks ended" if self.is_by_end else "then it went on"
            over, lasted = _clock(self.over_ns), self.seconds(self.over_ns)
            return f"{subject} moved from {since} to {over} ({lasted} s), {ending}{where}"
        if now_ns is None:
            return f"{subject} moved after {since}, as far as was seen{where}"
        return f"{subject} has moved since {since} ({self.seconds(now_ns)} s){where}"

    def seconds(self, until_ns: int) -> int:
        """Return how long it had lasted at a time, in whole seconds."""
        return max(0, (until_ns - self.since_ns) // _NS)

    def as_evidence(self, now_ns: int | None) -> dict[str, Any]:
        """Return {host, since, until, seconds, message}; `until` is null while no end was seen."""
        return {
            "host": self.host,
            "since": utc_text(self.since_ns),
            "until": utc_text(self.over_ns) if self.over_ns else None,
            "seconds": self.seconds(self.over_ns or now_ns or self.noticed_ns),
            "message": self.sentence(now_ns),
        }

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its entry in a file."""
        fields = asdict(self)
        return {**fields, "by_end": fields.pop("is_by_end")}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Stall:
        """Return the stall of `as_fields`, or raise KeyError, TypeError or ValueError."""
        times = {name: int(fields[name]) for name in ("since_ns", "noticed_ns", "over_ns")}
        if not all(0 <= time_ns < _LARGEST_NS for time_ns in times.values()):
            raise ValueError(f"times {times} are out of range")
        host, where = str(fields["host"]), str(fields["where"])
        return cls(**times, host=host, is_by_end=bool(fields["by_end"]), where=where)


def _clock(wall_ns: int) -> str:
    then = time.localtime(wall_ns // _NS)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


_FORMAT = "rankscope.stalls/1"
_MOST = 50


def keep_stall(folder: Path, relay: str, stall: Stall) -> None:
    """Add a stall to the file of one relay, or renew it, or raise SpoolError."""
    path = folder / STALL_FOLDER / f"{relay}.json"
    earlier = [s for s in _read(path) if s.since_ns != stall.since_ns]
    stalls = sorted([*earlier, stall], key=lambda s: s.since_ns)[-_MOST:]
    with os_errors_as(SpoolError, f"{path.parent}: cannot be made"):
        own_subfolder(path.parent)
    text = json.dumps({"format": _FORMAT, "stalls": [s.as_fields() for s in stalls]}, indent=1)
    write_by_rename(path, text + "\n")


def stalls_in(folder: Path) -> list[Stall]:
    """Return the readable stalls of a trace or run folder, in order of their begin."""
    stalls = [s for path in sorted((folder / STALL_FOLDER).glob("*.json")) for s in _read(path)]
    return sorted(stalls, key=lambda s: s.since_ns)


def carry_stalls(folders: Iterable[Path], out: Path) -> None:
    """Copy what is noted in folders into a new trace folder; what cannot be written is left out."""
    for folder in folders:
        for path in sorted((folder / STALL_FOLDER).glob("*.json")):
            for stall in _read(path):
                with contextlib.suppress(SpoolError):
                    keep_stall(out, path.stem, stall)


def remove_stalls(run_folder: Path) -> None:
    """Remove a run folder's own notes."""
    for path in (run_folder / STALL_FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(run_folder / STALL_FOLDER)


def _read(path: Path) -> list[Stall]:
    try:
        fields = read_json_map(path)
        if fields.get("format") != _FORMAT:
            return []
        return [Stall.from_fields(entry) for entry in fields["stalls"]][-_MOST:]
    except (SpoolError, KeyError, TypeError, ValueError, AttributeError):
        return []


_OF_A_FAULT: Final = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
"""Signals of a fault of the program. Not signals sent from outside, nor SIGABRT, which ends a
process when NCCL or gloo waited too long."""
_MOST_NAMED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """Facts about the end of a job that no record holds."""

    outcome: str = ""
    """Name of the signal that the launcher received, "failed", "returned", or "" if unknown."""
    at_ns: int = 0
    killed: Mapping[int, str] = field(default_factory=dict)
    """{rank: name of the signal} of the ranks that died first, by signals that are no reaction to
    other ranks."""
    has_stood: bool = False
    """A host saw all its ranks stand still, and they had not gone on at the end."""

    @property
    def signal(self) -> str:
        """The signal that ended the job; "" for none that is known."""
        return self.outcome if self.outcome.startswith("SIG") else ""


def signal_of(error: BaseException | None) -> str:
    """Return the name of the signal that an exception stands for, "" for none."""
    number = getattr(error, "sigval", None)  # of torch's SignalException
    return "SIGINT" if isinstance(error, KeyboardInterrupt) else getattr(number, "name", "")


def has_failed(error: BaseException | None) -> bool:
    """True for what leaves torchrun where a job fails; an exit with code 0 is no failure."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def note_job_end(out: Path, error: BaseException | None) -> None:
    """Note the end that a launcher saw; `error` ended the job, None if the job returned."""
    outcome = signal_of(error) or ("failed" if has_failed(error) else "returned")
    killed = [
        f"{rank}={failure.signal_name()}"
        for rank, failure in sorted(first_failures(error).items())
        if -failure.exitcode in _OF_A_FAULT
    ]
    with contextlib.suppress(OSError):  # the folder may be gone, or full: then nobody says it
        text = " ".join([outcome, str(time.time_ns()), *killed[:_MOST_NAMED]])
        agree(out / REPLICA_FOLDER, JOB_END_NAME, text)


def first_failures(error: BaseException | None) -> dict[int, Any]:
    """Return {rank: failure} of the first second, as torch's ChildFailedError says."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    earliest = min((failure.timestamp for failure in failures.values()), default=0)
    return {rank: failure for rank, failure in failures.items() if failure.timestamp == earliest}


def job_end(folders: Iterable[Path]) -> JobEnd:
    """Return the end noted in trace folders of one run."""
    places = [*folders]
    notes = (agreed_text(folder / REPLICA_FOLDER, JOB_END_NAME) for folder in places)
    # padded with "": without a note there is neither outcome nor time
    outcome, at, *killed = (*next(filter(None, notes), "").split(" "), "")
    at_ns = int(at) if at.isascii() and at.isdigit() else time.time_ns()
    named = (entry.partition("=") for entry in killed)
    stood = [
        stall.noticed_ns < at_ns and (not stall.over_ns or stall.over_ns > at_ns or stall.is_by_end)
        for folder in places
        for stall in stalls_in(folder)
    ]
    return JobEnd(
        outcome=outcome,
        at_ns=at_ns if outcome else 0,
        killed={int(rank): name for rank, _, name in named if rank.isascii() and rank.isdigit()},
        has_stood=any(stood),
    )
