"""What the debugger keeps of tensors while its blocks run: what is printed of each, or its bytes in
a file without a name.

Equal tensors are kept once. The place of a tensor that is let go is used again: a forward whose
first and last layer are wanted takes the room of a few layers. The file is gone with the process,
however that ends.

A layer is a call of a module with a number for a name (`layers.3`) in which a module below it was
called. Once another layer of its list has come to that, a layer that is not the first is between
the two for good: its calls are left out of the tree, and what was kept in it alone is let go.
`treefiles` leaves the same calls out of the files, from the whole tree; none that stays there is
let go here. There, calls of modules that the model does not hold are passed over and those of held
ones in them count as made outside; here, what a call of another root makes is and makes no layer.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rankscope.agent.recorder import Recorder
from rankscope.agent.values.tensorstore import (
    BUDGET_SPENT,
    SPOOL_FULL,
    RecordTensor,
    Store,
    TensorBytes,
)
from rankscope.capture.describe import Described
from rankscope.capture.keeping import byte_pieces
from rankscope.capture.torch_internals.tensors import invisible_operations
from rankscope.compat.debugger.text import Arena, Glimpse, glimpse_of
from rankscope.record.phases import Phase
from rankscope.record.value import STORED_TYPES
from rankscope.run.files import OwnFile, above_standard_streams, leave_mapping, map_file, reserve
from rankscope.spool.chunks.safetensors import write_all
from rankscope.spool.chunks.writing import ChunkEntry
from rankscope.spool.recordcolumns import Records
from rankscope.spool.recordformat import NO_SEQUENCE, RecordKind, StepEvent
from rankscope.tree.assembly.rankstreams import RankStream

_LINE: Final = 64
"""Places begin at multiples of it: torch and the kernel read tensors where they lie."""
_LOOK_EVERY: Final = 16  # tensors, after which those that are needed no more are let go
_AHEAD_BYTES: Final = 8 << 20  # reserved on disk beyond what is written
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_xxh3: Final[Any] = xxhash.xxh3_64
ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """What is printed of one tensor, or its bytes where they lie, and xxh3_64 of these in row-major
    order."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int
    glimpse: Glimpse | None = None
    data: ByteArray | None = None


class DebuggerStore(Store):
    """Keeps the tensors of all open blocks: their bytes, up to a limit on disk, or what is
    printed."""

    def __init__(
        self, record: RecordTensor, limit_bytes: int, folder: Path, *, keeps_bytes: bool
    ) -> None:
        super().__init__(record)
        self._keeps_bytes = keeps_bytes
        self._asked = 0
        self._arena = Arena()
        self._scratch = _Scratch(folder, limit_bytes)
        self._kept: dict[int, tuple[KeptTensor, ChunkEntry, object]] = {}
        """By reference: the tensor, its place in the file, and its key in `_known`."""
        self._known: dict[object, ChunkEntry] = {}
        """By checksum, dtype, shape and, of glimpses, strides (of bytes None): torch's sums depend
        on the order in memory, in their last digits."""
        self._count = 0
        self.unneeded: Callable[[], Iterable[int]] = tuple
        """Returns the references that no file will show; asked while no other thread uses the
        store."""
        self._pinned: set[int] = set()
        """Found to be equal to something kept only after it was recorded as another."""

    def keep_bytes(self) -> None:
        """Keep bytes from now on; glimpses that were kept stay."""
        self._keeps_bytes = True

    def find(self, _rank: int, _incarnation: int, reference: int) -> KeptTensor | None:
        """Return a tensor, None for one that was not kept."""
        tensor = self._kept.get(reference)
        return None if tensor is None else tensor[0]

    def close(self) -> None:
        """Give up the file, and what was kept."""
        self._kept.clear()
        self._scratch.close()

    def store(
        self, reference: int, described: Described, content: TensorBytes
    ) -> ChunkEntry | None:
        """As `Store.store`. What others write into a live tensor meanwhile is kept, or is not."""
        self._asked += 1
        if not self._asked % _LOOK_EVERY:
            for unneeded in self.unneeded():
                self._let_go(unneeded)
        keeps_bytes = self._keeps_bytes  # once: another thread may be opening a block
        meta, live, stride = described.meta, content.live, content.stride
        if live is not None and content.whole is None:
            stride = tuple(live.stride())
        checksum = _checksum(content.pieces if content.whole is None else (content.whole,))
        kind = meta.dtype, meta.shape, None if keeps_bytes else stride
        earlier = self._known.get((checksum, *kind))
        if earlier is not None:
            if live is None:
                self._pinned.add(earlier.reference)
            return earlier
        begin, nbytes = 0, STORED_TYPES[meta.dtype].nbytes(meta.shape)
        if keeps_bytes:
            written = self._write(nbytes, content)
            if written is None:
                return None
            begin, checksum = written
        self._count += 1  # no two have one place: so it tells glimpses apart
        entry = ChunkEntry(reference, 0, self._count, begin, nbytes, checksum, "", 0)
        tensor = KeptTensor(
            dtype=meta.dtype, shape=meta.shape, checksum=checksum,
            glimpse=None if keeps_bytes else self._glimpse_of_bytes(described, content, stride),
            data=self._scratch.read(begin, nbytes) if keeps_bytes else None,
        )  # fmt: skip
        if not self._record(reference, entry, described):
            self._give_back(tensor, entry)
            self.refusal = SPOOL_FULL
            return None
        key = (checksum, *kind)
        self._kept[reference], self._known[key] = (tensor, entry, key), entry
        return entry

    def _glimpse_of_bytes(
        self, described: Described, tensor_bytes: TensorBytes, stride: tuple[int, ...]
    ) -> Glimpse:
        with invisible_operations():
            if tensor_bytes.live is not None:
                return glimpse_of(tensor_bytes.live.detach(), arena=self._arena)
            assert tensor_bytes.whole is not None  # what came from an accelerator
            tensor = tensor_of(tensor_bytes.whole, described.meta.dtype, described.meta.shape)
            return glimpse_of(tensor, stride, arena=self._arena)

    def _write(self, nbytes: int, tensor_bytes: TensorBytes) -> tuple[int, int] | None:
        """Write the bytes; return where they begin, and their checksum. Of a live tensor copies are
        written: the checksum is that of the file, whatever others write into the tensor
        meanwhile."""
        pieces: Iterable[ByteArray] = () if tensor_bytes.whole is None else (tensor_bytes.whole,)
        if tensor_bytes.live is not None and nbytes:
            pieces = byte_pieces(tensor_bytes.live)
        begin = self._scratch.place(nbytes)
        if begin is None:
            self.refusal = BUDGET_SPENT
            return None
        try:
            return begin, self._scratch.write(begin, pieces)
        except OSError as error:
            self._scratch.give_back(begin, nbytes)
            self.refusal = f"they cannot be written: {error.strerror or error}"
            return None

    def _let_go(self, reference: int) -> None:
        record = None if reference in self._pinned else self._kept.pop(reference, None)
        if record is not None:
            tensor, entry, key = record
            self._known.pop(key, None)
            self._give_back(tensor, entry)

    def _give_back(self, tensor: KeptTensor, entry: ChunkEntry) -> None:
        if tensor.data is not None:
            self._scratch.give_back(entry.begin, entry.nbytes)


class _Scratch:
    """A file without a name, written with `pwrite` and read through one mapping."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._file: OwnFile | None = None
        self._memory = np.empty(0, np.uint8)
        self._top = 0
        self._reserved = 0
        self._free: dict[int, list[int]] = {}
        """Size -> where places of it begin."""

    def place(self, nbytes: int) -> int | None:
        """Return where so many bytes may be written; None beyond the limit."""
        room = nbytes + -nbytes % _LINE
        if free := self._free.get(room):
            return free.pop()
        begin, end = self._top, self._top + room
        if end > self._limit_bytes or not self._limit_bytes:
            return None
        self._top = end
        return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        room = nbytes + -nbytes % _LINE
        if begin + room == self._top:
            self._top = begin
        else:
            self._free.setdefault(room, []).append(begin)

    def write(self, begin: int, pieces: Iterable[ByteArray]) -> int:
        """Write bytes in a place, and return their checksum."""
        number = self._opened().check()
        if self._top > self._reserved:
            reserve(number, self._reserved, self._top + _AHEAD_BYTES - self._reserved)
            self._reserved = self._top + _AHEAD_BYTES
        stream = _xxh3()
        for piece in pieces:
            write_all(number, piece.data, begin)
            stream.update(piece.data)
            begin += len(piece)
        return int(stream.intdigest())

    def read(self, begin: int, nbytes: int) -> ByteArray:
        return self._memory[begin : begin + nbytes]

    def close(self) -> None:
        self._memory = np.empty(0, np.uint8)
        if self._file is not None:
            self._let_go()

    def _opened(self) -> OwnFile:
        """Make the file and map it, once; disk is taken as it is filled.

        The mapping also keeps the file the only one of its number and inode where the program
        closes all descriptors: `OwnFile.check` tells files apart by that.
        """
        if self._file is None:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as handle:
                file = OwnFile(above_standard_streams(os.dup(handle.fileno())))
            # private: what a reader writes into it, which torch wants to be able to, is its own
            flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            try:
                os.ftruncate(file.number, self._limit_bytes)
                mapped: Any = map_file(file.number, self._limit_bytes, flags=flags, prot=access)
            except OSError:
                file.close()
                raise
            self._file, self._memory = file, np.frombuffer(mapped, np.uint8)
            self._let_go = weakref.finalize(self, _let_go, file, mapped)
        return self._file


def _let_go(file: OwnFile, mapped: mmap.mmap) -> None:
    leave_mapping(mapped, file.identity, but=file.number)
    file.close()


def tensor_of(data: ByteArray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over bytes in row-major order, which nobody writes into."""
    of_type: torch.dtype = getattr(torch, dtype)
    if not data.size:
        return torch.empty(shape, dtype=of_type, device="cpu")
    if data.flags.writeable:
        return torch.from_numpy(data).view(of_type).reshape(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(data).view(of_type).reshape(shape)


def _checksum(pieces: Iterable[ByteArray]) -> int:
    stream = _xxh3()
    for piece in pieces:
        stream.update(piece.data)
    return int(stream.intdigest())


# ---- layers between the first and the last -------------------------------------------------------


_NUMBERED: Final = re.compile(r"(.*)\.(\d+)")
_LOOSE: Final = ".@"
"""Begins the path of a module that no root holds."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this step's forwards; `top` is the root of the outermost call, `references` are
    those of its values. A layer has a call of a module below in it."""

    sequence: int
    path: str
    """Of the module, a dot before every name; "" where the outermost call's root does not hold
    it."""
    parent: _Call | None
    top: int
    inside: list[_Call] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    layers: dict[str, list[_Call]] = field(default_factory=dict)
    """Of each list of layers called in it the first and the latest."""
    is_layer: bool = False


class LayerWatch:
    """Says what layers between others kept, and nothing else did.

    Only while one thread calls modules: what another has just found to be equal to something kept
    must not be let go before its value is written down.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._paths = recorder.modules = {}
        self._lets_go = True
        self._threads: set[int] = set()
        self._calls: dict[int, _Call] = {}
        self._uses = Counter[int]()
        self._passed: list[_Call] = []
        """Layers between others, not let go of yet."""
        self._dropped: list[int] = []
        recorder.observe(self._note_forwards)

    def let_go_no_more(self) -> None:
        """Keep from now on what any layer keeps."""
        self._lets_go = False

    def unneeded(self) -> list[int]:
        """Return the references that only layers between others have, each once.

        Asked by the store while no other thread uses it: a thread that has found something equal to
        what is kept has begun a call before, so that call is among those looked at here.
        """
        if not self._recorder.hand_on() or not self._lets_go or len(self._threads) > 1:
            return []
        passed, self._passed = self._passed, []
        return [reference for call in passed for reference in self._drop(call)]

    def without_dropped(self, stream: RankStream) -> RankStream:
        """Return the records without the calls of layers that were let go, and their values: of a
        deep model most of the work would go into them."""
        self.unneeded()
        dropped = np.array(self._dropped, np.uint64)
        if not len(dropped):
            return stream
        is_kept = ~np.isin(stream.values["sequence"], dropped)
        return replace(
            stream,
            enters=stream.enters[~np.isin(stream.enters["sequence"], dropped)],
            exits=stream.exits[~np.isin(stream.exits["sequence"], dropped)],
            values=stream.values.chosen(is_kept),
        )

    def _note_forwards(self, batch: Records) -> None:
        if not self._lets_go:
            return
        _, calls = batch.columns(RecordKind.ENTER)
        self._threads.update(calls["thread"].tolist())
        calls = calls[calls["phase"] == Phase.FORWARD]
        columns = (calls[name].tolist() for name in ("sequence", "module", "root", "parent"))
        for sequence, module, root, parent in zip(*columns):
            path = f".{self._paths.get(module, '')}"
            around = self._calls.get(parent)
            if around is not None:
                self._place(sequence, around, root, path)
            elif parent == NO_SEQUENCE:
                self._calls[sequence] = _Call(sequence, path, None, root)
        _, values = batch.values()
        values = values.chosen(values["reference"] > 0)
        for sequence, reference in zip(values["sequence"].tolist(), values["reference"].tolist()):
            self._uses[reference] += 1
            if (call := self._calls.get(sequence)) is not None:
                call.references.append(reference)
        _, marks = batch.columns(RecordKind.STEP)
        if (marks["event"] == StepEvent.END).any():
            self._calls.clear()

    def _place(self, sequence: int, around: _Call, root: int, path: str) -> None:
        is_held = root == around.top and not path.startswith(_LOOSE)
        call = _Call(sequence, path if is_held else "", around, around.top)
        self._calls[sequence] = call
        around.inside.append(call)
        if around.is_layer or around.parent is None:
            return
        match = _NUMBERED.fullmatch(around.path)
        if match and f".{match[2]}." in call.path:
            around.is_layer = True
            layers = around.parent.layers.setdefault(match[1], [])
            if len(layers) > 1:
                self._passed.append(layers.pop())
            layers.append(around)

    def _drop(self, call: _Call) -> Iterator[int]:
        """Let go of a layer and all in it; yield the references that nothing else has."""
        self._dropped.append(call.sequence)
        for reference in call.references:
            self._uses[reference] -= 1
            if not self._uses[reference]:
                del self._uses[reference]
                yield reference
        for inner in call.inside:
            yield from self._drop(inner)
        call.inside, call.references = [], []
