"""A trace as cursors over the columns of its steps: steps, nodes, values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SelectionError, TraceError
from rankscope.globs import glob_matches
from rankscope.layout.placement import Layout, Mesh
from rankscope.record.call import CallKey, CallStatus, Mode
from rankscope.record.notes import BLACK_BOX, Note, RanksNote
from rankscope.record.phases import Phase
from rankscope.record.ranks import parse_ranks, ranks_named, ranks_text
from rankscope.record.statistics import STATISTICS, Combined
from rankscope.record.stepcolumns import COLUMNS
from rankscope.record.texts import NO_STEP, ended_words, endings, extent
from rankscope.record.value import Digest, ModuleName, Samples
from rankscope.run.jobstatus import Stall, stalls_in
from rankscope.run.prepare import command_text
from rankscope.tree.selection import default_phase, named, nothing_matched
from rankscope.tree.slotview import SlotView, Whereabouts, type_text
from rankscope.tree.step import Columns, LazyColumns, StepColumns, StepHead
from rankscope.tree.stepfile import filled
from rankscope.tree.tracejson import damaged_is_trace_error

if TYPE_CHECKING:
    import torch

    from rankscope.layout.layoutfile import LayoutFile
    from rankscope.record.ranks import StreamId
    from rankscope.spool.chunks.tensorfiles import TensorFiles, TensorRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call ended on some ranks."""

    ranks: tuple[int, ...]
    status: str
    """Word of a `CallStatus`; "error" of what failed inside rankscope."""
    error: str

    @property
    def has_returned(self) -> bool:
        """True where the call came back as any call does."""
        return self.status == CallStatus.RETURNED.word

    @property
    def words(self) -> str:
        """It in words: `raised on rank 1: ValueError: boom`."""
        failed = self.status == "error"
        verb = "rankscope failed here" if failed else self.status.replace("_", " ")
        return f"{verb} on {ranks_named(self.ranks)}" + (f": {self.error}" if self.error else "")


class Timing(NamedTuple):
    """When a call began, and how long it took over the ranks."""

    start_us: float
    """On the lowest rank, since the first call of the run."""
    min_us: float | None
    max_us: float | None
    slowest: int | None
    """Rank of `max_us`."""


class TraceSource(Protocol):
    """Where a trace's data comes from."""

    head: Mapping[str, Any]
    """{"run", "completeness"}."""

    @property
    def heads(self) -> Sequence[StepHead]:
        """Of setup and steps, in order."""

    @property
    def passed_over(self) -> Iterable[str]:
        """What of them only a newer rankscope knows."""

    def file(self, group: int) -> Path:
        """Return what a step is read from."""

    def step(self, group: int) -> StepColumns:
        """Return a step."""

    @property
    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Records of the chunks that are still written."""

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that steps lie in."""


class TensorReaders(NamedTuple):
    """What makes tensors of values; set by `rankscope.open_trace`: this room knows no torch."""

    local: Callable[[Value, int], torch.Tensor]
    full: Callable[[Value, LayoutFile | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Value:
    """One slot over all ranks, whether they agree on it or not."""

    views: tuple[SlotView, ...]
    """One, or several where ranks disagree in dtype, global shape or layout."""
    node: Node

    def local(self, rank: int) -> torch.Tensor:
        """Return what a rank held, over the bytes in the trace folder: mapped, not read. Writing to
        it leaves the trace as it is. SelectionError: the rank has no value here, or its bytes were
        not kept; says why."""
        return self._tensors().local(self, rank)

    def full(self, layouts: LayoutFile | None = None) -> torch.Tensor:
        """Return the global tensor, put together from what the ranks held.

        Warns (`TensorWarning`) where ranks that should hold the same do not, or could not be
        compared, and of what was inferred; `whole_value` of `tree/tensors/globalvalues.py` returns
        all of it beside the tensor.

        Args:
            layouts: declared layouts, for values that no DTensor describes.

        Raises:
            SelectionError: bytes that are needed were not kept; says why.
            LayoutError: nothing says how the pieces belong together, or they contradict it.
        """
        return self._tensors().full(self, layouts)

    def _tensors(self) -> TensorReaders:
        readers = self.node.trace.tensors
        if readers is None:
            raise TraceError("open the trace with rankscope.open_trace to read its tensors")
        return readers

    def __str__(self) -> str:
        first = self.views[0]
        of_which = [
            f"{first.slot} {type_text(first)}",
            str(first.layout()) if first.placements else "layout unknown",
            ranks_named(self.ranks),
            f"{self.distinct} values" if self.distinct > 1 else "1 value",
        ]
        return ", ".join(of_which)

    def __repr__(self) -> str:
        return f"Value({self})"

    @property
    def distinct(self) -> int:
        """How many different values the ranks hold."""
        return sum(view.distinct for view in self.views)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value here."""
        return tuple(sorted({rank for view in self.views for rank in view.ranks}))

    @property
    def dtype(self) -> str:
        """dtype of the lowest rank's value."""
        return self.views[0].dtype

    @property
    def global_shape(self) -> tuple[int, ...] | None:
        """Shape of the whole tensor, None where the layout is unknown."""
        return self.views[0].global_shape

    @property
    def layout(self) -> Layout:
        """Layout of the lowest rank's value."""
        return self.views[0].layout()

    @property
    def per_rank(self) -> dict[int, Digest | None]:
        """Each rank's numbers, None where a value was not digested."""
        digests = {rank: d for view in self.views for rank, d in view.per_rank().items()}
        return dict(sorted(digests.items()))

    @property
    def samples(self) -> dict[int, Samples]:
        """Per-sample sketches by rank."""
        return {rank: samples for view in self.views for rank, samples in view.samples().items()}

    @property
    def combined(self) -> Combined | None:
        """Statistics of the whole tensor; None where its layout is unknown or meshes hold different
        ones.

        Where every rank holds the whole, they are that value's own.
        """
        if len(self.views) != 1:
            return None
        view = self.views[0]
        wholes = view.combined
        if len(wholes) == 1:
            return wholes[0]
        digest = next(iter(view.per_rank().values()), None)
        if wholes or not view.placements or digest is None:
            return None
        numbers = {statistic.name: digest.number(statistic.name) for statistic in STATISTICS}
        return Combined.of(numbers, ranks=view.ranks, sketch=digest.sketch)


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class Node:
    """The same call merged over ranks: a cursor over the columns of its step."""

    step: StepColumns = field(repr=False)
    row: int
    trace: Trace = field(repr=False)
    _where: Whereabouts = field(repr=False)

    @property
    def head(self) -> StepHead:
        """Which step it is of."""
        return self.step.head

    @property
    def id(self) -> str:
        """16 hex digits of the key alone: the same in every trace."""
        return f"{int(self.step['nodes.id'][self.row]):016x}"

    @property
    def path(self) -> str:
        """Canonical path, "" for the root."""
        return self.step.texts.text(self.step.lists.path[self.row])

    @property
    def raw_path(self) -> str:
        """Path with wrappers left in."""
        return self._names[0].raw_path

    @property
    def class_name(self) -> str:
        """Class of the module."""
        return self._names[0].class_name

    @property
    def classes(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Ranks and class of each name, where ranks call the module by several classes; else ()."""
        if len({name.class_name for name in self._names}) == 1:
            return ()
        modules = self._column("module")
        numbers = sorted(set(modules.tolist()))
        texts = self.step.texts
        return tuple((self._of(modules == n), texts.module(n).class_name) for n in numbers)

    @property
    def wrappers(self) -> tuple[str, ...]:
        """What was put around the module: "DDP", "FSDP2" ..."""
        return self._names[0].wrappers

    @property
    def phase(self) -> Phase:
        """Part of the step."""
        return _PHASES[self.step.texts.text(self.step.lists.phase[self.row])]

    @property
    def micro_batch(self) -> int | None:
        """n-th call of the root in the step; None outside forward, recompute and backward."""
        number: int = self.step.lists.micro_batch[self.row]
        return None if number < 0 else number

    @property
    def ordinal(self) -> int:
        """0 for the first call of this path in this phase of this micro-batch, and so on."""
        return int(self.step.lists.ordinal[self.row])

    @property
    def of_ordinal(self) -> int:
        """Of a backward node the ordinal of its forward call."""
        return int(self.step["nodes.of_ordinal"][self.row])

    @property
    def graph_task(self) -> int:
        """Of a backward node which backward pass."""
        return int(self.step["nodes.graph_task"][self.row])

    @property
    def key(self) -> CallKey:
        """What made the ranks' calls one node."""
        return CallKey(
            mode=self.head.mode, step=self.head.step, micro_batch=self.micro_batch,
            phase=self.phase,
            path=self.path, ordinal=self.ordinal,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that made the call."""
        return self.step.ranks("calls", self.call_rows)

    @property
    def ranks_text(self) -> str:
        """The same as people write them: `0-7`."""
        return ranks_text(self.ranks)

    @property
    def call_rows(self) -> slice:
        """Its rows in the calls of its step, one per rank."""
        first, last = self.step.lists.first_call[self.row : self.row + 2]
        return slice(first, last)

    @property
    def collectives(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """What ranks issued in this call, as `collective` of docs/trace-format.md, with those ranks
        as text: several entries where they differ, () where it is no collective's."""
        rows = self.call_rows
        kinds, numbers = (self.step[f"calls.{n}"][rows] for n in ("collective", "number"))
        if kinds[0] < 0:
            return ()
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank, *issued in zip(self.ranks, kinds.tolist(), numbers.tolist()):
            if issued[0] >= 0:
                ranks_of.setdefault((issued[0], issued[1]), []).append(rank)
        texts = self.step.texts
        return tuple(
            (ranks_text(ranks), {**texts.collective(kind), "sequence": number})
            for (kind, number), ranks in ranks_of.items()
        )

    @property
    def status(self) -> str:
        """Word of a `CallStatus`, or "mixed" over the ranks."""
        if self.has_returned:
            return CallStatus.RETURNED.word
        words = {CallStatus.word_of(n) for n in self._column("status").tolist()}
        return words.pop() if len(words) == 1 else "mixed"

    @property
    def has_returned(self) -> bool:
        """True where the call came back on all its ranks, as most do."""
        return bool(self.step.lists.has_returned[self.row])

    @property
    def is_opaque(self) -> bool:
        """True where nothing inside was seen: a compiled region, a scripted module."""
        return any(name.opaque for name in self._names)

    @property
    def outcomes(self) -> tuple[CallOutcome, ...]:
        """How it ended, by ranks."""
        if self.has_returned:
            return (CallOutcome(ranks=self.ranks, status=self.status, error=""),)
        status, text = self._column("status"), self._column("error")
        return tuple(
            CallOutcome(
                ranks=self._of((status == code) & (text == why)),
                status=CallStatus.word_of(code),
                error=self.step.texts.text(why) if why >= 0 else "",
            )
            for code, why in sorted(set(zip(status.tolist(), text.tolist())))
        )

    @property
    def errors(self) -> tuple[CallOutcome, ...]:
        """Failures inside rankscope while it watched this call."""
        by_text: dict[int, list[int]] = {}
        for rank, text in self.step.failures.get(self.row, ()):
            by_text.setdefault(text, []).append(rank)
        return tuple(
            CallOutcome(
                ranks=tuple(ranks),
                status="error",
                error=self.step.texts.text(text) if text >= 0 else "",
            )
            for text, ranks in by_text.items()
        )

    @property
    def time(self) -> Timing:
        """When it began and how long it took."""
        begin, shortest, longest, slowest = (c[self.row] for c in self.step.durations)
        if slowest < 0:
            return Timing(start_us=begin, min_us=None, max_us=None, slowest=None)
        return Timing(start_us=begin, min_us=shortest, max_us=longest, slowest=int(slowest))

    @property
    def slots(self) -> tuple[SlotView, ...]:
        """Slot entries in the order they were recorded."""
        first, last = self.step.lists.first_entry[self.row : self.row + 2]
        return tuple(SlotView(self.step, entry, self._where) for entry in range(first, last))

    @property
    def children(self) -> tuple[Node, ...]:
        """Calls made inside this one."""
        return self.trace.known_nodes(self.step, self.step.lists.children[self.row], self._where)

    def value(self, slot: str) -> Value | None:
        """Return the value of one slot over all ranks, None where the node has no such slot."""
        views = tuple(view for view in self.slots if view.slot == slot)
        return Value(views, self) if views else None

    def walk(self) -> Iterator[Node]:
        """Yield this node and everything below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    @property
    def _names(self) -> tuple[ModuleName, ...]:
        """What ranks call the module, the lowest first; mostly one name."""
        texts, first = self.step.texts, self.step.lists.module[self.row]
        if self.step.is_one_module[self.row]:
            return (texts.module(first),)
        return tuple(texts.module(n) for n in dict.fromkeys(self._column("module").tolist()))

    def _column(self, name: str) -> Any:
        return self.step[f"calls.{name}"][self.call_rows]

    def _of(self, chosen: Any) -> tuple[int, ...]:
        ranks: tuple[int, ...] = tuple(self._column("rank")[chosen].tolist())
        return ranks


@damaged_is_trace_error
class Step:
    """One step of one mode, or the setup, with its nodes."""

    def __init__(self, source: TraceSource, group: int, trace: Trace, where: Whereabouts) -> None:
        self._source, self._group, self._trace = source, group, trace
        self._where = replace(where, file=source.file(group))
        head = self.head = source.heads[group]
        self.is_setup, self.mode = head.is_setup, head.mode
        self.step, self.incarnation = head.step, head.incarnation
        ranks = (parse_ranks(note["ranks"], where.world_size) for note in head.notes)
        notes = (Note.read(note["note"], note.get("fact")) for note in head.notes)
        self.notes = tuple(map(RanksNote, ranks, notes))

    def columns(self) -> StepColumns:
        """Read and return its columns: nothing here keeps them."""
        return self._source.step(self._group)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The outermost calls of the step, in order."""
        return self.fresh()

    def fresh(self) -> tuple[Node, ...]:
        """Read and return the outermost calls: nothing here keeps them."""
        columns = self.columns()
        return self._trace.known_nodes(columns, columns.lists.tops, self._where)

    def walk(self) -> Iterator[Node]:
        """Yield every node of the step, parents first."""
        for node in self.nodes:
            yield from node.walk()

    def passing(self) -> Iterator[Node]:
        """Yield what `walk` yields, and keep none of it: one step is in memory at a time."""
        for node in self.fresh():
            yield from node.walk()

    def __repr__(self) -> str:
        return "Step(setup)" if self.is_setup else f"Step({self.mode.word} {self.step})"


class Trace:
    """One trace: what ran where, how much of it arrived, and the tree."""

    def __init__(
        self,
        source: TraceSource,
        path: Path,
        *,
        is_live: bool = False,
        is_written: bool = True,
        read_s: float = 0.0,
    ) -> None:
        self.path = path
        self.is_live = is_live
        """True where the tree is not written yet, and somebody is at work who may write it."""
        self.is_written = is_written
        """False where the tree was assembled from the records that were there."""
        self.read_s = read_s or time.time()
        """Wall clock when it was read: its records tell of no later time."""
        self.run: Mapping[str, Any] = source.head["run"]
        self.completeness: Mapping[str, Any] = source.head["completeness"]
        meshes = meshes_of(self.run)
        self.tensors: TensorReaders | None = None
        self._source = source
        where = Whereabouts(meshes, path, self.run["world_size"])
        self._passed_over: set[str] = set(source.passed_over)
        groups = [Step(source, group, self, where) for group in range(len(source.heads))]
        self.setup: tuple[Step, ...] = tuple(step for step in groups if step.is_setup)
        """Of every incarnation that recorded one."""
        self.steps: tuple[Step, ...] = tuple(step for step in groups if not step.is_setup)

    def known_nodes(
        self, columns: StepColumns, rows: Iterable[int], where: Whereabouts
    ) -> tuple[Node, ...]:
        """Return the nodes of phases that this version knows; a later one may add phases."""
        nodes = []
        for row in rows:
            word = columns.texts.text(columns.lists.phase[row])
            if word in _PHASES:
                nodes.append(Node(columns, row, self, where))
            else:
                self._passed_over.add(f"phase {word!r}")
        return tuple(nodes)

    @property
    def unread(self) -> str:
        """What was passed over so far, because only a newer rankscope knows it; "" for nothing."""
        if not self._passed_over:
            return ""
        maker = self.run.get("versions", {}).get("rankscope")
        needed = f"rankscope {maker}" if maker else "the rankscope that made the trace"
        listed = ", ".join(sorted(self._passed_over))
        return f"passed over what this rankscope does not know ({listed}): read it with {needed}"

    @property
    def is_complete(self) -> bool:
        """True where every record of every rank is here and every rank ended in order."""
        return bool(self.completeness["complete"]) and self.is_written

    @property
    def batch_dim(self) -> int:
        """Dimension of activations that counts samples, as the job was told. TraceError: what
        stands there is no dimension."""
        return number_setting(self, "batch-dim", "-?[0-9]{1,2}")

    @property
    def state(self) -> str:
        """Whether all of it is here, and what else must be known before any number is read."""
        word = "complete" if self.is_complete else "incomplete"
        no_step = [] if self.steps else [NO_STEP]
        ended = [words] if (words := ended_words(self.run)) else endings(self.completeness)
        return "; ".join([word, *ended, *no_step])

    @property
    def about(self) -> str:
        """What the trace holds, in words: ranks, hosts, meshes, steps, completeness."""
        steps = [f"{steps_named(self.steps)} traced"] if self.steps else []
        return ", ".join([extent(self.run), *steps, self.state])

    def columns(self) -> Columns:
        """Return the columns of calls, values and samples of all steps, one behind the other: those
        that say something beyond their step, and `values.incarnation`, the life of the step.

        Each is read when it is asked for, and held whole; `Step.columns` maps them.
        """
        groups = (*self.setup, *self.steps)
        return LazyColumns({name: partial(_joined, groups, name) for name in _OF_ALL})

    def faults(self) -> Iterator[str]:
        """Read every file that nodes and columns lie in, and yield what is wrong with each."""
        return self._source.faults()

    @cached_property
    def tensor_files(self) -> TensorFiles:
        """The full tensors that were kept: found by rank, incarnation and the reference in
        `columns()`, mapped where they lie; of a job that still runs those that are whole."""
        from rankscope.spool.chunks.tensorfiles import TensorFiles  # numpy: as above

        return TensorFiles(self.path, self._source.tensors)

    @cached_property
    def stalls(self) -> list[Stall]:
        """Times in which no rank of a host moved, as relays noticed them."""
        return stalls_in(self.path)

    @property
    def error_notes(self) -> list[list[Note]]:
        """The errors in `completeness` as notes, a list for each of its ranks."""
        return [
            [Note.read("", fact) for fact in rank["facts"]]
            if "facts" in rank
            else [Note.read(text) for text in rank["errors"]]  # written before there were facts
            for rank in self.completeness["ranks"]
        ]

    @property
    def default_mode(self) -> Mode:
        """Train, or eval where there is no train step."""
        has_train = not self.steps or any(step.mode is Mode.TRAIN for step in self.steps)
        return Mode.TRAIN if has_train else Mode.EVAL

    @property
    def happened(self) -> list[str]:
        """Why the trace of a black box was made: `train step 8: black box: rank 1 raised`."""
        notes = ((step.head.words, str(n.note)) for step in self.steps for n in step.notes)
        lines = (f"{words}: {note}" for words, note in notes if note.startswith(BLACK_BOX))
        return list(dict.fromkeys(lines))

    def close(self) -> None:
        """Let go of its files: each is unmapped with its last view."""
        self.setup = self.steps = ()  # each knows the trace
        self.__dict__.pop("tensor_files", None)

    def walk(self) -> Iterator[Node]:
        """Yield every node: setup, then the steps."""
        for step in (*self.setup, *self.steps):
            yield from step.walk()

    def find(
        self,
        path: str = "*",
        *,
        phase: Phase | str | None = None,
        step: int | None = None,
        mode: Mode | str | None = None,
        micro_batch: int | None = None,
    ) -> list[Node]:
        """Return the nodes whose path matches a glob, and whatever else is asked for.

        Args:
            path: fnmatch glob on the whole canonical path; "" is the root.
            phase: one phase, or all.
            step: one step, or all.
            mode: train, eval, or both.
            micro_batch: one micro-batch, or all.

        Raises:
            SelectionError: no node of the trace has such a path; lists near ones.
        """
        wanted_phase = named(Phase, "phase", phase)
        wanted_mode = named(Mode, "mode", mode)
        matches, paths = [], set[str]()
        for group in (*self.setup, *self.steps):
            for node in group.walk():
                paths.add(node.path)
                if (
                    glob_matches(path, node.path)
                    and (wanted_phase is None or node.phase is wanted_phase)
                    and (step is None or group.step == step)
                    and (wanted_mode is None or group.mode is wanted_mode)
                    and (micro_batch is None or node.micro_batch == micro_batch)
                ):
                    matches.append(node)
        if not matches and not any(glob_matches(path, name) for name in paths):
            raise nothing_matched("path", path, paths)
        return matches

    def value(
        self,
        path: str,
        slot: str,
        *,
        step: int = 0,
        micro_batch: int | None = 0,
        phase: Phase | str | None = None,
        mode: Mode | str | None = None,
        ordinal: int = 0,
    ) -> Value:
        """Return one value over all ranks, of the last incarnation that has it.

        Args:
            path: canonical path, "" for the root.
            slot: its name, such as `output` or `param:weight`.
            step: number of the step.
            micro_batch: ignored in phases that have none.
            phase: part of the step; by default the slot decides: backward for `grad_input` and
                `grad_output`, grads for `grad:`, params for `param:` and `buffer:`, else forward.
            mode: default train, or eval where there is no train step.
            ordinal: which call of the path.

        Raises:
            SelectionError: there is no such value; says what there is.
        """
        wanted_phase: Phase = default_phase(slot) if phase is None else named(Phase, "phase", phase)
        chosen: Mode = self.default_mode if mode is None else named(Mode, "mode", mode)
        groups = self.setup if wanted_phase is Phase.SETUP else self.steps
        nodes = [
            node
            for group in reversed(groups)
            if group.is_setup or (group.step == step and group.mode is chosen)
            for node in group.walk()
            if node.phase is wanted_phase
            and node.path == path
            and node.ordinal == ordinal
            and node.micro_batch in (None, micro_batch)
        ]
        if not nodes:
            if all(node.path != path for node in self.walk()):
                raise nothing_matched("path", path, (node.path for node in self.walk()))
            self._refuse_another_phase(path, slot, wanted_phase)
            raise SelectionError(
                f"{path or '(root)'} has no {wanted_phase.word} call in {chosen.word} step {step}, "
                f"micro-batch {micro_batch}, ordinal {ordinal}; list its calls with: "
                f"{command_text('show', self.path)} --path {path!r}"
            )
        for node in nodes:
            if (value_found := node.value(slot)) is not None:
                return value_found
        self._refuse_another_phase(path, slot, wanted_phase)
        slots = (view.slot for view in nodes[0].slots)
        raise nothing_matched(f"slot of {path or '(root)'}", slot, slots)

    def _refuse_another_phase(self, path: str, slot: str, asked_phase: Phase) -> None:
        """Raise where the slot is in other phases of the path alone; say in which."""
        phases = {
            node.phase
            for node in self.walk()
            if node.path == path and any(view.slot == slot for view in node.slots)
        }
        if phases and asked_phase not in phases:
            words = sorted(phase.word for phase in phases)
            raise SelectionError(
                f"{path or '(root)'} has no {slot} in phase {asked_phase.word}: it has it in "
                f"{' and '.join(words)}; ask with phase={words[0]!r}"
            )

    def __repr__(self) -> str:
        return f"Trace({self.path}: {extent(self.run)}, {self.state})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        import rankscope  # by the public name: rendering stands above this room

        return rankscope.report.fragment(self)


def steps_named(steps: Iterable[Step]) -> str:
    """Return `train 0-2, eval 0`."""
    by_mode: dict[str, list[int]] = {}
    for step in steps:
        by_mode.setdefault(step.mode.word, []).append(step.step)
    return ", ".join(f"{mode} {ranks_text(numbers)}" for mode, numbers in by_mode.items())


_PHASES = {phase.word: phase for phase in Phase}
_OF_ALL = (
    *(
        column.name
        for column in COLUMNS.values()
        if column.table in ("calls", "values", "samples")
        and not (column.is_text or column.name.endswith(".node"))
    ),
    "values.incarnation",
)
"""What says something beyond its step."""


def number_setting(trace: Trace, name: str, form: str) -> int:
    """Return a setting of a run that is a whole number, 0 where it has none; `form`: regular
    expression of the texts that are one. TraceError: something else stands there."""
    text = trace.run["settings"].get(name, "0")
    if not re.fullmatch(form, text, re.ASCII):
        raise TraceError(f"{trace.path}: {name} is {text[:60]!r}: the trace is damaged")
    return int(text)


def _joined(steps: Iterable[Step], name: str) -> NDArray[Any]:
    """Return a column of all steps; rows of samples are counted through them."""
    is_life = name not in COLUMNS
    parts = [np.empty(0, np.uint32) if is_life else filled(COLUMNS[name], 0)]
    samples = 0
    for step in steps:
        columns = step.columns()
        if is_life:
            parts.append(np.full(len(columns["values.rank"]), step.incarnation, np.uint32))
        elif name == "values.sample_row":
            parts.append(np.where(columns[name] >= 0, columns[name] + samples, -1))
            samples += len(columns["samples.sketch"])
        else:
            parts.append(columns[name])
    return np.concatenate(parts)


def meshes_of(run: Mapping[str, Any]) -> dict[str, tuple[Mesh, ...]]:
    """Return the meshes of a run header by the name of their kind."""
    return {
        data["name"]: tuple(
            Mesh(axes=tuple(data["axes"]), shape=tuple(data["shape"]), ranks=tuple(ranks))
            for ranks in data["over"]
        )
        for data in run["meshes"]
    }
