"""One rank's records as columns: what assembly works on.

A stream is read once: its records become numpy structured arrays of the dtypes in
spool/recordformat.py, in the order they were committed, and its definitions a dict by number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SpoolError, TraceVersionError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.streams import EndReason, StreamId
from rankscope.record.value import SKETCH_SIZE
from rankscope.spool import recordformat
from rankscope.spool.origin import origin_of
from rankscope.spool.recordcolumns import Records, ending, records, step_codes, unpack_map
from rankscope.spool.recordformat import RecordKind

__all__ = [
    "RankStream",
    "SampleSketches",
    "StreamBytes",
    "definitions_in",
    "read_stream",
    "without_steps",
]

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
    """How it ended, as its end marker says; None without a marker."""
    notes: tuple[str, ...] = ()
    """What is wrong with these bytes, for the completeness report."""


@dataclass(frozen=True, slots=True)
class SampleSketches:
    """Per-sample sketches: one head per value, and the rows of all of them behind each other."""

    heads: Array
    """SAMPLES_DTYPE, [heads]."""
    rows: NDArray[np.float32]
    """[sum of counts, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """Everything one rank recorded in one incarnation, as columns."""

    stream: StreamId
    identity: dict[str, Any]
    """The definition of kind "rank"; {} where not even that arrived."""
    definitions: dict[int, dict[str, Any]]
    enters: Array
    exits: Array
    values: Array
    """VALUE_DTYPE; the digest fields are 0 where has_digest is False."""
    has_digest: NDArray[np.bool_]
    samples: SampleSketches
    steps: Array
    gaps: Array
    errors: Array
    tensors: Array
    """TENSOR_DTYPE, in the order they were committed."""
    committed: int | None
    origin: int
    """Which process wrote it (`spool.origin`), 0 where nothing arrived."""
    received: int
    """Valid bytes of the stream: those at hand, and those let go once their step was written."""
    hidden_bytes: int = 0
    """The latter."""
    dropped: int
    end: EndReason
    raised: dict[str, Any] | None = None
    """The exception that ended the program: error, causes, where; None where none is known."""
    notes: tuple[str, ...] = ()
    kept_notes: tuple[str, ...] = ()
    """What was not kept of the full tensors that were asked for, and what became of the chunks."""

    @property
    def clock_offset_ns(self) -> int:
        """What to add to this rank's time_ns to get wall-clock time."""
        return int(self.identity.get("wall_ns", 0)) - int(self.identity.get("monotonic_ns", 0))

    @property
    def record_count(self) -> int:
        """Records that make up calls and values."""
        return len(self.enters) + len(self.exits) + len(self.values) + len(self.samples.heads)


def read_stream(
    source: StreamBytes, decoded: dict[bytes, dict[str, Any] | None] | None = None
) -> RankStream:
    """Return the records of one stream; what follows the first damaged cell is left out.

    Args:
        source: the bytes.
        decoded: definitions already decoded, by their bytes, filled here: ranks of one job define
            mostly the same, and then share the same dicts.

    Raises:
        TraceVersionError: the rank wrote a newer record format than this reader knows.
    """
    data = source.data if isinstance(source.data, bytes) else source.data.view(np.ndarray)
    found = records(data, is_verified=source.is_verified)
    definitions, rejected = definitions_in(found, {} if decoded is None else decoded)
    identity = next((d for d in definitions.values() if d["kind"] == "rank"), {})
    version = identity.get("format", recordformat.FORMAT_VERSION)
    if isinstance(version, int) and version > recordformat.FORMAT_VERSION:
        raise TraceVersionError(
            f"rank {source.stream.rank} wrote records of format {version}, this rankscope reads up "
            f"to {recordformat.FORMAT_VERSION}: use the version that made the trace, or a newer one"
        )
    _, values, has_digest = found.values()
    ended = ending(found)
    gaps = found.columns(RecordKind.GAP)[1]
    enters, left_out = _known_calls(found.columns(RecordKind.ENTER)[1])
    if len(left_out) or not _IS_PHASE[values["phase"]].all():
        of_known = _IS_PHASE[values["phase"]] & ~np.isin(values["sequence"], left_out)
        maker = dict(identity.get("versions") or {}).get("rankscope")
        rejected.append(
            f"{len(left_out)} calls and {int((~of_known).sum())} values are left out, which are of "
            f"phases or modes that this rankscope does not know: read them with "
            + (f"rankscope {maker}" if maker else "the rankscope that recorded them")
        )
        values, has_digest = values[of_known], has_digest[of_known]
    received = found.committed_bytes + source.hidden_bytes
    committed = source.committed
    if committed is None and ended.reason is not None:
        committed = received
    return RankStream(
        stream=source.stream,
        identity=identity,
        definitions=definitions,
        enters=enters,
        exits=found.columns(RecordKind.EXIT)[1],
        values=values,
        has_digest=has_digest,
        samples=_samples(found),
        steps=_of_known_modes(found.columns(RecordKind.STEP)[1]),
        gaps=_of_known_modes(gaps),
        errors=found.columns(RecordKind.ERROR)[1],
        tensors=found.columns(RecordKind.TENSOR)[1],
        committed=committed,
        origin=origin_of(data[: found.committed_bytes]),
        received=received,
        hidden_bytes=source.hidden_bytes,
        dropped=max(ended.dropped_records, int(gaps["records"].sum())),
        end=ended.reason or source.end or EndReason.RUNNING,
        raised=_raised(definitions),
        notes=(*source.notes, *rejected),
        kept_notes=_not_kept(definitions),
    )


_NUMBERS = np.arange(256)
_IS_PHASE = np.isin(_NUMBERS, [int(phase) for phase in Phase])
_IS_MODE = np.isin(_NUMBERS, [int(mode) for mode in Mode])
"""By number: a newer rankscope may have added more."""


def _known_calls(enters: Array) -> tuple[Array, NDArray[np.uint64]]:
    """Return the calls of known phases and modes, and the sequence numbers of all others, of those
    inside them too."""
    is_known = _IS_PHASE[enters["phase"]] & _IS_MODE[enters["mode"]]
    left_out = enters["sequence"][~is_known]
    while len(left_out):
        inside = is_known & np.isin(enters["parent"], left_out)
        if not inside.any():
            return enters[is_known], left_out
        is_known &= ~inside
        left_out = enters["sequence"][~is_known]
    return enters, left_out


def _of_known_modes(rows: Array) -> Array:
    is_known = _IS_MODE[rows["mode"]]
    return rows if is_known.all() else rows[is_known]


def _raised(definitions: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a rank wrote of the exception that ended its program, on one line each."""
    found = [d for d in definitions.values() if d["kind"] == "raised"]
    if not found:
        return None
    causes = found[-1].get("causes")
    return {
        "error": _one_line(found[-1].get("error")),
        "causes": [_one_line(c) for c in causes] if isinstance(causes, (list, tuple)) else [],
        "where": _one_line(found[-1].get("where")),
    }


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())


def _not_kept(definitions: dict[int, dict[str, Any]]) -> tuple[str, ...]:
    """Return what a rank noted of tensors it did not keep, the latest for each reason."""
    latest = {
        str(d.get("reason")): str(d.get("text"))
        for d in definitions.values()
        if d["kind"] == "not_kept"
    }
    return tuple(latest.values())


def definitions_in(
    found: Records, decoded: dict[bytes, dict[str, Any] | None]
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the definitions by number, and a line for those that cannot be read.

    Args:
        found: records.
        decoded: as of `read_stream`.
    """
    positions = found.positions(RecordKind.DEFINITION)
    raw = found.cells_of(positions).tobytes()
    definitions: dict[int, dict[str, Any]] = {}
    rejected: list[str] = []
    ends = np.cumsum(found.size[positions]) * recordformat.CELL_BYTES
    for packed in [raw[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]:
        if packed not in decoded:
            try:
                decoded[packed] = _decode(packed)
            except SpoolError as error:
                decoded[packed] = None
                rejected.append(f"a definition cannot be read: {error}")
        definition = decoded[packed]
        if definition is not None:
            definitions[definition["id"]] = definition
    return definitions, rejected


def _decode(packed: bytes) -> dict[str, Any]:
    """Return the map in the cells of one definition.

    Raises:
        SpoolError: it is no msgpack map with a number `id` and a text `kind`.
    """
    step, head = recordformat.CELL_BYTES, recordformat.HEADER_BYTES
    payload = b"".join(packed[at + head : at + step] for at in range(0, len(packed), step))
    (length,) = recordformat.DEFINITION_LENGTH.unpack_from(payload)
    start = recordformat.DEFINITION_LENGTH.size
    if not 0 < length <= len(payload) - start:
        raise SpoolError(f"length {length} in a record of {len(payload)} bytes")
    definition = unpack_map(payload[start : start + length])
    number, kind = definition.get("id"), definition.get("kind")
    if type(number) is not int or number < 1 or not isinstance(kind, str):
        raise SpoolError(f"id {number!r} and kind {kind!r} are not a number and a text")
    return definition


def _samples(found: Records) -> SampleSketches:
    """Read all samples records at once, those of one shape together: there may be one per value."""
    positions = found.positions(RecordKind.SAMPLES)
    starts, sizes = found.start[positions], found.size[positions]
    head = recordformat.SAMPLES_DTYPE.itemsize
    packed = np.ascontiguousarray(
        found.cells.take(starts, axis=0)[
            :, recordformat.HEADER_BYTES : recordformat.HEADER_BYTES + head
        ]
    )
    heads = packed.view(recordformat.SAMPLES_DTYPE).reshape(-1)
    counts = heads["count"].astype(np.int64)
    fits = (heads["size"] == SKETCH_SIZE) & (
        head + counts * SKETCH_SIZE * 4 <= sizes * recordformat.PAYLOAD_BYTES
    )
    heads, starts, sizes, counts = heads[fits], starts[fits], sizes[fits], counts[fits]
    rows = np.empty((int(counts.sum()), SKETCH_SIZE), np.float32)
    firsts = np.cumsum(counts) - counts
    for size, count in {*zip(sizes.tolist(), counts.tolist())}:
        chosen = np.flatnonzero((sizes == size) & (counts == count))
        body = found.cells.take(starts[chosen, None] + np.arange(size), axis=0)[
            :, :, recordformat.HEADER_BYTES :
        ]
        flat = np.ascontiguousarray(body).reshape(len(chosen), -1)[
            :, head : head + count * SKETCH_SIZE * 4
        ]
        where = firsts[chosen, None] + np.arange(count)
        rows[where] = (
            np.ascontiguousarray(flat).view("<f4").reshape(len(chosen), count, SKETCH_SIZE)
        )
    return SampleSketches(heads, rows)


def without_steps(stream: RankStream, codes: NDArray[np.int64]) -> RankStream:
    """Return a stream without the records of some steps; setup stays.

    Args:
        stream: its records.
        codes: of these steps (`step_codes`), [steps].
    """
    if not len(codes):
        return stream
    is_gone = np.isin(step_codes(stream.enters["mode"], stream.enters["step"]), codes)
    is_gone &= stream.enters["phase"] != int(Phase.SETUP)
    gone = stream.enters["sequence"][is_gone]
    has_value = ~np.isin(stream.values["sequence"], gone)
    is_gone_step = np.isin(step_codes(stream.steps["mode"], stream.steps["step"]), codes)
    return replace(
        stream,
        enters=stream.enters[~is_gone],
        exits=_without(stream.exits, gone),
        values=stream.values[has_value],
        has_digest=stream.has_digest[has_value],
        samples=_samples_without(stream.samples, gone),
        errors=_without(stream.errors, gone),
        steps=stream.steps[~is_gone_step],
    )


def _without(rows: Array, gone: Array) -> Array:
    return rows[~np.isin(rows["sequence"], gone)]


def _samples_without(samples: SampleSketches, gone: Array) -> SampleSketches:
    stays = ~np.isin(samples.heads["sequence"], gone)
    if stays.all():
        return samples
    return SampleSketches(
        samples.heads[stays], samples.rows[np.repeat(stays, samples.heads["count"])]
    )
