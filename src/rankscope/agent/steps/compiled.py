"""Train steps that torch.compile hides from hooks, and how to run as written instead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.hooks.members import parameters_of_module
from rankscope.agent.steps.optimizersearch import OptimizersById, held_parameters, parameters_of
from rankscope.capture.invisible import invisible
from rankscope.capture.torch_internals.compiling import dynamo_has_compiled, run_compiled_eagerly
from rankscope.record.notes import Note, NoteKind

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
    """Notices the train steps whose root forward no hook saw: the model was compiled. A parameter
    that an optimizer moves again, with a gradient that came since, has been through another train
    step. Parameters and not optimizers are asked: one optimizer may step group by group (ZeRO 1 and
    2 of DeepSpeed), each group once a train step."""

    def __init__(self) -> None:
        self._moved: set[int] = set()
        """First parameter with a gradient of each optimizer step since a train step began."""
        self._asked_first = OptimizersById()
        self._gradients: dict[int, tuple[weakref.ref[object], int]] = {}
        """Identity of a parameter -> proxy and version of its gradient when it was last moved."""

    def root_was_seen(self) -> None:
        """Note that a root forward has announced its step as usual."""
        self._moved.clear()

    def begins(self, optimizer: torch.optim.Optimizer, *, is_first: bool) -> bool:
        """True where nothing announced the train step that an optimizer ends; `is_first`: the
        process has begun none before."""
        with invisible():
            found = next(
                ((id(p), p.grad) for p in parameters_of(optimizer) if p.grad is not None), None
            )
            if found is None:
                return False
            parameter, gradient = found
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
        known, version = self._gradients.get(parameter, (None, -1))
        is_new = known is None or known() is not proxy or version != gradient._version
        if len(self._gradients) > _MOST_GRADIENTS:
            self._gradients.clear()
        self._gradients[parameter] = (weakref.ref(proxy), gradient._version)
        return is_new


def outermost_modules_of(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Return the outermost living modules that own what an optimizer moves: walks all objects of
    the garbage collector, for where no call of a module was ever seen."""
    # not isinstance: asking a proxy for its __class__ may import a module, or warn
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    inside = {id(child) for module in modules for child in module._modules.values()}
    held = held_parameters(optimizer)
    return [
        module
        for module in modules
        if id(module) not in inside and any(id(p) in held for p in parameters_of_module(module))
    ]


class EagerStance:
    """Has compiled regions run as written while traced steps run, where the user asked for that."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._restore: Callable[[], None] | None = None

    @property
    def note(self) -> Note | None:
        """What a step says that began under it; None where compiled regions run compiled."""
        return Note.of(NoteKind.RUN_EAGERLY) if self._restore else None

    def choose(self, *, is_eager: bool) -> None:
        """Begin or end it; safe to call in any state."""
        if is_eager and self._is_wanted and self._restore is None:
            self._restore = run_compiled_eagerly()
        elif not is_eager and self._restore is not None:
            restore, self._restore = self._restore, None
            restore()
