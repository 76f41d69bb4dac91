"""What a module debugger wrote, ours or that of transformers, as a trace of one rank: two of them
are compared as any two traces are.

Every tree is written down as a rank would have recorded that forward, one eval step each, and
assembled as records of ranks are. A tensor that has a file has its digest, and its bytes are found
there. Of one that was printed shape, dtype, mean, std, min and max are known, to the digits that
stand there: it has no sketch. What may be one rank's part of a sharded tensor is not digested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described, Describer
from rankscope.capture.digest import Digester
from rankscope.capture.measuring import ValueNumbers
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.compat.debugger.kept import tensor_of
from rankscope.compat.debugger.treefiles import trees_in
from rankscope.errors import TraceError
from rankscope.layout.placement import Layout, LayoutSource
from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.value import SKETCH_SIZE, ValueMeta
from rankscope.run.folders import Progress
from rankscope.spool.chunks.safetensors import MappedFile, parse_entries
from rankscope.spool.chunks.tensorfiles import StoredTensor, TensorFiles
from rankscope.spool.chunks.writing import ChunkEntry
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import FORMAT_VERSION, StepEvent
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.rankstreams import StreamBytes
from rankscope.tree.build import assemble
from rankscope.tree.growingtree import WrittenSteps
from rankscope.tree.tracejson import UNREADABLE
from rankscope.tree.views import Trace

_STREAM: Final = StreamId(rank=0, incarnation=0)
_MOST_BYTES: Final = 1 << 40
_STATISTICS: Final = ("min", "max", "mean", "std")
_NUMBER: Final = re.compile(r"tensor\(\s*(nan|-?inf|-?(\d+\.\d*)(?:e[+-]\d+)?)")
_AGAIN: Final = "copy the whole folder again, or let the debugger write it again"
_UNKNOWN: Final = (math.nan,) * SKETCH_SIZE
_PART: Final = "it is one rank's part of a sharded tensor, or may be"
_PRINTED: Final = "it was printed"
_xxh3: Final[Any] = xxhash.xxh3_64_intdigest  # the stubs do not know that arrays are buffers


def trace_of_files(source: Path, progress: Progress, *, takes_printed: bool = True) -> Trace:
    """Return the forwards of one model that a debugger wrote into a folder, or the one in a file
    (`*_FULL_TENSORS.json`). `takes_printed`: also of printed numbers, beside what has bytes.

    Raises:
        FolderError: the folder holds files of several models or ranks.
        TraceError: a tree is damaged, or a file that it names is.
    """
    files = trees_in(source)
    tensors, ends = _NamedFiles(files[0].parent), set[EndReason]()
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-") as place,
        contextlib.closing(SpoolWriter(Path(place, "0"), limit_bytes=_MOST_BYTES)) as writer,
    ):
        recorder = Recorder(writer)
        records = _ForwardRecords(recorder, tensors, takes_printed=takes_printed)
        for step, file in enumerate(files):
            progress("reading the debugger's files", step / len(files))
            ends.add(records.forward(step, file))
        recorder.define(
            "rank", format=FORMAT_VERSION, run_id=str(source), rank=_STREAM.rank, world_size=1,
            settings={"printed-digits": str(records.digits)} if records.digits else {},
        )  # fmt: skip
        end = EndReason.RAISED if EndReason.RAISED in ends else EndReason.CLOSED
        writer.close(end)
        with StreamReader(writer.folder) as reader:
            data = b"".join(reader.chunks(0))
    document = assemble([StreamBytes(stream=_STREAM, data=data, committed=len(data), end=end)])
    trace = Trace(WrittenSteps(source, document.head, (), document.began_ns, [document]), source)
    trace.tensor_files = tensors
    return trace


class _NamedFiles(TensorFiles):
    """The tensors that trees name, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder_of_all = folder
        self._paths: list[Path] = []

    def add(self, name: str) -> int:
        """Return the reference of a tensor that a tree names so: `./Net.fc_outputs.safetensors`."""
        self._paths.append(self._folder_of_all / Path(name).name)
        return len(self._paths)

    def find(self, rank: int, incarnation: int, reference: int) -> StoredTensor:
        """As `TensorFiles.find`."""
        path = self._paths[reference - 1]
        if not path.is_file():
            raise TraceError(f"{path}: is not there, and a tree names it", _AGAIN)
        file = MappedFile(path, TraceError)
        try:
            _, [(_, dtype, shape, begin, end)] = parse_entries(file.header, len(file.data))
        except ValueError as error:
            raise TraceError(f"{path}: {error}", _AGAIN) from error
        data = file.data[begin:end]
        return StoredTensor(
            dtype=dtype, shape=shape, data=data, checksum=_xxh3(data), path=path,
            offset=file.start + begin,
        )  # fmt: skip


class _ForwardRecords:
    """Records forwards as the rank that made them would have."""

    def __init__(self, recorder: Recorder, tensors: _NamedFiles, *, takes_printed: bool) -> None:
        self._recorder, self._tensors, self._takes_printed = recorder, tensors, takes_printed
        self._describer, self._digester = Describer(_STREAM.rank), Digester()
        self.digits = 0
        """Behind the point, of the printed number that has the fewest; 0 before there is one."""
        self._root = recorder.define("root", **{"class": ""}, parameters=0, preferred=True)
        self._modules: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self._owners: dict[str, int] = {}
        """By the name of a file the `id` of the entry whose tensor is in it: where a module is
        called twice, transformers has both calls name one file, which holds the last one's."""

    def forward(self, step: int, file: Path) -> EndReason:
        """Record one forward, and return how it ended; TraceError where its tree is damaged."""
        self._calls.clear()
        self._recorder.step(StepEvent.BEGIN, Mode.EVAL, step)
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
            names = ((entry.get("value"), id(entry)) for _, entry in _leaves("", tree))
            self._owners = {name: number for name, number in names if isinstance(name, str)}
            self._call(tree, step, None)
        except (*UNREADABLE, OSError, RecursionError, struct.error) as error:
            text = f"{type(error).__name__}: {error}"
            raise TraceError(
                f"{file}: is not a whole tree of a debugger ({text})", _AGAIN
            ) from error
        self._recorder.step(StepEvent.END, Mode.EVAL, step)
        return EndReason.RAISED if "error" in tree else EndReason.CLOSED

    def _call(self, node: Mapping[str, Any], step: int, parent: int | None) -> None:
        path = str(node["module_path"]).partition(".")[2]  # without the model's class
        if path not in self._modules:
            fields = {"root": self._root, "path": path, "class": ""}
            self._modules[path] = self._recorder.define("module", **fields)
        sequence = self._recorder.enter(
            self._modules[path], self._root, parent, Mode.EVAL, step, 0, Phase.FORWARD,
            self._calls[path],
        )  # fmt: skip
        self._calls[path] += 1
        inputs = node.get("inputs") or {}
        for kind in ("args", "kwargs"):
            self._values(sequence, "input", inputs.get(kind))
        for child in node.get("children", ()):
            self._call(child, step, sequence)
        self._values(sequence, "output", node.get("outputs"))
        self._values(sequence, "returned", node.get("returned"))
        error = str(node.get("error", ""))
        self._recorder.exit(sequence, CallStatus.RAISED if error else CallStatus.RETURNED, error)

    def _values(self, sequence: int, slot: str, data: object) -> None:
        for name, entry in _leaves(slot, data):
            dtype = str(entry["dtype"]).removeprefix("torch.")
            shape = tuple(map(int, re.findall(r"\d+", entry["shape"])))
            note = _PART if _is_part(entry) else _PRINTED
            described, reading, reference = _described(dtype, shape, note), None, 0
            file = entry.get("value")
            if note is not _PART and isinstance(file, str) and self._owners[file] == id(entry):
                described, reading, reference = self._from_file(file)
                if (described.meta.dtype, described.meta.shape) != (dtype, shape):
                    raise ValueError(f"{file} holds another tensor than {dtype}{list(shape)}")
            elif note is not _PART and self._takes_printed:
                reading = self._printed(entry, math.prod(shape))
            self._recorder.value(sequence, name, described, reading, Phase.FORWARD, 0, 0, reference)

    def _from_file(self, name: str) -> tuple[Described, ValueNumbers | None, int]:
        reference, reading = self._tensors.add(name), None
        stored = self._tensors.find(_STREAM.rank, _STREAM.incarnation, reference)
        tensor = tensor_of(stored.data, stored.dtype, stored.shape)
        with invisible():
            described, local = self._describer.describe(tensor)
            if described.can_digest:
                samples = described.allows_samples
                reading = self._digester.read(local, described.meta.ranges, samples=samples)
        nbytes, checksum = stored.data.nbytes, stored.checksum
        entry = ChunkEntry(reference, 0, reference, 0, nbytes, checksum, "", 0)
        self._recorder.tensor(reference, entry, described)
        return described, reading, reference

    def _printed(self, entry: Mapping[str, Any], count: int) -> ValueNumbers | None:
        matches = [_NUMBER.match(str(entry.get(name))) for name in _STATISTICS]
        numbers = [match for match in matches if match is not None]
        if len(numbers) < len(matches) or not count:
            return None
        low, high, mean, std = (float(match[1]) for match in numbers)
        for match in numbers:
            if match[2] and float(match[2]):
                digits = len(match[2].partition(".")[2])
                self.digits = min(self.digits or digits, digits)
        nan = int(entry.get("nan", math.isnan(low)))
        posinf = int(entry.get("posinf", high == math.inf))
        neginf = int(entry.get("neginf", low == -math.inf))
        l2 = math.sqrt((count - 1) * std**2 + count * mean**2) if count > 1 else abs(mean)
        if nan or posinf or neginf:  # of the other elements nothing is known
            low = high = mean = std = math.nan
            l2 = math.inf
        random_hash = int.from_bytes(os.urandom(8), "little")  # nothing is known to the bit
        return ValueNumbers(
            count,
            random_hash,
            nan,
            posinf,
            neginf,
            0,
            low,
            high,
            mean,
            std,
            l2,
            _UNKNOWN,
            None,
            False,
        )


@functools.lru_cache(1 << 12)
def _described(dtype: str, shape: tuple[int, ...], note: str) -> Described:
    meta = ValueMeta(
        dtype=dtype, device="cpu", shape=shape, global_shape=None,
        layout=Layout(source=LayoutSource.UNKNOWN), ranges=None, note=note,
    )  # fmt: skip
    return Described(meta=meta)


def _leaves(slot: str, data: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tensors in a part of a tree, each with its slot."""
    if isinstance(data, dict) and str(data.get("shape")).startswith("torch.Size("):
        yield slot, data
    elif isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(f"{slot}.{key}", value)


def _is_part(entry: Mapping[str, Any]) -> bool:
    placements = (entry.get("placements") or {}).values()
    return entry.get("layout") == "unknown" or any(place != "Replicate()" for place in placements)
