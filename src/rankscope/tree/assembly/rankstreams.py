"""One rank's records as columns: what assembly works on.

A stream is read once: its records become numpy structured arrays of the dtypes in
spool/recordformat.py, in the order they were committed, and its definitions a dict by number.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from rankscope.errors import SpoolError, TraceVersionError
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.value import SKETCH_SIZE
from rankscope.spool import recordformat
from rankscope.spool.recordcolumns import (
    KNOWN_MODES,
    KNOWN_PHASES,
    VALUE_COLUMNS,
    Records,
    read_ending,
    records,
    sound_digests,
    sound_mask,
    sound_rows,
)
from rankscope.spool.recordformat import (
    NO_SEQUENCE,
    Decoded,
    RecordKind,
    StepEvent,
    decode_definition,
    origin_of,
)

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBytes:
    """The bytes held of one stream, and what its end marker says."""

    stream: StreamId
    data: NDArray[np.uint8] | bytes
    """Whole records from the stream's first on, all of them but for those of `hidden_bytes`."""
    hidden_bytes: int = 0
    """Of records that were let go once their step was written."""
    is_verified: bool = False
    """True where every cell was checked already, and all of them make whole records."""
    committed: int | None = None
    """Bytes the rank committed; None where nobody who saw its spool has said."""
    end: EndReason | None = None
    """As its end marker says; None without a marker."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleSketches:
    """Per-sample sketches: one head per value, and the rows of all of them behind each other."""

    heads: Array
    """SAMPLES_DTYPE, [heads]."""
    rows: NDArray[np.float32]
    """[sum of counts, K]."""


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """Values by column."""

    columns: Mapping[str, Array]
    """Those of VALUE_DTYPE, and "digested": which have numbers, 0 where they have none."""

    def __len__(self) -> int:
        return len(self.columns["digested"])

    def __getitem__(self, name: str) -> Array:
        """Return a column, [values] or [values, numbers of one]: not to be changed."""
        return self.columns[name]

    def chosen(self, rows: Array | slice) -> ValueColumns:
        """Return some of them."""
        return ValueColumns({name: column[rows] for name, column in self.columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """Everything one rank recorded in one incarnation, as columns."""

    stream: StreamId
    identity: dict[str, Any]
    """The definition of kind "rank"; {} where not even that arrived."""
    definitions: dict[int, dict[str, Any]]
    by_kind: Mapping[str, Mapping[int, dict[str, Any]]]
    enters: Array
    exits: Array
    values: ValueColumns
    samples: SampleSketches
    steps: Array
    gaps: Array
    """GAP_DTYPE: what was dropped; up to `TO_ITS_END` where the rank ended before it said more."""
    full_from: tuple[int, int] | None
    """Mode and step from which on nothing was recorded to the end, because the spool was full."""
    errors: Array
    tensors: Array
    committed: int | None
    origin: int
    """Which process wrote it (`spool.recordformat`), 0 where nothing arrived."""
    received: int
    """Valid bytes of the stream: those at hand, and those let go once their step was written."""
    hidden_bytes: int = 0
    dropped: int
    end: EndReason
    ended_ns: int = 0
    """When it said so, by its monotonic clock; 0 where it did not."""
    raised: dict[str, Any] | None = None
    """The exception that ended the program: error, causes, where; None where none is known."""
    notes: tuple[str, ...] = ()
    has_set_aside: bool = False
    """True where records or definitions were set aside: the bytes say more than the columns."""
    kept_notes: tuple[str, ...] = ()
    """What was not kept of the full tensors that were asked for, and what became of the chunks."""

    def defined(self, kind: str) -> Mapping[int, dict[str, Any]]:
        """Return the definitions of a kind, by number."""
        return self.by_kind.get(kind, {})

    @property
    def clock_offset_ns(self) -> int:
        """What to add to this rank's time_ns to get wall-clock time."""
        return int(self.identity.get("wall_ns", 0)) - int(self.identity.get("monotonic_ns", 0))

    @property
    def is_idle(self) -> bool:
        """True where no call is open, and its last step has ended or its optimizer has stepped."""
        if not len(self.steps) or not len(self.enters):
            return False
        has_ended = self.steps["event"][-1] == int(StepEvent.END)
        has_stepped = self.enters["phase"][-1] == int(Phase.PARAMS)
        are_left = np.isin(self.enters["sequence"], self.exits["sequence"]).all()
        return bool(are_left and (has_ended or has_stepped))


def read_stream(source: StreamBytes, decoded: Decoded | None = None) -> RankStream:
    """Return the records of one stream; what follows the first damaged cell is left out.

    Ranks of one job define mostly the same, and share the dicts of `decoded`: definitions by their
    bytes, added to here. TraceVersionError: the rank wrote a newer format than this reader knows.
    """
    data = source.data if isinstance(source.data, bytes) else source.data.view(np.ndarray)
    stream_records = records(data, is_verified=source.is_verified)
    definitions, refused = definitions_in(stream_records, {} if decoded is None else decoded)
    by_kind: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for number, definition in definitions.items():
        by_kind[definition["kind"]][number] = definition
    identity = next(iter(by_kind["rank"].values()), {})
    version = identity.get("format", recordformat.FORMAT_VERSION)
    if version > recordformat.FORMAT_VERSION:
        raise TraceVersionError(
            f"rank {source.stream.rank} wrote records of format {version}, this rankscope reads up "
            f"to {recordformat.FORMAT_VERSION}: use the version that made the trace, or a newer one"
        )
    ended = read_ending(stream_records)
    notes = list(source.notes)
    enters, values, unsound = _calls_and_values(stream_records, identity, notes)
    rows: dict[RecordKind, Array] = {}
    for kind in (RecordKind.EXIT, RecordKind.STEP, RecordKind.GAP, RecordKind.ERROR,
                 RecordKind.TENSOR):  # fmt: skip
        kind_rows = stream_records.rows_at(stream_records.positions(kind), kind)
        names = [name for name in kind_rows.dtype.names or () if name != "pad"]
        # packed: the padding is half of a record, and the rows stay in memory until the tree is
        # built
        rows[kind], wrong = sound_rows(kind, repack_fields(kind_rows[names]))
        unsound += wrong
    ends = stream_records.positions(RecordKind.END)
    unsound += sound_mask(RecordKind.END, stream_records.rows_at(ends, RecordKind.END))[1]
    samples, wrong = _samples(stream_records)
    unsound += wrong
    notes += _set_aside("definition", refused)
    notes += _set_aside("record", unsound)
    received = stream_records.committed_bytes + source.hidden_bytes
    committed = source.committed
    # END was its last record: what is here is all there was
    if committed is None and ended.reason is not None:
        committed = received
    full_from = _full_from(stream_records)
    gaps = _gaps(rows[RecordKind.GAP], is_open=full_from is not None and ended.reason is None)
    drops = by_kind["not_kept"].values()
    not_kept = {str(d.get("reason")): str(d.get("text")) for d in drops}  # the latest of a reason
    return RankStream(
        stream=source.stream,
        identity=identity,
        definitions=definitions,
        by_kind=dict(by_kind),
        enters=enters,
        exits=rows[RecordKind.EXIT],
        values=values,
        samples=samples,
        steps=rows[RecordKind.STEP],
        gaps=gaps,
        full_from=full_from,
        errors=rows[RecordKind.ERROR],
        tensors=rows[RecordKind.TENSOR],
        committed=committed,
        origin=origin_of(data[: stream_records.committed_bytes]),
        received=received,
        hidden_bytes=source.hidden_bytes,
        dropped=max(ended.dropped_records, int(gaps["records"].sum())),
        end=ended.reason or source.end or EndReason.RUNNING,
        ended_ns=ended.time_ns,
        raised=_raised(by_kind["raised"]),
        notes=tuple(notes),
        has_set_aside=len(notes) > len(source.notes),
        kept_notes=tuple(not_kept.values()),
    )


def _calls_and_values(
    source: Records, identity: Mapping[str, Any], notes: list[str]
) -> tuple[Array, ValueColumns, Counter[str]]:
    """Return calls, values, and what was set aside for which reason; adds to `notes` where a newer
    rankscope wrote some of them. `identity`: the definition of kind "rank"."""
    begins = source.positions(RecordKind.ENTER)
    enters, left_out = _known_calls(source.rows_at(begins, RecordKind.ENTER))
    values = source.values_at(source.positions(RecordKind.VALUE))
    of_known = KNOWN_PHASES[values["phase"]]
    if len(left_out) or not of_known.all():
        of_known = of_known & ~np.isin(values["sequence"], left_out)
        maker = identity.get("versions", {}).get("rankscope")
        notes.append(
            f"{len(left_out)} calls and {int((~of_known).sum())} values are left out, which are of "
            f"phases or modes that this rankscope does not know: read them with "
            + (f"rankscope {maker}" if maker else "the rankscope that recorded them")
        )
        values = values.chosen(of_known)
    enters, unsound = sound_rows(RecordKind.ENTER, enters)
    is_sound, wrong = sound_mask(RecordKind.VALUE, values)
    unsound += wrong
    if is_sound is not None:
        values = values.chosen(is_sound)
    is_wrong = values.has_digest & ~sound_digests(values)
    if is_wrong.any():
        unsound["digest whose counts contradict each other"] = int(is_wrong.sum())
    is_early = (enters["parent"] != NO_SEQUENCE) & (enters["parent"] >= enters["sequence"])
    if is_early.any():  # a call inside itself would never end
        unsound["place of a call inside one that began later"] = int(is_early.sum())
        enters = enters.copy()  # the bytes of the stream are not ours to change
        enters["parent"][is_early] = NO_SEQUENCE
    sound = values.without_digest(is_wrong)
    columns = {name: sound[name] for name in VALUE_COLUMNS} | {"digested": sound.has_digest}
    return enters, ValueColumns(columns), unsound


def _full_from(stream_records: Records) -> tuple[int, int] | None:
    """Return mode and step with which dropping began, where no call was recorded behind that."""
    positions, rows = stream_records.columns(RecordKind.GAP)
    began = np.flatnonzero((rows["records"] == 0) & (rows["last_step"] == recordformat.TO_ITS_END))
    if not len(began):
        return None
    of_calls = (RecordKind.ENTER, RecordKind.EXIT, RecordKind.VALUE)
    # recorded again behind it: then the next GAP says what was lost
    if np.isin(stream_records.kind[positions[began[-1]] :], of_calls).any():
        return None
    return int(rows["mode"][began[-1]]), int(rows["first_step"][began[-1]])


def _gaps(rows: Array, *, is_open: bool) -> Array:
    """Return what was dropped, and where dropping began if the stream ends before it says more."""
    stays = rows["records"] > 0
    if is_open and len(rows):
        stays[-1] |= rows["last_step"][-1] == recordformat.TO_ITS_END
    return rows if stays.all() else rows[stays]


def _set_aside(noun: str, reasons: Counter[str]) -> Iterator[str]:
    if not reasons:
        return
    count = reasons.total()
    listed = [f"{reason} ({n} times)" if n > 1 else reason for reason, n in reasons.most_common(5)]
    more = len(reasons) - len(listed)
    are = "s are" if count > 1 else " is"
    yield (
        f"{count} {noun}{are} set aside, which no rank writes: "
        + "; ".join([*listed, *([f"{more} more reasons"] if more else [])])
    )


def _known_calls(enters: Array) -> tuple[Array, NDArray[np.uint64]]:
    """Return calls of known phases and modes, and the sequence numbers of all others."""
    is_known = KNOWN_PHASES[enters["phase"]] & KNOWN_MODES[enters["mode"]]
    left_out = enters["sequence"][~is_known]
    # calls inside an unknown one go with it, level by level: their parent would not be there
    while len(left_out):
        inside = is_known & np.isin(enters["parent"], left_out)
        if not inside.any():
            return enters[is_known], left_out
        is_known &= ~inside
        left_out = enters["sequence"][~is_known]
    return enters, left_out


def _raised(definitions: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a rank wrote of the exception that ended its program, on one line each."""
    if not definitions:
        return None
    *_, last = definitions.values()
    causes = last.get("causes")
    return {
        "error": _one_line(last.get("error")),
        "causes": [_one_line(c) for c in causes] if isinstance(causes, (list, tuple)) else [],
        "where": _one_line(last.get("where")),
    }


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())


def definitions_in(
    stream_records: Records, decoded: Decoded
) -> tuple[dict[int, dict[str, Any]], Counter[str]]:
    """Return the definitions by number, and how many were set aside for which reason; `decoded` as
    of `read_stream`."""
    positions = stream_records.positions(RecordKind.DEFINITION)
    raw = stream_records.cells_of(positions)[:, recordformat.HEADER_BYTES :].tobytes()
    definitions: dict[int, dict[str, Any]] = {}
    refused: Counter[str] = Counter()
    ends = np.cumsum(stream_records.size[positions]) * recordformat.PAYLOAD_BYTES
    for payload in [raw[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]:
        # by their bytes: a thousand ranks define the same modules, and each is decoded once
        definition = decoded.get(payload)
        if definition is None:
            try:
                definition = decode_definition(payload)
            except SpoolError as error:
                definition = str(error)
            decoded[payload] = definition
        if isinstance(definition, str):
            refused[definition] += 1
        else:
            definitions[definition["id"]] = definition
    return definitions, refused


def _samples(source: Records) -> tuple[SampleSketches, Counter[str]]:
    """Read all samples records, those of one shape at once; return what was set aside too."""
    positions = source.positions(RecordKind.SAMPLES)
    starts, sizes = source.start[positions], source.size[positions]
    begin, head = recordformat.HEADER_BYTES, recordformat.SAMPLES_DTYPE.itemsize
    packed = np.ascontiguousarray(source.cells.take(starts, axis=0)[:, begin : begin + head])
    heads = packed.view(recordformat.SAMPLES_DTYPE).reshape(-1)
    counts = heads["count"].astype(np.int64)
    ends = head + counts * SKETCH_SIZE * 4
    fits = (heads["size"] == SKETCH_SIZE) & (ends <= sizes * recordformat.PAYLOAD_BYTES)
    wrong = Counter({"SAMPLES of another size than they say": int((~fits).sum())})
    heads, starts, sizes, counts = heads[fits], starts[fits], sizes[fits], counts[fits]
    rows = np.empty((int(counts.sum()), SKETCH_SIZE), np.float32)
    firsts = np.cumsum(counts) - counts
    # those of one shape at once: a loop over the few shapes, none over records
    for size, count in {*zip(sizes.tolist(), counts.tolist())}:
        chosen = np.flatnonzero((sizes == size) & (counts == count))
        cells = source.cells.take(starts[chosen, None] + np.arange(size), axis=0)
        body = np.ascontiguousarray(cells[:, :, begin:]).reshape(len(chosen), -1)
        flat = np.ascontiguousarray(body[:, head : head + count * SKETCH_SIZE * 4])
        numbers = flat.view("<f4").reshape(len(chosen), count, SKETCH_SIZE)
        rows[firsts[chosen, None] + np.arange(count)] = numbers
    return SampleSketches(heads, rows), +wrong
