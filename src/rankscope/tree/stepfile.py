"""Files of whole steps: safetensors, a tensor for each column, read by mapping.

    steps/000007.safetensors    columns of some steps, and the texts that their rows name

The entry of a step in trace.json, or in the index while the job runs, says where its rows lie in
the tables of its file. Columns have fixed names; nothing a model is called ever becomes one.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import TraceError
from rankscope.record.call import Mode
from rankscope.record.ranks import MAX_RANKS
from rankscope.record.statistics import ADDED
from rankscope.record.stepcolumns import COLUMNS, Column
from rankscope.run.folders import STEPS_FOLDER, STEPS_FORMAT
from rankscope.spool.chunks.safetensors import MappedFile, as_array, parse_entries, write_arrays
from rankscope.tree.step import StepColumns, StepHead, StepTexts
from rankscope.tree.tracejson import UNREADABLE, damage

_UNCHECKED = {"format": "rankscope.values/1"}
"""All that was said of a file before it had a checksum."""
_WIDTHS = {name: column.width for name, column in COLUMNS.items() if column.width > 1}
_KINDS = {name: np.dtype(column.dtype).kind for name, column in COLUMNS.items()} | dict.fromkeys(
    ("values.node", "calls.node", "values.slot", "values.chunk", "values.incarnation"), "iu"
)
"""Kind of number of each column, as numpy calls it; formats 1 and 2 had ids in place of rows."""
Array = NDArray[Any]


class FileColumns(dict[str, Array]):
    """The columns of one file; to ask for one that it lacks is an error of the file."""

    def __init__(self, file: Path, columns: Iterable[tuple[str, Array]] = ()) -> None:
        super().__init__(columns)
        self.file = file

    def __missing__(self, name: str) -> Array:
        raise TraceError(f"{self.file}: has no column {name}: the file is damaged")


def map_columns(
    path: Path, world_size: int = MAX_RANKS, *, is_checked: bool = False
) -> dict[str, Array]:
    """Return every column of a values file, mapped and not copied; with `is_checked` all of it is
    read, and held to the checksum in its header. No rank is as high as `world_size`. TraceError:
    the file is missing, or no safetensors file whose header fits its size, or its columns do not
    fit each other, or it was changed; asking for a column that is not there raises it too."""
    file, columns = MappedFile(path, TraceError), FileColumns(path)
    try:
        about, entries = parse_entries(file.header, len(file.data))
        for name, dtype, shape, begin, end in entries:
            columns[name] = as_array(file.data[begin:end], dtype, shape)
        check_columns(columns, world_size)
    except (TraceError, ValueError) as error:
        raise TraceError(
            f"{path}: a column does not fit the file ({error}): the file is damaged"
        ) from error
    if is_checked and about != _UNCHECKED and not file.is_unchanged(about):
        raise TraceError(f"{path}: was changed since it was written: the file is damaged")
    for name in (f"values.{statistic.name}" for statistic in ADDED):
        if name not in columns and "values.rank" in columns:  # written before there was such a one
            columns[name] = np.broadcast_to(np.float64(np.nan), columns["values.rank"].shape)
    return columns


def filled(column: Column, rows: int, number: float = 0) -> Array:
    """Return rows of a column that all hold one number."""
    shape = (rows,) if column.width == 1 else (rows, column.width)
    return np.broadcast_to(np.array(number, column.dtype), shape)


def check_columns(columns: Mapping[str, Array], world_size: int) -> None:
    """Refuse, with ValueError, columns of another kind or shape than their name says, columns of
    one table that have other rows than each other, and ranks that are not below `world_size`."""
    rows: dict[str, int] = {}
    for name, column in columns.items():
        width = [_WIDTHS[name]] if name in _WIDTHS else []
        if column.ndim < 1 or (name in _KINDS and [*column.shape[1:]] != width):
            raise ValueError(f"{name} has another shape than a column of its name")
        if name in _KINDS and column.dtype.kind not in _KINDS[name]:
            raise ValueError(f"{name} is of {column.dtype.name}")
        if rows.setdefault(name.partition(".")[0], len(column)) != len(column):
            raise ValueError(f"{name} has {len(column)} rows, and columns beside it have others")
    for name in ("values.rank", "calls.rank"):
        ranks = columns[name] if name in columns else np.empty(0, np.int32)
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < world_size:
            raise ValueError(f"{name} is outside a world of {world_size}")


Entry = Mapping[str, Any]
_OF_STEPS: Final = ("nodes", "calls", "values", "samples", "failures")
_FIRST_FORMAT: Final = 1
MOST_OPEN: Final = 64
"""Files mapped at a time; each takes a file descriptor."""
_FILE: Final = re.compile(rf"{STEPS_FOLDER}/\d{{6,}}\.safetensors")


def write_steps(
    folder: Path, number: int, steps: Sequence[StepColumns], *, is_synced: bool = True
) -> list[dict[str, Any]]:
    """Write steps into one file, under another name until it is whole; return their entries. The
    steps share their texts, or there is one. OSError: it cannot be written."""
    name = f"{STEPS_FOLDER}/{number:06d}.safetensors"
    texts = _used_texts(steps)
    lengths: dict[str, list[int]] = {}

    def whole(column: Column) -> Array:
        parts = [step.once(column.name) for step in steps]
        lengths[column.table] = [len(part) for part in parts]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if column.is_text:  # the numbers that texts have in the file
            # a file has the texts that its rows name, and no others: their numbers are those of
            # this file
            rows = np.where(rows >= 0, np.searchsorted(texts, rows), -1)
        return rows.astype(column.dtype, copy=False)

    makers: dict[str, Callable[[], Array]] = {
        column.name: functools.partial(whole, column)
        for column in COLUMNS.values()
        if column.table in _OF_STEPS
    }
    ends, utf8 = _joined(steps[0].texts, texts)
    makers |= {"texts.end": lambda: ends, "utf8.byte": lambda: utf8}
    # widest first: a mapped column is aligned only where all columns before it are at least as wide
    widest = sorted(makers, key=lambda key: -np.dtype(COLUMNS[key].dtype).itemsize)
    write_arrays(
        folder / name,
        {key: makers[key] for key in widest},
        {"format": STEPS_FORMAT},
        is_synced=is_synced,
    )
    ends_of = {table: [0, *itertools.accumulate(lengths[table])] for table in _OF_STEPS}
    return [
        entry_of(step.head)
        | {"file": name, "rows": {table: ends_of[table][i : i + 2] for table in _OF_STEPS}}
        for i, step in enumerate(steps)
    ]


def entry_of(head: StepHead) -> dict[str, Any]:
    """Return what says which step it is, and what ranks noted of it."""
    fields: dict[str, Any] = {"incarnation": head.incarnation}
    if not head.is_setup:
        fields = {"mode": head.mode.word, "step": head.step, **fields}
    return fields | ({"notes": list(head.notes)} if head.notes else {})


def head_of(entry: Entry) -> StepHead | None:
    """Return the head of an entry; None for a newer mode. KeyError, TypeError, ValueError:
    damaged."""
    word = str(entry.get("mode", Mode.TRAIN.word))
    if word.upper() not in Mode.__members__:
        return None
    return StepHead(
        is_setup="mode" not in entry,
        mode=Mode[word.upper()],
        step=int(entry["step"]) if "mode" in entry else 0,
        incarnation=int(entry["incarnation"]),
        notes=tuple(entry.get("notes", ())),
    )


def known_entries(entries: Sequence[Entry]) -> tuple[list[tuple[StepHead, Entry]], frozenset[str]]:
    """Return entries with heads, and the names of newer modes; errors as of `head_of`."""
    read = [(head_of(entry), entry) for entry in entries]
    newer = frozenset(f"mode {entry['mode']!r}" for head, entry in read if head is None)
    return [(head, entry) for head, entry in read if head is not None], newer


class StepFiles:
    """The step files of one trace folder, mapped when they are asked for."""

    def __init__(self, folder: Path, world_size: int) -> None:
        """Open none yet; `world_size`: no rank is as high."""
        self._folder, self._world_size = folder, world_size
        self._file = functools.lru_cache(MOST_OPEN)(functools.partial(_opened, world_size))

    def path(self, entry: Entry) -> Path:
        """Return the file of a step; TraceError: a name that no trace has."""
        name = str(entry["file"])
        if not _FILE.fullmatch(name):
            raise TraceError(f"{self._folder}: {name!r} is not a step file: the trace is damaged")
        return self._folder / name

    def step(self, entry: Entry, head: StepHead, began_ns: int) -> StepColumns:
        """Return the step of an entry; TraceError: the file is damaged, or not there."""
        path = self.path(entry)
        columns, texts = self._file(path)
        try:
            step_columns = {}
            for column in COLUMNS.values():
                if column.table in _OF_STEPS:
                    begin, end = entry["rows"][column.table]
                    stored = columns.get(column.name)
                    if stored is None:
                        if column.since <= _FIRST_FORMAT:  # every file has it
                            raise KeyError(column.name)
                        stored = filled(column, end, column.missing)
                    # numpy cuts a slice that is too long without a word: the step would be shorter
                    # than it says
                    if not 0 <= begin <= end <= len(stored):
                        raise ValueError(f"rows {begin} to {end} of {len(stored)} of {column.name}")
                    step_columns[column.name] = stored[begin:end].view(
                        np.ndarray
                    )  # faster than a map
            step = StepColumns(head=head, columns=step_columns, texts=texts, began_ns=began_ns)
            _check(step, self._world_size)
        except UNREADABLE as error:
            raise damage(path, error) from error
        return step

    def faults(self, entries: Sequence[Entry]) -> Iterator[str]:
        """Read the files of steps from begin to end, and yield what is wrong with each."""
        sound: set[Path] = set()
        for entry in entries:
            try:
                path = self.path(entry)
                if path not in sound:
                    # a file once, however many steps lie in it: its checksum is of all its bytes
                    map_columns(path, self._world_size, is_checked=True)
                    sound.add(path)
                if (head := head_of(entry)) is not None:
                    self.step(entry, head, 0)
            except TraceError as error:
                yield str(error)


def _opened(world_size: int, path: Path) -> tuple[Mapping[str, Array], StepTexts]:
    columns = map_columns(path, world_size)
    return columns, StepTexts(_FileTexts(columns["texts.end"], columns["utf8.byte"]), path)


class _FileTexts(Sequence[object]):
    """The texts of a file, each decoded when it is asked for."""

    def __init__(self, ends: Array, utf8: Array) -> None:
        self._ends: list[int] = [0, *ends.tolist()]
        self._utf8 = utf8
        self._known: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> str:
        text = self._known.get(number)
        if text is None:
            begin, end = self._ends[number : number + 2]
            if not 0 <= begin <= end <= len(self._utf8):
                raise ValueError(f"text {number} is not in the {len(self._utf8)} bytes of texts")
            raw = self._utf8[begin:end].tobytes()
            text = self._known[number] = raw.decode(errors="surrogatepass")
        return text


def _used_texts(steps: Sequence[StepColumns]) -> Array:
    """Return the numbers of the texts that rows name, sorted."""
    used = np.zeros(len(steps[0].texts), np.bool_)
    for step in steps:
        for name in (column.name for column in COLUMNS.values() if column.is_text):
            numbers = step[name]
            used[numbers[numbers >= 0]] = True
    return np.flatnonzero(used)


def _joined(texts: StepTexts, numbers: Array) -> tuple[Array, Array]:
    """Return where each text ends, and the bytes of all."""
    data = [texts.text(number).encode(errors="surrogatepass") for number in numbers.tolist()]
    ends = np.cumsum([len(text_bytes) for text_bytes in data], dtype=np.int64)
    return ends, np.frombuffer(b"".join(data), np.uint8)


def _check(step: StepColumns, world_size: int) -> None:
    """Refuse, with ValueError or KeyError, rows that name missing rows, texts or ranks."""
    nodes, texts = len(step["nodes.id"]), len(step.texts)
    parent = step["nodes.parent"]
    # parents first is what lets readers go through the rows once, and proves that no node is inside
    # itself
    if ((parent < -1) | (parent >= np.arange(nodes))).any():
        raise ValueError("a node is inside one that comes behind it")
    for table in ("calls", "values", "failures"):
        node, ranks = step[f"{table}.node"], step[f"{table}.rank"]
        if len(node) and not (node[0] >= 0 and node[-1] < nodes and (node[1:] >= node[:-1]).all()):
            raise ValueError(f"{table}.node names nodes that are not there, or in another order")
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < world_size:
            raise ValueError(f"{table}.rank is outside a world of {world_size}")
    if len(np.unique(step["calls.node"])) != nodes:
        raise ValueError("a node has no call")
    for column in COLUMNS.values():
        if column.is_text and len(step[column.name]):
            text_numbers = step[column.name]
            if not column.least <= int(text_numbers.min()) <= int(text_numbers.max()) < texts:
                raise ValueError(f"{column.name} names texts that are not there")
    first, count = step["values.sample_row"], step["values.sample_count"]
    has_any = first >= 0
    if (first[has_any] + count[has_any] > len(step["samples.sketch"])).any() or (
        count[has_any] < 0
    ).any():
        raise ValueError("values.sample_row names samples that are not there")
