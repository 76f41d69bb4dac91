"""Steps that no module call shows: optimizers and their parameters, steps that a GradScaler
skipped, runs of pipeline schedules, and train steps that torch.compile hides from hooks.

A skipped step runs no hook of torch's, and all forwards of a run of a schedule belong to one step,
which nothing else tells where no optimizer steps. So functions of ours stand in the place of
torch's for a while (`StandIns`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.modules import parameters_of_module
from rankscope.agent.pythonstack import calls_running, frames_here
from rankscope.capture.dtypestorage import number_on_host
from rankscope.capture.torch_internals.compiling import dynamo_has_compiled, run_compiled_eagerly
from rankscope.capture.torch_internals.distributed import pipeline_schedules
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.notes import Note, NoteKind

_Function = Callable[..., Any]


class StandIns:
    """Replaces attributes of classes and operators, and puts the originals back."""

    def __init__(self) -> None:
        self._restores: dict[tuple[int, str], Callable[[], None]] = {}
        self.is_on = False

    def replace(self, owner: Any, name: str, around: Callable[[_Function], _Function]) -> None:
        """Replace a function by `around(original)`, once, if this torch has it."""
        # as it stands in the class: `getattr` would put a plain function back for a staticmethod
        attribute = vars(owner).get(name)
        if attribute is None or (id(owner), name) in self._restores:
            return
        original = getattr(owner, name)
        stand_in = functools.update_wrapper(around(original), original)
        setattr(owner, name, stand_in)

        def restore() -> None:
            if vars(owner).get(name) is stand_in:
                setattr(owner, name, attribute)

        self._restores[id(owner), name] = restore
        self.is_on = True

    def uninstall(self) -> None:
        """Restore the originals. If other code has replaced a function since, ours is still called,
        and then does nothing but call the original."""
        self.is_on = False
        restores, self._restores = self._restores, {}
        for restore in restores.values():
            restore()


_MAKING = ("__init__", "__setstate__")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which parameters belong to which owner at one optimizer's step; all by identity."""

    owned: frozenset[int]
    """Parameters of known roots that this optimizer holds."""
    unheld: frozenset[int]
    """Parameters of known roots that no living optimizer holds."""
    strangers: tuple[torch.Tensor, ...]
    """Parameters of no known root that it holds: flattened, sharded or replaced ones."""


OptimizersById = weakref.WeakValueDictionary[int, torch.optim.Optimizer]
"""Living optimizers by identity: a user's class may define equality without a hash."""


class OptimizerSearch(StandIns):
    """Knows the living optimizers of this process, made before or after attaching. Later ones are
    seen in `__init__`, copies and unpickled ones in `__setstate__`. For earlier ones the heap is
    searched, once, if torch has marked the `step` of a class as hooked, as it does with the first
    object of a class."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._optimizers = OptimizersById()
        self._made = guard.hook(self.saw)
        self._may_have_missed = False
        """An optimizer may be alive that was made before `install`."""

    def install(self) -> None:
        """See every optimizer that is made from now on."""
        if self.is_on:
            return
        self._may_have_missed = any(_has_been_made(cls) for cls in _optimizer_classes())
        for name in _MAKING:
            self.replace(torch.optim.Optimizer, name, self._around)

    def _around(self, original: Callable[..., None]) -> Callable[..., None]:
        def making(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.is_on:
                self._made(optimizer)

        return making

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizers.get(id(optimizer)) is optimizer

    def exists(self) -> bool:
        """True where an optimizer is alive."""
        return len(self._optimizers) > 0 or self._finds_earlier()

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that steps: its class may not call torch's constructor."""
        self._optimizers[id(optimizer)] = optimizer

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of every optimizer found so far."""
        for optimizer in self._alive():
            yield from parameters_of(optimizer)

    def _alive(self) -> list[torch.optim.Optimizer]:
        references = self._optimizers.valuerefs()  # at once: another thread may make one
        return [optimizer for reference in references if (optimizer := reference()) is not None]

    def holder_of(self, parameters: frozenset[int]) -> torch.optim.Optimizer | None:
        """Return an optimizer that holds one of these parameters (identities), or None."""
        if self.exists():
            for optimizer in self._alive():
                if not parameters.isdisjoint(held_parameters(optimizer)):
                    return optimizer
        return None

    def holdings(self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> Holdings:
        """Say which of the known parameters an optimizer holds, and which nobody does."""
        optimizer_parameters = {id(parameter): parameter for parameter in parameters_of(optimizer)}
        unheld = self._unheld(parameters)
        if unheld and self._finds_earlier():
            unheld = self._unheld(parameters)
        strangers = tuple(
            tensor for key, tensor in optimizer_parameters.items() if key not in parameters
        )
        return Holdings(parameters & optimizer_parameters.keys(), unheld, strangers)

    def _unheld(self, parameters: frozenset[int]) -> frozenset[int]:
        return parameters.difference(*(held_parameters(o) for o in self._alive()))

    def _finds_earlier(self) -> bool:
        """Search the heap, once, for optimizers made before `install`; True where one was found."""
        if not self._may_have_missed:
            return False
        self._may_have_missed = False
        classes = list(_optimizer_classes())
        # every object refers to its class: the collector finds the objects of a few classes without
        # handing over all others. By type, since to ask a proxy for its __class__ may import a
        # module, or warn.
        count = len(self._optimizers)
        for candidate in gc.get_referrers(*classes):
            if any(type(candidate) is cls for cls in classes):
                self.saw(candidate)
        return len(self._optimizers) > count


def _optimizer_classes(top: type = torch.optim.Optimizer) -> Iterator[type]:
    yield top
    children: list[type] = type.__subclasses__(top)
    for child in children:
        yield from _optimizer_classes(child)


def _has_been_made(cls: type) -> bool:
    return getattr(cls.__dict__.get("step"), "hooked", False)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters in an optimizer's groups."""
    # an optimizer found while its __init__ runs has no groups yet
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def held_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the identities of all parameters in an optimizer's groups."""
    return frozenset(id(parameter) for parameter in parameters_of(optimizer))


def runs_closure(arguments: tuple[object, ...], keywords: dict[str, object]) -> bool:
    """True where `step` was called with a closure: gradients are only final after it."""
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    return closure is not None


def steps_running() -> int:
    """Return how many optimizer steps are on this thread's Python stack."""
    return calls_running("wrapper", "torch/optim/optimizer.py")


class ScalerWatch(StandIns):
    """Tells of skipped steps between `install` and `uninstall`; both may be called at any time."""

    def __init__(self, skipped: Callable[[torch.optim.Optimizer], None]) -> None:
        """`skipped` is called with an optimizer that a GradScaler did not step; must not raise."""
        super().__init__()
        self._skipped = skipped
        self._stepped = 0

    def stepped(self) -> None:
        """Take note that an optimizer step began."""
        self._stepped += 1

    def install(self) -> None:
        """Stand in `GradScaler.step`."""
        self.replace(GradScaler, "step", self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(
            scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
        ) -> Any:
            before = self._stepped
            result = original(scaler, optimizer, *args, **kwargs)
            if self.is_on and self._stepped == before:
                self._stepped += 1  # another of ours may stand around theirs, around this one
                self._skipped(optimizer)
            return result

        return step


def scaling_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of the loss scale and of the inf/NaN flag that a GradScaler passes to a
    fused optimizer, which unscales and skips in its own kernel."""
    slots = (
        (f"scaler:{name}", getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf")
    )
    return [(slot, tensor) for slot, tensor in slots if isinstance(tensor, torch.Tensor)]


def is_skipped_inside(optimizer: torch.optim.Optimizer) -> bool:
    """True where a fused optimizer is known to skip its step; on an accelerator nobody is asked."""
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, torch.Tensor):
        return False
    with invisible():
        return bool(number_on_host(found_inf))


class ScheduleWatch(StandIns):
    """Says in which run of a schedule a process is, from the first question until `uninstall`."""

    def __init__(self, begins: Callable[[object], None]) -> None:
        """`begins` is called with the schedule when a run begins, and must not raise."""
        super().__init__()
        self._begins = begins
        self._numbers = itertools.count()
        self._run: int | None = None
        self._codes: frozenset[CodeType] = frozenset()
        """Code of torch's own `step`, for runs that began before it was replaced."""
        self._is_over = False

    def current(self) -> int | None:
        """Return the number of the run that goes on, counted from 0; None outside every run."""
        if not (self.is_on or self._is_over):
            self._install()
        if self._codes and not any(frame.f_code in self._codes for frame in frames_here()):
            self._run, self._codes = None, frozenset()
        return self._run

    def uninstall(self) -> None:
        """Put the originals back, for good."""
        self._is_over = True
        super().uninstall()

    def _install(self) -> None:
        classes = pipeline_schedules()
        if not classes:
            return
        codes = (getattr(vars(cls)["step"], "__code__", None) for cls in classes)
        step_codes = frozenset(code for code in codes if code is not None)
        for cls in classes:
            self.replace(cls, "step", self._around)
        frame = next((frame for frame in frames_here() if frame.f_code in step_codes), None)
        if frame is not None:  # the first run of all: it has brought us here
            self._run, self._codes = next(self._numbers), step_codes
            self._begins(frame.f_locals.get(frame.f_code.co_varnames[0]))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(schedule: object, *args: Any, **kwargs: Any) -> Any:
            if self._is_over or self.current() is not None:
                return original(schedule, *args, **kwargs)
            self._run = next(self._numbers)
            try:
                self._begins(schedule)
                return original(schedule, *args, **kwargs)
            finally:
                self._run = None

        return step


_MOST_GRADIENTS = 1000
HIDDEN = (
    "what was compiled as a whole shows no call to hooks. Steps are counted where an optimizer "
    "steps, gradients and parameters are recorded, activations are not; --rs-compile eager runs "
    "traced steps as written and sees all"
)


EAGER_IS_ANOTHER_RUN = (
    "--rs-compile eager changes this run: traced steps run as written, so from the first of them "
    "on its numbers are not those of the compiled run (other rounding; where the model draws "
    "random numbers, as dropout does, other random numbers)"
)


class HiddenSteps:
    """Notices train steps whose root forward no hook saw because the model was compiled. A
    parameter that is updated again, with a newer gradient, has been through another train step. The
    test is by parameter: one optimizer may step group by group (ZeRO 1 and 2 of DeepSpeed), each
    group once a train step."""

    def __init__(self) -> None:
        self._moved: set[int] = set()
        """First parameter with a gradient of each optimizer step in this train step."""
        self._asked_first = OptimizersById()
        self._gradients: dict[int, tuple[weakref.ref[object], int]] = {}
        """Identity of a parameter -> proxy and version of its gradient at its last update."""

    def root_was_seen(self) -> None:
        """Note that a root forward has announced its step as usual."""
        self._moved.clear()

    def begins(self, optimizer: torch.optim.Optimizer, *, is_first: bool) -> bool:
        """True if the train step that an optimizer ends was not announced; `is_first`: no step has
        begun in this process."""
        with invisible():
            first = next(
                ((id(p), p.grad) for p in parameters_of(optimizer) if p.grad is not None), None
            )
            if first is None:
                return False
            parameter, gradient = first
            is_new = self._is_new(parameter, gradient)
        is_hidden = parameter in self._moved
        self._moved.add(parameter)
        if not dynamo_has_compiled() or not is_new:
            return False
        if is_first:
            is_hidden = self._asked_first.get(id(optimizer)) is not optimizer
            self._asked_first[id(optimizer)] = optimizer
        if is_hidden:
            self._moved = {parameter}
        return is_hidden

    def _is_new(self, parameter: int, gradient: torch.Tensor) -> bool:
        """True where a backward ran since: two steps of an optimizer may follow one backward."""
        # stands for the gradient: torch cannot swap (`Module.to`) one that has a weak reference
        proxy = gradient if gradient.layout is not torch.strided else gradient.untyped_storage()
        reference, version = self._gradients.get(parameter, (None, -1))
        is_new = reference is None or reference() is not proxy or version != gradient._version
        if len(self._gradients) > _MOST_GRADIENTS:
            self._gradients.clear()
        self._gradients[parameter] = (weakref.ref(proxy), gradient._version)
        return is_new


def outermost_modules_of(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Return the outermost living modules that own an optimizer's parameters. Walks all objects of
    the garbage collector: only for programs without a visible module call."""
    # not isinstance: asking a proxy for its __class__ may import a module, or warn
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    inside = {id(child) for module in modules for child in module._modules.values()}
    parameters = held_parameters(optimizer)
    return [
        module
        for module in modules
        if id(module) not in inside
        and any(id(p) in parameters for p in parameters_of_module(module))
    ]


class EagerStance:
    """Has compiled regions run as written while traced steps run, where the user asked for that."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._restore: Callable[[], None] | None = None

    @property
    def note(self) -> Note | None:
        """Note for a step that began in the stance; None if compiled regions run compiled."""
        return Note.of(NoteKind.RUN_EAGERLY) if self._restore else None

    def choose(self, *, is_eager: bool) -> None:
        """Begin or end it; safe to call in any state."""
        if is_eager and self._is_wanted and self._restore is None:
            self._restore = run_compiled_eagerly()
        elif not is_eager and self._restore is not None:
            restore, self._restore = self._restore, None
            restore()
