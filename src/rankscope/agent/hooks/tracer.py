"""The hooks themselves: what happens when a module's forward begins and ends in a traced step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.guard import describe_error, do_nothing
from rankscope.agent.hooks.calls import (
    CallStacks,
    CallValues,
    EventPlace,
    NodeMap,
    NodeSpan,
    OpenCall,
    Scope,
)
from rankscope.agent.hooks.install import HookSet
from rankscope.agent.hooks.modules import ModuleInfo, Root
from rankscope.agent.pythonstack import has_left, keyword_arguments, module_calls_running
from rankscope.agent.recorder import DefinitionWriter, Recorder
from rankscope.capture.torch_internals.autograd import (
    current_graph_task,
    next_node,
    stops_recomputation,
)
from rankscope.capture.torch_internals.compiling import (
    CAPTURE_FLAGS,
    is_being_captured,
    is_compiled_graph,
    is_jit_tracing,
)
from rankscope.capture.torch_internals.tensors import function_modes, invisible
from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.settings import Settings


class Tracer:
    """Follows module calls while hooks are on; `open_scope` says what an outermost one means."""

    def __init__(
        self,
        recorder: Recorder,
        definitions: DefinitionWriter,
        call_values: CallValues,
        hooks: HookSet,
        settings: Settings,
        open_scope: Callable[[ModuleInfo, nn.Module], Scope | None],
        calls_side: Callable[[Root | None, Root], None],
    ) -> None:
        """`open_scope` returns the scope of an outermost call, None if the call is not traced;
        `calls_side` learns of modules of one root that call one of another."""
        self._recorder = recorder
        self._define = definitions.of
        self._table = definitions.table
        self._call_values, self._values = call_values, call_values.values
        self._hooks = hooks
        self._wants_forward = Phase.FORWARD.word in settings.phases
        self._wants_recompute = Phase.RECOMPUTE.word in settings.phases
        self._open_scope = open_scope
        self._calls_side = calls_side
        self._stacks = CallStacks()
        self._scopes: list[Scope] = []
        """Root forwards of this step, for the modules that checkpointing runs again."""
        self._compiled_in_place: dict[Root, tuple[ModuleInfo, ...]] = {}
        self.nodes: NodeMap | None = None
        """Where the graph's nodes were made; None while nobody asks."""
        before, after, self.close_native = self._native_hooks()
        hooks.follow_with(
            before=before,
            after=after,
            own_input=self.own_input_hook,
            own_output=self.own_output_hook,
        )

    # ------------------------------------------------------------------ the native way

    def _native_hooks(self) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
        """Return the hooks that take the begins and ends of calls, and what closes them: native
        ones, which leave what is out of the ordinary to those of Python, or those of Python."""
        parts = self._values.native_parts()
        if parts is None or not self._wants_forward:
            return self.before_forward, self.after_forward, do_nothing
        kernel, memory, in_flight = parts
        things = (
            memory.address, self._call_values.wants_backward,
            self, self._call_values, self._values, self._recorder, *self._recorder.native_parts(),
            in_flight, self._table.infos, self._stacks, object.__new__, OpenCall, Phase.FORWARD,
            torch.Tensor, nn.Parameter, torch.strided, function_modes, current_graph_task,
            torch.is_grad_enabled, next_node, tuple.__new__, NodeSpan, is_jit_tracing, sys.modules,
            CAPTURE_FLAGS,
        )  # fmt: skip
        return kernel.hooks(things) or (self.before_forward, self.after_forward, do_nothing)

    # ------------------------------------------------------------------ hooks

    def before_forward(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
    ) -> None:
        """Global forward pre-hook: a call begins. torch hands it no kwargs: they are looked up."""
        # what is enqueued during a capture becomes part of the program's graph, and runs with every
        # replay
        if is_being_captured():
            return
        frames = self._stacks.frames
        top = frames[-1] if frames else None
        # Decided before a step may begin: hooks put on a module now are not run for this call of
        # it.
        is_followed = module._forward_pre_hooks and self._hooks.stands_behind_inputs_of(module)
        info = self._table.get(module)
        if info is None:
            if is_compiled_graph(module):
                return
            with invisible():
                if top is None:
                    info = self._table.learn(module, None)
                else:
                    info = self._table.learn(module, top.info.root, top.module, top.scope)
        if top is not None and info.root is not None and info.root.module() is module:
            # a root inside other calls is rare: mostly the call around it was left by a
            # KeyboardInterrupt, which no hook hears of
            top = self._without_abandoned()
        in_backward = current_graph_task() != -1
        if top is not None:
            scope: Scope | None = top.scope
            if info.root is not None and info.root is not top.info.root:
                self._calls_side(top.scope.root, info.root)
        elif in_backward:  # checkpointing re-runs a module: never a root
            scopes = (scope for scope in reversed(self._scopes) if info in scope.forward_calls)
            scope = next(scopes, None)
        else:
            scope = self._open_scope(info, module)
            # not a moment longer than the root runs: a model that is saved or copied between two
            # forwards must carry nothing of ours
            if scope is not None and not scope.is_muted and info.root is not None:
                self._hooks.trace_own_hooks_of(self._table.with_hooks(info.root))
            if scope is not None and (not self._scopes or self._scopes[-1] is not scope):
                self._scopes.append(scope)
        if scope is None:
            return
        parent = top.sequence if top is not None else None
        if in_backward and info in scope.forward_calls:
            phase, calls, is_wanted = Phase.RECOMPUTE, scope.recompute_calls, self._wants_recompute
        else:
            phase, calls, is_wanted = Phase.FORWARD, scope.forward_calls, self._wants_forward
        if (
            scope.is_muted or info.is_wrapper or not info.is_selected or not is_wanted
            or (top is not None and _is_wrapped_by(top.info, info))
        ):  # fmt: skip
            frames.append(OpenCall(module, info, scope, phase, parent, False))
            if self.nodes is not None:
                self.nodes.begin(frames[-1])
            return
        # counted in the scope, not in the module: micro-batches on several threads count apart
        calls[info] = ordinal = calls.get(info, -1) + 1
        root = info.root
        sequence = self._recorder.enter(
            info.definition or self._define(info), root.definition if root is not None else 0,
            parent,
            scope.mode, scope.step, scope.micro_batch, phase, ordinal,
        )  # fmt: skip
        frame = OpenCall(module, info, scope, phase, sequence, True, ordinal)
        if phase is Phase.FORWARD and scope.mode is Mode.TRAIN and not torch.is_grad_enabled():
            scope.without_gradients[info, ordinal] = (sequence, set())
        frames.append(frame)
        if self.nodes is not None:
            self.nodes.begin(frame)
        if self._values.is_on and not is_followed:
            self._call_values.inputs_at_global_hook(frame, module, args, kwargs)

    def own_input_hook(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
    ) -> None:
        """Instance pre-hook behind a module's own pre-hooks: reads the inputs that `forward`
        receives. torch passes no kwargs if this very call began the step and put the hook on
        again."""
        frames = self._stacks.frames
        if not (frames and frames[-1].module is module and frames[-1].is_recorded):
            return
        if self._values.is_on:
            kwargs = (keyword_arguments() or {}) if kwargs is None else kwargs
            self._call_values.read_inputs(frames[-1], args, kwargs)

    def after_forward(self, module: nn.Module, args: tuple[object, ...], *result: object) -> None:
        """Global forward hook. `result` is (kwargs, output), or one item where forward raised."""
        stacks = self._stacks
        frames = stacks.frames
        if frames and frames[-1].module is module:
            # the common case without a search: calls nest, unless an exception passed by some hook
            frame: OpenCall | None = frames.pop()
        else:
            closed_frames = stacks.pop(module)
            frame = closed_frames[0] if closed_frames else None
            # the innermost first, as they would have ended
            for lost in reversed(closed_frames[1:]):
                self._abandon(lost)
        is_hooked = module._forward_hooks and self._hooks.stands_behind_outputs_of(module)
        # the root has returned: a model that is saved or copied now carries nothing of ours
        if not frames:
            self._hooks.leave_modules()
        if frame is None:
            return
        if self.nodes is not None:
            self.nodes.end(frame)
        if len(result) == 1:
            self.raised(sys.exc_info()[1])
        # the module's own hooks run behind this one: they may issue collectives, or replace the
        # output
        stacks.last_ended = frame if is_hooked and len(result) == 2 else None
        if not frame.is_recorded or frame.sequence is None:
            return
        if len(result) == 1:
            error = sys.exc_info()[1]
            if error is not None and stops_recomputation(error):
                self._recorder.exit(frame.sequence, CallStatus.STOPPED)
            else:
                text = describe_error(error) if error is not None else ""
                self._recorder.exit(frame.sequence, CallStatus.RAISED, text)
            return
        if self._values.is_on:
            self._call_values.finish(frame, args, result[0], result[1])
        if frame.phase is Phase.FORWARD and not frame.info.path and frame.info.root is not None:
            self._note_compiled_in_place(frame, frame.info.root)
        self._recorder.exit(frame.sequence)

    def raised(self, error: BaseException | None) -> None:
        """Mark the call that ended last as raised if one of its own forward hooks raised. It was
        written as returned, because our hook behind those never ran. The traceback distinguishes
        this from an exception that the program caught."""
        frame, self._stacks.last_ended = self._stacks.last_ended, None
        if error is None or frame is None or not frame.is_recorded or frame.sequence is None:
            return
        if has_left(error, frame.module):
            self._recorder.exit(frame.sequence, CallStatus.RAISED, describe_error(error))

    def _note_compiled_in_place(self, frame: OpenCall, root: Root) -> None:
        scope = frame.scope
        if root not in self._compiled_in_place:
            self._compiled_in_place[root] = self._table.compiled_in_place(root)
        for info in self._compiled_in_place[root]:
            if info not in scope.forward_calls:
                self._not_entered(info, frame.sequence, scope.mode, scope.step, scope.micro_batch)

    def own_output_hook(self, module: nn.Module, args: object, output: object) -> None:
        """Instance forward hook behind a module's own hooks: what the caller really gets."""
        frame, self._stacks.last_ended = self._stacks.last_ended, None
        if frame is None or frame.module is not module:
            return
        if self.nodes is not None:
            self.nodes.end(frame)
        if not (frame.is_recorded and self._values.is_on) or frame.sequence is None:
            return
        self._call_values.returned(frame, output)

    def note_hidden_root(self, info: ModuleInfo, step: int) -> None:
        """Leave a call without values for a root whose forward in this step no hook saw."""
        assert info.root is not None  # only roots own parameters
        if self._wants_forward:
            self._not_entered(info, None, Mode.TRAIN, step, info.root.calls_in_step)

    def _not_entered(
        self, info: ModuleInfo, parent: int | None, mode: Mode, step: int, micro_batch: int | None
    ) -> None:
        if info.is_selected and info.root is not None:
            sequence = self._recorder.enter(
                self._define(info), info.root.definition, parent, mode, step, micro_batch,
                Phase.FORWARD, 0,
            )  # fmt: skip
            self._recorder.exit(sequence, CallStatus.NOT_ENTERED)

    # ------------------------------------------------------------------ bookkeeping

    def _without_abandoned(self) -> OpenCall | None:
        """Close the calls that ended without a hook (KeyboardInterrupt); return the innermost left.
        Looks at the Python stack: for a root inside other calls alone."""
        frames = self._stacks.frames
        running = module_calls_running() - 1
        while len(frames) > max(running, 0):
            self._abandon(frames.pop())
        return frames[-1] if frames else None

    def _abandon(self, frame: OpenCall) -> None:
        if frame.is_recorded and frame.sequence is not None:
            self._recorder.exit(frame.sequence, CallStatus.ABANDONED)

    def end_step(self) -> None:
        """Forget what belongs to the step: hooks on leaves, tensors seen, scopes of its calls."""
        self._call_values.end_step()
        self._compiled_in_place.clear()
        self._scopes.clear()
        self._stacks.last_ended = None

    def frame_around(self) -> OpenCall | None:
        """Return the innermost module call around this thread, the module's own hooks included."""
        stacks = self._stacks
        ended = stacks.last_ended
        if ended is not None and self._hooks.stands_behind_outputs_of(ended.module):
            return ended
        return stacks.frames[-1] if stacks.frames else None

    def place_in(
        self, info: ModuleInfo, scope: Scope, sequence: int | None, issuer: str
    ) -> EventPlace | None:
        """Return a place inside a module call; None where that is not traced."""
        if scope.is_muted:
            return None
        root = info.root
        return EventPlace(
            self._define(info), root.definition if root is not None else 0, sequence,
            scope.mode, scope.step, scope.micro_batch, issuer, info.is_selected, info.path,
        )  # fmt: skip

    def current_sequence(self) -> int | None:
        """Return the call now open on this thread, None outside every call."""
        frames = self._stacks.frames
        return frames[-1].sequence if frames else None


def _is_wrapped_by(outer: ModuleInfo, inner: ModuleInfo) -> bool:
    """True where the outer module was compiled around this one, with the compiler switched off."""
    return outer.is_opaque and outer.root is inner.root and outer.path == inner.path
