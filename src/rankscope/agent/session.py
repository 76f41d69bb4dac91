"""One session: from the first module call of a process to its end record.

The session opens and closes; `Stepping` begins and ends steps and turns hooks on and off; the
tracer records calls, and the parameter events whole roots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace

from torch import nn

from rankscope.agent.guard import MAX_FAILURES, Guard, say, text_of
from rankscope.agent.hooks.calls import CallOptions, CallValues, Scope
from rankscope.agent.hooks.install import Perturbation
from rankscope.agent.hooks.modules import ModuleInfo
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.pythonstack import Raised, uncaught
from rankscope.agent.recorder import DefinitionWriter, Recorder
from rankscope.agent.steps.chosen import Agreement
from rankscope.agent.steps.optimizers import EAGER_IS_ANOTHER_RUN, HIDDEN
from rankscope.agent.steps.stepping import Stepping
from rankscope.agent.steps.updates import Updates
from rankscope.agent.values.rootevents import RootEvents
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.describe import Describer
from rankscope.capture.torch_internals.compiling import dynamo_has_compiled
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.globs import glob_matches, without_wrappers
from rankscope.record.notes import Note, NoteKind
from rankscope.record.ranks import EndReason, RankIdentity
from rankscope.run.processes import forget_in_children
from rankscope.settings import Settings
from rankscope.spool.writer import SpoolWriter

_Call = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSpool:
    """A spool that was opened for this process, its identity already written."""

    identity: RankIdentity
    writer: SpoolWriter
    recorder: Recorder
    agreement: Agreement = field(default_factory=Agreement)
    make_tensor_store: Callable[[], TensorStore | None] = lambda: None
    is_launched: bool = False
    """A rankscope launcher reports how the trace ended."""


class Session:
    """Traces this process into one spool until it is closed."""

    def __init__(
        self,
        settings: Settings,
        start: Callable[[], OpenedSpool | None],
        preferred_root: nn.Module | None = None,
        options: CallOptions | None = None,
    ) -> None:
        """`start` opens the spool at the first root forward; None where this process is not traced.
        `preferred_root` is the module with path "", by default the largest root called."""
        self._settings = settings
        self._options = options or CallOptions()
        self._start = start
        self._beginning = threading.RLock()
        """Held to open the session or begin a step: several threads may run forwards."""
        self._opened_spool: OpenedSpool | None = None
        self._is_open = False
        """Set when the spool is open and everything that depends on it exists."""
        self._is_closed = False
        self.guard = Guard(self._failed)
        self._step = self.guard.hook(self._step_now)
        self._perturbation = Perturbation(settings.perturb) if settings.perturb else None
        self._steps = steps = Stepping(settings, self.guard, self._open, self.close)
        self._hooks, self._table = steps.hooks, steps.table
        if preferred_root is not None:
            steps.preferred.append(preferred_root)
        forget_in_children(self)

    def _open(self) -> bool:
        """Open the spool at the first call that matters; False where this process is not traced."""
        if self._is_open:
            return True
        with self._beginning:
            return self._is_open or self._open_now()

    def _open_now(self) -> bool:
        if self._is_closed:
            return False
        start, self._start = self._start, lambda: None  # once, even where it fails
        opened = start()
        if opened is None:
            self.disarm(is_inside_hook=True)
            return False
        self._opened_spool = opened
        self._record_into(opened)
        preferred, self._steps.preferred = self._steps.preferred, []
        for module in preferred:
            self._prefer(module)
        # last of all: threads look at it without the lock, and then use what was made above
        self._is_open = True
        speaks = self._rank == min(self._settings.ranks or (0,))
        if speaks and self._settings.compile == "eager":
            say(EAGER_IS_ANOTHER_RUN)
        if speaks and self._settings.perturb:
            say(
                f"--rs-perturb {self._settings.perturb}: what the model is given is off by "
                "roundings; take this run for `rankscope diff --noise` alone"
            )
        return True

    def _record_into(self, opened: OpenedSpool) -> None:
        settings, steps, table = self._settings, self._steps, self._table
        self._rank, self._recorder = opened.identity.rank, opened.recorder
        recorder = opened.recorder
        recorder.batch_dim = settings.batch_dim
        values = self._values = ValueReader(
            recorder, Describer(self._rank), settings, opened.make_tensor_store
        )
        definitions = self._definitions = DefinitionWriter(recorder, table)
        call_values = CallValues(self.guard, recorder, values, settings, self._options)
        tracer = self._tracer = Tracer(
            recorder, definitions, call_values, self._hooks, settings, self._begin_scope,
            steps.sides.called,
        )  # fmt: skip
        events = RootEvents(table, recorder, values, definitions, settings.phases)
        updates = Updates(events, steps.optimizers, call_values.gradients)
        steps.open(self._rank, tracer, events, updates, opened.agreement)

    def _begin_scope(self, info: ModuleInfo, module: nn.Module) -> Scope | None:
        with self._beginning:
            scope = self._steps.open_scope(info, module)
            if scope is None or scope.is_muted or self._options.is_forward_wanted(module):
                return scope
            return replace(scope, is_muted=True)

    def close(self, reason: EndReason = EndReason.EXIT, raised: Raised | None = None) -> None:
        """End the open step, commit the end record and take every hook off; safe to call again."""
        if self._is_closed:
            self._hooks.remove_all()  # which a hook could only ask for
            return
        self.disarm()
        opened = self._opened_spool
        if opened is None or not self._is_open:
            if opened is not None:  # what records into it could not be made
                opened.writer.close(reason)
            if dynamo_has_compiled():
                say(f"nothing was traced: {HIDDEN}")
            return
        if raised is not None:
            self._tracer.raised(uncaught())
        # the hooks are off by now: what follows waits for accelerators, and other threads may still
        # train
        self._steps.end_steps()
        self._values.collect(wait=True)
        self._steps.define_groups()
        tensor_store = self._values.tensor_store
        self._report_unmatched_globs(tensor_store)
        if tensor_store is not None:
            with invisible():
                tensor_store.close()
        if reason is not EndReason.SWITCHED_OFF:  # which says why itself
            self._report_no_step(is_launched=opened.is_launched)
        self._steps.chosen.close()
        if raised is not None:
            self._recorder.define("raised", **asdict(raised))
        opened.writer.close(reason)

    def _report_unmatched_globs(self, tensor_store: TensorStore | None) -> None:
        """Say which globs of the setting `paths` matched no module: likely they are misspelt."""
        paths = self._table.paths()
        globs = [glob for glob in self._settings.paths if glob not in ("*", "**")]
        unmatched = [g for g in globs if not any(glob_matches(g, path) for path in paths)]
        for glob in self._taking_nothing("paths", unmatched, globs):
            near = ", ".join(sorted(paths - {""})[:5]) or "none at all"
            note = Note.of(NoteKind.UNMATCHED_GLOB, glob=glob, near=near)
            self._recorder.error(None, note)
            if self._rank == 0:
                say(f"{note} Globs match the whole path: write '*.name' or 'layers.0.*'")

        tensor_globs = {} if tensor_store is None else tensor_store.unmatched_globs
        for glob in self._taking_nothing("tensors", tensor_globs, self._settings.tensors or ()):
            text = f"tensors: {glob!r} took nothing: no traced slot of any module has that name"
            self._recorder.not_kept(glob, text)
            if self._rank == 0:
                say(f"{text}. Write path:slot, such as 'layers.0.*:output' or '**:param:*'")

    def _taking_nothing(
        self, setting: str, unmatched: Collection[str], globs: Collection[str]
    ) -> list[str]:
        """Return the globs that took nothing in any reading; say which were read without names of
        wrappers."""
        plain = {glob: without_wrappers(glob) for glob in (*globs, *unmatched)}
        added = {plain[glob] for glob in globs if plain[glob] != glob}
        for glob in unmatched if self._rank == 0 else ():
            if plain[glob] not in unmatched:
                say(f"{setting}: {glob!r} was read as {plain[glob]!r}: paths have no wrappers")
        return [
            glob
            for glob in unmatched
            if (plain[glob] in unmatched if plain[glob] != glob else glob not in added)
        ]

    def _report_no_step(self, *, is_launched: bool) -> None:
        machine = self._steps.machine
        note = self._steps.chosen.none_traced(machine.train, machine.eval)
        if note is not None:
            self._recorder.error(None, note)
            if self._rank == 0 and not is_launched:
                say(str(note))

    def disarm(self, *, is_inside_hook: bool = False) -> None:
        """Stop without a word in the spool, as in a forked child or a process not to be traced."""
        self._is_closed = True
        if self._perturbation is not None:
            self._perturbation.remove()
        self._steps.remove_hooks(is_inside_hook=is_inside_hook)
        if self._is_open:
            self._tracer.close_native()

    def forget_in_child(self) -> None:
        """Stop in a forked child, which is no part of the trace."""
        self.disarm()

    def step(self) -> None:
        """Close the current train step by hand; never raises."""
        self._step()

    def _step_now(self) -> None:
        self._steps.machine.step()
        if not self._is_closed:
            self._hooks.watch_for_step()

    def _failed(self, error: Exception) -> None:
        if self._is_closed:
            return
        if not self._is_open:
            self.disarm()
            say(f"not tracing: {text_of(error)}")
            opened = self._opened_spool or self._start()
            if opened is not None:  # else a trace without a record would call itself complete
                opened.recorder.error(None, text_of(error)[:500])
                opened.writer.close(EndReason.SWITCHED_OFF)
            return
        self._recorder.error(self._tracer.current_sequence(), text_of(error)[:500])
        if self.guard.failures >= MAX_FAILURES:
            say(
                f"tracing is switched off on rank {self._rank} after {MAX_FAILURES} "
                f"failures, last: {text_of(error)}"
            )
            self.close(EndReason.SWITCHED_OFF)

    # ------------------------------------------------------------------ several models

    def prefer(self, module: nn.Module) -> None:
        """Make one more module a root, parameters or not, unless it lives in one."""
        with self._beginning, invisible():
            if self._is_open:
                self._prefer(module)
            else:
                self._steps.preferred.append(module)

    def _prefer(self, module: nn.Module) -> None:
        self._table.prefer(module)
        self._definitions.write_contained()

    def place_of(self, module: nn.Module) -> tuple[int, str]:
        """Return the number of the root of a module, 0 for none so far, and its path there."""
        info = self._table.get(module)
        if info is None:
            return 0, ""
        return (0 if info.root is None else info.root.definition), info.path

    def settle(self) -> None:
        """Have everything on disk that calls which have ended left behind."""
        if self._is_open:
            self._values.collect(wait=True)

    # ------------------------------------------------------------------ calls that no hook sees

    def call(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], forward: _Call
    ) -> object:
        """Call a module's `forward` as `Module.__call__` does, without the module's own hooks: for
        programs that call `forward` themselves, unseen by torch's hooks."""
        self._hooks.enter(module, args, kwargs)
        ended: tuple[object, ...] = (None,)  # as torch tells a hook that `forward` raised
        try:
            output = forward(*args, **kwargs)
            ended = (kwargs, output)
        finally:
            self._hooks.leave(module, args, *ended)
        return output
