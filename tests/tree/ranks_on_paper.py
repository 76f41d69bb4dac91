"""Ranks that never ran: real streams, written by the real spool writer, of values made with
numpy."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from rankscope.layout.placement import Mesh, global_ranges, parse_placement
from rankscope.record.call import CallStatus, Mode
from rankscope.record.notes import Note
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.sketchfactors import factors
from rankscope.spool import recordformat
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import RecordKind, StepEvent
from rankscope.spool.writer import SpoolWriter

MODES = {"train": Mode.TRAIN, "eval": Mode.EVAL}
Box = tuple[tuple[tuple[int, int], ...], ...]


def take(whole: np.ndarray, box: Box) -> np.ndarray:
    """The piece of a tensor that a rank with these index ranges holds."""
    piece = whole
    for dim, ranges in enumerate(box):
        index = np.concatenate([np.arange(a, b) for a, b in ranges]) if ranges else np.empty(0, int)
        piece = np.take(piece, index.astype(int), axis=dim)
    return piece


def sketch(piece: np.ndarray, box: Box | None = None) -> np.ndarray:
    """[8] sketch of a piece at its place in the whole tensor."""
    if piece.ndim == 0:
        piece, box = piece.reshape(1), None
    box = box or tuple(((0, n),) for n in piece.shape)
    if not piece.size:
        return np.zeros(8)
    weighted = np.where(np.isfinite(piece), piece, 0).astype(np.float64)[None]
    for dim, ranges in enumerate(box):
        shape = [8] + [1] * piece.ndim
        shape[dim + 1] = -1
        weighted = weighted * factors(dim, tuple(ranges)).astype(np.float64).reshape(shape)
    return weighted.reshape(8, -1).sum(1)


_as_key = json.JSONEncoder(sort_keys=True).encode
_digests: dict[object, dict[str, Any]] = {}
"""Of pieces that were written before: replicas hold the same, and jobs on paper have many."""


def digest(piece: np.ndarray, box: Box | None = None) -> dict[str, Any]:
    """What a rank would have recorded of this piece."""
    key = piece.dtype.str, piece.shape, piece.tobytes(), repr(box)
    if key not in _digests:
        if len(_digests) > 1 << 12:
            _digests.clear()
        _digests[key] = _digest(piece, box)
    return _digests[key]


def _digest(piece: np.ndarray, box: Box | None) -> dict[str, Any]:
    flat = np.asarray(piece, np.float64).reshape(-1)
    finite = flat[np.isfinite(flat)]
    canonical = np.where(np.isnan(piece), np.float32(np.nan), piece + np.float32(0.0))
    return {
        "count": flat.size,
        "hash": xxhash.xxh3_64_intdigest(np.ascontiguousarray(canonical).tobytes()),
        "nan": int(np.isnan(flat).sum()),
        "posinf": int(np.isposinf(flat).sum()),
        "neginf": int(np.isneginf(flat).sum()),
        "zero": int((flat == 0).sum()),
        "min": finite.min() if finite.size else math.nan,
        "max": finite.max() if finite.size else math.nan,
        "mean": finite.mean() if finite.size else math.nan,
        "std": finite.std(ddof=1) if finite.size > 1 else math.nan,
        "l2": float(np.sqrt((finite**2).sum())),
        "sketch": tuple(sketch(np.asarray(piece), box).tolist()),
    }


class PaperRank:
    """One rank's pen. Times tick by a microsecond a record."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        incarnation: int = 0,
        host: str = "h0",
        run_id: str = "run-1",
        clock: int = 0,
        segment_bytes: int = 1 << 20,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.stream = StreamId(rank=rank, incarnation=incarnation)
        self.folder = folder / self.stream.name
        self.writer = SpoolWriter(self.folder, limit_bytes=64 << 20, segment_bytes=segment_bytes)
        self.rank = rank
        self._numbers, self._sequence = itertools.count(1), itertools.count()
        self._known: dict[str, int] = {}
        self._time = 1_000_000 + clock
        self._stack: list[tuple[int, str, str, int, int | None]] = []
        self._ordinals: dict[Any, int] = {}
        who: dict[str, Any] = {
            "format": recordformat.FORMAT_VERSION,
            "run_id": run_id,
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "local_world_size": world_size,
            "incarnation": incarnation,
            "host": host,
            "pid": 100 + rank,
            "wall_ns": 1_700_000_000_001_000_000,
            "monotonic_ns": 1_000_000,
            "versions": {"torch": "2.13.0"},
            "argv": ["train.py", "--lr", "1"],
            "settings": {"steps": "0-2"},
            "environment": {},
        }
        self.define("rank", **who | (identity or {}))

    def now(self) -> int:
        self._time += 1000
        return self._time

    def define(self, kind: str, **fields: Any) -> int:
        number = next(self._numbers)
        self.writer.define(msgpack.packb({"id": number, "kind": kind, **fields}))
        return number

    def known(self, kind: str, **fields: Any) -> int:
        key = _as_key([kind, fields])
        if key not in self._known:
            self._known[key] = self.define(kind, **fields)
        return self._known[key]

    def root(self, class_name: str = "Model", parameters: int = 100) -> int:
        return self.known(
            "root", **{"class": class_name}, parameters=parameters, has_parameters=True
        )

    def enter(
        self,
        path: str = "",
        *,
        class_name: str = "Module",
        root: int | None = None,
        phase: Phase = Phase.FORWARD,
        mode: str = "train",
        step: int = 0,
        micro_batch: int | None = 0,
        ordinal: int | None = None,
        raw_path: str | None = None,
        parent: int | None = None,
        **more: Any,
    ) -> int:
        root = self.root() if root is None else root
        module = self.known(
            "module",
            root=root,
            path=path,
            raw_path=raw_path or path,
            **{"class": class_name},
            wrappers=more.get("wrappers", []),
            opaque=more.get("opaque", False),
        )
        if parent is None and self._stack:
            parent = self._stack[-1][0]
        key = (mode, step, micro_batch, phase, root, path)
        if ordinal is None:
            ordinal = self._ordinals.get(key, 0)
        self._ordinals[key] = ordinal + 1
        sequence = next(self._sequence)
        self.writer.write(
            RecordKind.ENTER,
            recordformat.ENTER.pack(
                sequence,
                recordformat.NO_SEQUENCE if parent is None else parent,
                self.now(),
                module,
                step,
                recordformat.NO_MICRO_BATCH if micro_batch is None else micro_batch,
                ordinal,
                phase,
                MODES[mode],
                1,
                root,
                0,
                0,
            ),
        )
        return sequence

    def exit(
        self, sequence: int, status: CallStatus = CallStatus.RETURNED, error: str = ""
    ) -> None:
        text = self.known("text", text=error) if error else 0
        self.writer.write(
            RecordKind.EXIT, recordformat.EXIT.pack(sequence, self.now(), text, status, 0)
        )

    @contextmanager
    def call(self, path: str = "", **how: Any) -> Iterator[int]:
        sequence = self.enter(path, **how)
        self._stack.append((sequence, path, "", 0, 0))
        yield sequence
        self._stack.pop()
        self.exit(sequence)

    def value(
        self,
        sequence: int,
        slot: str,
        piece: np.ndarray | None,
        *,
        phase: Phase = Phase.FORWARD,
        ordinal: int = 0,
        flags: int = 0,
        mesh: Mesh | None = None,
        placements: Sequence[str] = (),
        whole: Sequence[int] | None = None,
        samples: bool = False,
        note: str | None = None,
        dtype: str = "float32",
        box: Box | None = None,
        source: str | None = None,
        requires_grad: bool = False,
        reference: int = 0,
    ) -> None:
        number = 0
        if mesh is not None:
            number = self.known(
                "mesh", axes=mesh.axes, shape=mesh.shape, ranks=mesh.ranks, device="cpu"
            )
            at = mesh.coordinate(self.rank)
            assert at is not None
            if box is None and whole is not None:
                box = global_ranges(whole, mesh.shape, at, [parse_placement(p) for p in placements])
        meta = self.known(
            "meta",
            dtype=dtype,
            device="cpu",
            shape=list(piece.shape) if piece is not None else [],
            global_shape=None if whole is None else list(whole),
            source=source or ("dtensor" if mesh else "unknown"),
            mesh=number,
            placements=list(placements),
            ranges=box,
            note=note,
            requires_grad=requires_grad,
        )
        name = self.known("slot", name=slot)
        if piece is None:
            head = recordformat.VALUE_HEAD.pack(
                sequence, self.now(), name, meta, flags, phase, ordinal, 0, 0, 0
            )
            self.writer.write(RecordKind.VALUE, head)
            return
        d = digest(piece, box)
        self.writer.write(
            RecordKind.VALUE,
            recordformat.VALUE.pack(
                sequence,
                self.now(),
                name,
                meta,
                flags | (256 if samples else 0),
                phase,
                ordinal,
                d["count"],
                d["hash"],
                reference,
                d["nan"],
                d["posinf"],
                d["neginf"],
                d["zero"],
                d["min"],
                d["max"],
                d["mean"],
                d["std"],
                d["l2"],
                *d["sketch"],
            ),
        )
        if samples:
            rows = np.arange(len(piece) * 8, dtype=np.float32) + piece.reshape(-1)[0]
            head = recordformat.SAMPLES.pack(
                sequence, name, ordinal, phase, len(piece), 8, 0, 0, 0, 0
            )
            self.writer.write(RecordKind.SAMPLES, head + rows.tobytes())

    def step(self, event: StepEvent, step: int, mode: str = "train", note: Note | str = "") -> None:
        text = self.said(note) if note else 0
        self.writer.write(
            RecordKind.STEP, recordformat.STEP.pack(self.now(), step, MODES[mode], event, text)
        )

    def said(self, note: Note | str) -> int:
        """A note with its fact, or a sentence alone, as ranks wrote before there were facts."""
        fact = {"fact": note.fact} if isinstance(note, Note) else {}
        return self.known("text", text=str(note), **fact)

    def error(self, sequence: int | None, text: Note | str) -> None:
        number = recordformat.NO_SEQUENCE if sequence is None else sequence
        packed = recordformat.ERROR.pack(number, self.now(), self.said(text), 0)
        self.writer.write(RecordKind.ERROR, packed)

    def gap(self, records: int, first: int, last: int, mode: str = "train") -> None:
        bounds = first, last, MODES[mode]
        packed = recordformat.GAP.pack(self.now(), records, records * 64, *bounds)
        self.writer.write(RecordKind.GAP, packed)

    def end(self, reason: EndReason = EndReason.EXIT) -> None:
        self.writer.close(reason)

    def ship(self, out: Path, *, cut: int = 0, marker: bool = True, end: str | None = None) -> Path:
        """Copy the stream into a trace folder as its replica, without the last `cut` bytes."""
        data = b"".join(StreamReader(self.folder).chunks())
        spool = out / "spool"
        spool.mkdir(parents=True, exist_ok=True)
        replica = spool / f"{self.stream.name}.cells"
        replica.write_bytes(data[: len(data) - cut])
        if marker:
            fields = {
                "committed": len(data),
                "end": end or ("exit" if self.writer.is_closed else "lost"),
            }
            replica.with_suffix(".json").write_text(json.dumps(fields))
        return replica
