"""A trace as typed views over the JSON data of docs/trace-format.md: steps, nodes, values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.errors import SelectionError, TraceError
from rankscope.globs import glob_matches
from rankscope.layout.placement import Layout, Mesh
from rankscope.record.call import CallKey, CallStatus, Mode
from rankscope.record.notes import BLACK_BOX, Note, RanksNote
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named
from rankscope.record.statistics import STATISTICS
from rankscope.record.value import Digest, Samples
from rankscope.record.wholestatistics import Combined
from rankscope.run.outfolder import typed
from rankscope.run.stallrecords import Stall, stalls_in
from rankscope.tree.damage import damaged_is_trace_error
from rankscope.tree.digests import Columns
from rankscope.tree.finishedtrace import TraceSource
from rankscope.tree.selection import default_phase, named, nothing_matched
from rankscope.tree.slotview import SlotView, Whereabouts, shape_text
from rankscope.tree.summary import ended_words, endings, extent

if TYPE_CHECKING:
    import torch

    from rankscope.chunks.tensorfiles import TensorFiles
    from rankscope.layout.layoutfile import LayoutFile


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What all nodes of one step (or of setup) have in common."""

    mode: Mode
    step: int
    incarnation: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a call began, and how long it took over the ranks."""

    start_us: float
    """On the lowest rank, since the first call of the run."""
    min_us: float | None
    max_us: float | None
    slowest: int | None
    """Rank of max_us."""


class TensorReaders(NamedTuple):
    """What makes tensors of the values of a trace; `rankscope.open_trace` gives them to it, because
    this room knows no torch.
    """

    local: Callable[[Value, int], torch.Tensor]
    """What one rank held."""
    full: Callable[[Value, LayoutFile | None], torch.Tensor]
    """The global tensor."""


@dataclass(frozen=True, slots=True)
class Value:
    """One slot over all ranks, whether they agree on it or not."""

    views: tuple[SlotView, ...]
    """One, or several where ranks disagree in dtype, global shape or layout."""
    node: Node

    def local(self, rank: int) -> torch.Tensor:
        """Return what a rank held, over the bytes in the trace folder: mapped, not read. Writing to
        it leaves the trace as it is.

        Raises:
            SelectionError: the rank has no value here, or its bytes were not kept; says why.
        """
        return self._tensors().local(self, rank)

    def full(self, layouts: LayoutFile | None = None) -> torch.Tensor:
        """Return the global tensor, put together from what the ranks held.

        Warns (`TensorWarning`) where ranks that should hold the same do not, or could not be
        compared, and of what was inferred; `rankscope.tensors.globalvalues.whole_value` returns all
        of it beside the tensor.

        Args:
            layouts: declared layouts, for values that no DTensor describes.

        Raises:
            SelectionError: bytes that are needed were not kept; says why.
            LayoutError: nothing says how the pieces belong together, or they contradict it.
        """
        return self._tensors().full(self, layouts)

    def _tensors(self) -> TensorReaders:
        found = self.node.trace.tensors
        if found is None:
            raise TraceError("open the trace with rankscope.open_trace to read its tensors")
        return found

    def __str__(self) -> str:
        first = self.views[0]
        of_which = [
            f"{first.slot} {first.dtype}{shape_text(first)}",
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
    def is_uniform(self) -> bool:
        """True where all ranks agree on dtype, global shape and layout."""
        return len(self.views) == 1

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
        return dict(
            sorted({rank: d for view in self.views for rank, d in view.per_rank().items()}.items())
        )

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
        found = view.combined
        if len(found) == 1:
            return found[0]
        digest = next(iter(view.per_rank().values()), None)
        if found or not view.placements or digest is None:
            return None
        numbers = {each.name: digest.number(each.name) for each in STATISTICS}
        return Combined.of(numbers, ranks=view.ranks, sketch=digest.sketch)


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class Node:
    """The same call merged over ranks."""

    data: Mapping[str, Any]
    head: GroupHead
    trace: Trace = field(repr=False)
    """The trace it is of."""
    _where: Whereabouts = field(repr=False)

    @property
    def id(self) -> str:
        """16 hex digits that depend on the key alone: the same node has the same id in every
        trace."""
        return str(self.data["id"])

    @property
    def path(self) -> str:
        """Canonical path, "" for the root."""
        return str(self.data["path"])

    @property
    def raw_path(self) -> str:
        """Path with wrappers left in."""
        return str(self.data.get("raw_path", self.data["path"]))

    @property
    def class_name(self) -> str:
        """Class of the module."""
        return str(self.data["class"])

    @property
    def wrappers(self) -> tuple[str, ...]:
        """What was put around the module: "DDP", "FSDP2" ..."""
        return tuple(self.data.get("wrappers", ()))

    @property
    def phase(self) -> Phase:
        """Part of the step."""
        return Phase[str(self.data["phase"]).upper()]

    @property
    def micro_batch(self) -> int | None:
        """n-th call of the root in the step; None outside forward, recompute and backward."""
        found = self.data["micro_batch"]
        return None if found is None else int(found)

    @property
    def ordinal(self) -> int:
        """0 for the first call of this path in this phase of this micro-batch, and so on."""
        return int(self.data["ordinal"])

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
        return self._where.ranks(self.ranks_text)

    @property
    def ranks_text(self) -> str:
        """The same as the trace writes them: `0-7`."""
        return str(self.data["ranks"])

    @property
    def collectives(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """What ranks issued in this call, as `collective` of docs/trace-format.md, with those ranks
        as text: several entries where they differ, () where it is no collective's."""
        if "collective" in self.data:
            return ((self.ranks_text, self.data["collective"]),)
        return tuple((str(each["ranks"]), each) for each in self.data.get("collectives", ()))

    @property
    def status(self) -> str:
        """Word of a `CallStatus`, or "mixed" over the ranks."""
        return str(self.data["status"])

    @property
    def has_returned(self) -> bool:
        """True where the call came back on all its ranks, as most do."""
        return self.status == CallStatus.RETURNED.word

    @property
    def is_opaque(self) -> bool:
        """True where nothing inside was seen: a compiled region, a scripted module."""
        return bool(self.data.get("opaque", False))

    @property
    def outcomes(self) -> tuple[CallOutcome, ...]:
        """How it ended, by ranks."""
        listed = self.data.get("outcomes") or [{"ranks": self.data["ranks"], "status": self.status}]
        return tuple(
            CallOutcome(
                ranks=self._where.ranks(o["ranks"]),
                status=o["status"],
                error=o.get("error", ""),
            )
            for o in listed
        )

    @property
    def errors(self) -> tuple[CallOutcome, ...]:
        """Failures inside rankscope while it watched this call."""
        return tuple(
            CallOutcome(
                ranks=self._where.ranks(e["ranks"]),
                status="error",
                error=e["error"],
            )
            for e in self.data.get("errors", ())
        )

    @property
    def time(self) -> Timing:
        """When it began and how long it took."""
        return Timing(**self.data["time"])

    @property
    def slots(self) -> tuple[SlotView, ...]:
        """Slot entries in the order they were recorded."""
        return tuple(SlotView(each, i, self._where) for i, each in enumerate(self.data["slots"]))

    @property
    def children(self) -> tuple[Node, ...]:
        """Calls made inside this one."""
        known = self.trace.known_nodes(self.data["children"])
        return tuple(Node(each, self.head, self.trace, self._where) for each in known)

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


class Step:
    """One step of one mode, or the setup, with its nodes."""

    def __init__(self, source: TraceSource, group: int, trace: Trace, where: Whereabouts) -> None:
        self._source, self._group, self._trace = source, group, trace
        self._where = replace(where, file=source.file(group))
        is_setup, head = source.groups[group]
        self.is_setup = is_setup
        self.mode = Mode[str(head.get("mode", "train")).upper()]
        self.step = int(head.get("step", 0))
        self.incarnation = int(head.get("incarnation", 0))
        self.notes = tuple(
            RanksNote(
                where.ranks(each["ranks"]),
                Note.read(each["note"], each.get("fact")),
            )
            for each in head.get("notes", ())
        )

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The outermost calls of the step, in order."""
        return tuple(self.fresh())

    def fresh(self) -> Iterator[Node]:
        """Yield the outermost calls, read anew: nothing here keeps them."""
        head = GroupHead(mode=self.mode, step=self.step, incarnation=self.incarnation)
        nodes = self._trace.known_nodes(self._source.nodes(self._group))
        return (Node(data, head, self._trace, self._where) for data in nodes)

    def walk(self) -> Iterator[Node]:
        """Yield every node of the step, parents first."""
        for node in self.nodes:
            yield from node.walk()

    def passing(self) -> Iterator[Node]:
        """Yield what `walk` yields, and keep none of it: a pass over a large trace holds one step
        at a time."""
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
        """The trace folder."""
        self.is_live = is_live
        """True where the tree is not written yet, and somebody is at work who may write it."""
        self.is_written = is_written
        """False where the tree was assembled from the records that were there."""
        self.read_s = read_s or time.time()
        """Wall clock when it was read: its records tell of no later time."""
        self.run: Mapping[str, Any] = source.head["run"]
        """The run header, as in docs/trace-format.md."""
        self.completeness: Mapping[str, Any] = source.head["completeness"]
        """Per rank what was committed, received and dropped, as in docs/trace-format.md."""
        meshes = {m["name"]: _meshes(m) for m in self.run["meshes"]}
        self.tensors: TensorReaders | None = None
        """Set by `rankscope.open_trace`."""
        self._columns: Columns | None = None
        self._source = source
        where = Whereabouts(self.columns, meshes, path, self.run["world_size"])
        self._passed_over: set[str] = set()
        every = [
            Step(source, group, self, where)
            for group, (_, head) in enumerate(source.groups)
            if self._is_known(Mode, "mode", head.get("mode", "train"))
        ]
        self.setup: tuple[Step, ...] = tuple(step for step in every if step.is_setup)
        """Setup of every incarnation that recorded one."""
        self.steps: tuple[Step, ...] = tuple(step for step in every if not step.is_setup)
        """Steps of all modes and incarnations, in order."""

    def known_nodes(self, nodes: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the nodes of phases that this version knows; a later one may add phases."""
        for data in nodes:  # which may be damaged: that shows where the node is read
            word = data.get("phase") if isinstance(data, dict) else None
            if not isinstance(word, str) or self._is_known(Phase, "phase", word):
                yield data

    def _is_known(self, kind: type[Phase] | type[Mode], what: str, word: object) -> bool:
        if str(word).upper() in kind.__members__:
            return True
        self._passed_over.add(f"{what} {word!r}")
        return False

    @property
    def unread(self) -> str:
        """What was passed over of all that has been read so far, because only a newer rankscope
        knows it; "" for nothing."""
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
        """Dimension of activations that counts samples, as the job was told.

        Raises:
            TraceError: what stands there is no dimension.
        """
        text = self.run["settings"].get("batch-dim", "0")
        if not re.fullmatch("-?[0-9]{1,2}", text, re.ASCII):
            raise TraceError(f"{self.path}: batch-dim is {text[:60]!r}: the trace is damaged")
        return int(text)

    @property
    def state(self) -> str:
        """Whether all of it is here, and what else must be known before any number is read."""
        word = "complete" if self.is_complete else "incomplete"
        no_step = [] if self.steps else ["no step was traced"]
        ended = [words] if (words := ended_words(self.run)) else endings(self.completeness)
        return "; ".join([word, *ended, *no_step])

    def columns(self) -> Columns:
        """Return the per-rank numbers as columns (docs/trace-format.md), mapped where they lie in a
        file."""
        if self._columns is None:
            self._columns = self._source.columns()
        return self._columns

    def faults(self) -> Iterator[str]:
        """Read every file that nodes and columns lie in, and yield what is wrong with each."""
        return self._source.faults()

    @cached_property
    def tensor_files(self) -> TensorFiles:
        """The full tensors that were kept: found by rank, incarnation and the reference in
        `columns()`, mapped where they lie; of a job that still runs those that are whole."""
        from rankscope.chunks.tensorfiles import TensorFiles  # numpy: as above

        return TensorFiles(self.path, self._source.tensors())

    @cached_property
    def stalls(self) -> list[Stall]:
        """Times in which no rank of a host moved, as relays noticed them."""
        return stalls_in(self.path)

    @property
    def error_notes(self) -> list[list[Note]]:
        """What the errors in `completeness` say by kind and fields: a list for each of its
        ranks."""
        return [
            [Note.read("", fact) for fact in rank["facts"]]
            if "facts" in rank
            else [Note.read(text) for text in rank["errors"]]  # written before there were facts
            for rank in self.completeness["ranks"]
        ]

    @property
    def default_mode(self) -> Mode:
        """Train, or eval where there is no train step."""
        return (
            Mode.TRAIN
            if any(s.mode is Mode.TRAIN for s in self.steps) or not self.steps
            else Mode.EVAL
        )

    @property
    def happened(self) -> list[str]:
        """Why the trace of a black box was made: `train step 8: black box: rank 1 raised`."""
        found = (
            f"{step.mode.word} step {step.step}: {noted.note}"
            for step in self.steps
            for noted in step.notes
            if str(noted.note).startswith(BLACK_BOX)
        )
        return list(dict.fromkeys(found))

    def close(self) -> None:
        """Let go of its files: each is unmapped with the last view of it. Nothing is read of the
        trace afterwards."""
        self.setup = self.steps = ()  # each knows the trace
        self._columns = None
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
        found, seen = [], set[str]()
        for group in (*self.setup, *self.steps):
            for node in group.walk():
                seen.add(node.path)
                if (
                    glob_matches(path, node.path)
                    and (wanted_phase is None or node.phase is wanted_phase)
                    and (step is None or group.step == step)
                    and (wanted_mode is None or group.mode is wanted_mode)
                    and (micro_batch is None or node.micro_batch == micro_batch)
                ):
                    found.append(node)
        if not found and not any(glob_matches(path, name) for name in seen):
            raise nothing_matched("path", path, seen)
        return found

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
        wanted: Phase = default_phase(slot) if phase is None else named(Phase, "phase", phase)
        chosen: Mode = self.default_mode if mode is None else named(Mode, "mode", mode)
        groups = self.setup if wanted is Phase.SETUP else self.steps
        nodes = [
            node
            for group in reversed(groups)
            if group.is_setup or (group.step == step and group.mode is chosen)
            for node in group.walk()
            if node.phase is wanted
            and node.path == path
            and node.ordinal == ordinal
            and node.micro_batch in (None, micro_batch)
        ]
        if not nodes:
            if all(node.path != path for node in self.walk()):
                raise nothing_matched("path", path, (node.path for node in self.walk()))
            self._refuse_another_phase(path, slot, wanted)
            raise SelectionError(
                f"{path or '(root)'} has no {wanted.word} call in {chosen.word} step {step}, "
                f"micro-batch {micro_batch}, ordinal {ordinal}; list its calls with: "
                f"{typed('show', self.path)} --path {path!r}"
            )
        for node in nodes:
            found = node.value(slot)
            if found is not None:
                return found
        self._refuse_another_phase(path, slot, wanted)
        raise nothing_matched(
            f"slot of {path or '(root)'}", slot, (view.slot for view in nodes[0].slots)
        )

    def _refuse_another_phase(self, path: str, slot: str, wanted: Phase) -> None:
        """Raise where the slot is in other phases of the path alone; say in which."""
        phases = {
            node.phase
            for node in self.walk()
            if node.path == path and any(view.slot == slot for view in node.slots)
        }
        if phases and wanted not in phases:
            words = sorted(phase.word for phase in phases)
            raise SelectionError(
                f"{path or '(root)'} has no {slot} in phase {wanted.word}: it has it in "
                f"{' and '.join(words)}; ask with phase={words[0]!r}"
            )

    def __repr__(self) -> str:
        return f"Trace({self.path}: {extent(self.run)}, {self.state})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        import rankscope  # by the public name: rendering stands above this room

        return rankscope.report.fragment(self)


def _meshes(data: Mapping[str, Any]) -> tuple[Mesh, ...]:
    axes, shape = tuple(data["axes"]), tuple(data["shape"])
    return tuple(Mesh(axes=axes, shape=shape, ranks=tuple(ranks)) for ranks in data["over"])
