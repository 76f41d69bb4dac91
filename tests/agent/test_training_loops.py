"""The ways people train: each loop unharmed bit by bit, and what the tree says of it.

A loop is a program for `tests.unharmed`; beside what it returns it keeps the gradients and the
parameters its optimizers really saw (`Witness`), which the tree has to hold.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.tree.views import Step, Trace
from tests.noted import remarks
from tests.unharmed import traced_unharmed


class Net(nn.Module):
    """Two layers and a norm with buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def batch(rows: int = 4, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width)


def loss_of(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return model(batch() if x is None else x).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


# ---------------------------------------------------------------- the loops


def accumulates_and_clips() -> Any:
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(2):
            loss = loss_of(model) / 2
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


def follows_a_schedule() -> Any:
    """Schedulers replace `optimizer.step` on the object: torch's own hooks are inside."""
    model = Net()
    optimizer = sgd(model)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [1])
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer


def averages(ema: bool) -> Callable[[], Any]:
    def program() -> Any:
        model = Net()
        average = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None, use_buffers=ema
        )
        optimizer = sgd(model)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            return model, average, average(batch())

    return program


def closures(inner: int) -> Callable[[], Any]:
    def program() -> Any:
        model, losses = Net(), []
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=inner)
        x = batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        for _ in range(3):
            losses.append(optimizer.step(closure).item())
        return model, losses

    return program


def lightning_closure() -> Any:
    """The default of Lightning: forward, zero_grad and backward inside a closure of any
    optimizer.
    """
    model, losses = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure=closure)
    return model, losses


def fused_or_foreach(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def program() -> Any:
        model = Net()
        optimizer = kind(model.parameters(), lr=0.01, **options)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return program


def in_backward() -> Any:
    """One optimizer a parameter, stepped by a hook as soon as its gradient is there."""
    model, losses = Net(), []
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
    for hook in hooks:  # torch keeps what a hook refers to out of reach of the garbage collector
        hook.remove()
    return model, losses


def adversaries() -> Any:
    """A GAN: two models, two optimizers, and gradients that only pass through.

    The forward after the critic's step closes it: an iteration is two steps.
    """
    torch.manual_seed(5)
    maker, critic = nn.Linear(3, 6), Net()
    for_maker, for_critic = sgd(maker), sgd(critic)
    for _ in range(3):
        fake = maker(torch.randn(4, 3))
        loss = critic(fake.detach()).mean() - critic(batch()).mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        for_maker.zero_grad()
        (-critic(fake).mean()).backward()
        for_maker.step()
    return maker, critic


def repeats() -> Any:
    """`step` twice for one backward."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def penalizes_gradients() -> Any:
    """Double backward, `torch.autograd.grad`, and a graph that is walked twice."""
    model, losses = Net(), []
    optimizer = sgd(model)
    for _ in range(3):
        x = batch().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.square().mean() + slope.square().sum()
        loss.backward(retain_graph=True)
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), x.grad]
    return model, losses


def optimizer_comes_late() -> Any:
    """A forward builds the lazy parts, then the optimizer is made; it even steps once before."""
    model = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))
    model(batch())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.step()
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class SignDescent(torch.optim.Optimizer):
    """An optimizer of somebody's own: never calls `super().step`, compares by its rate."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SignDescent) and other.defaults == self.defaults

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter by its rate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign() * group["lr"])


class Nested(SignDescent):
    """Steps through its base class."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the step of the base class, which torch hooks as well."""
        super().step(closure)


def own_optimizer(kind: type[SignDescent]) -> Callable[[], Any]:
    def program() -> Any:
        model = Net()
        optimizer = kind(model.parameters(), lr=0.01)
        SignDescent(nn.Linear(2, 2).parameters(), lr=0.01)  # made so that both steps are hooked
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    return program


def raises_now_and_then() -> Any:
    """The second call of `step` fails before it has done anything, and is made again."""
    model, failures = Net(), []

    class Fails(SignDescent):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if len(failures) == 1:
                failures.append("again")
                raise ValueError("no step today")
            failures.append("fine")
            super().step(closure)

    optimizer = Fails(model.parameters(), lr=0.01)
    for _ in range(4):
        loss_of(model).backward()
        try:
            optimizer.step()
        except ValueError:
            continue
        optimizer.zero_grad()
    return model, failures


LOOPS: dict[str, tuple[Callable[[], Any], list[int], list[int]]] = {
    # program, micro-batches of each train step, optimizer steps of each
    "accumulation and clipping": (accumulates_and_clips, [2, 2, 2], [1, 1, 1]),
    "schedulers": (follows_a_schedule, [1, 1, 1], [1, 1, 1]),
    "exponential average": (averages(True), [1, 1, 1], [1, 1, 1]),
    "stochastic weight average": (averages(False), [1, 1, 1], [1, 1, 1]),
    "LBFGS": (closures(3), [3, 3, 3], [1, 1, 1]),
    "closure": (lightning_closure, [1, 1, 1], [1, 1, 1]),
    "fused Adam": (fused_or_foreach(torch.optim.Adam, fused=True), [1, 1, 1], [1, 1, 1]),
    "fused SGD": (
        fused_or_foreach(torch.optim.SGD, fused=True, momentum=0.9), [1, 1, 1], [1, 1, 1],
    ),
    "foreach Adam": (fused_or_foreach(torch.optim.Adam, foreach=True), [1, 1, 1], [1, 1, 1]),
    "foreach SGD": (fused_or_foreach(torch.optim.SGD, foreach=True), [1, 1, 1], [1, 1, 1]),
    "adversaries": (adversaries, [2, 1, 2, 1, 2, 1], [1, 1, 1, 1, 1, 1]),
    "two steps for one backward": (repeats, [1, 1, 1], [2, 2, 2]),
    "gradient penalty": (penalizes_gradients, [1, 1, 1], [1, 1, 1]),
    "late optimizer": (optimizer_comes_late, [1, 1, 1, 1], [1, 1, 1, 1]),
    "own optimizer": (own_optimizer(SignDescent), [1, 1, 1], [1, 1, 1]),
    "nested steps": (own_optimizer(Nested), [1, 1, 1], [1, 1, 1]),
}  # fmt: skip


class Witness:
    """What every outermost optimizer step was given and left, seen by hooks of torch's own."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor | None]] = []
        self.parameters: list[list[torch.Tensor]] = []
        self._depth = 0

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the gradients, unless a closure is still to make them."""
        self._depth += 1
        if self._depth == 1 and not _has_closure(args, kwargs):
            self.gradients.append(self._copies(optimizer, "grad"))

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the parameters."""
        self._depth -= 1
        if self._depth:
            return
        if _has_closure(args, kwargs):
            self.gradients.append(self._copies(optimizer, "grad"))
        self.parameters.append(self._copies(optimizer, "data"))

    def _copies(self, optimizer: torch.optim.Optimizer, what: str) -> list[Any]:
        return [
            None if (found := getattr(p, what)) is None else found.detach().clone()
            for group in optimizer.param_groups
            for p in group["params"]
        ]


@pytest.fixture(autouse=True)
def no_optimizer_stays() -> Iterator[None]:
    """Schedulers and closures make cycles: what a test left alive would count as an optimizer."""
    yield
    gc.collect()


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(value is not None for value in (*args[1:], *kwargs.values()))


@pytest.fixture
def witness() -> Iterator[Witness]:
    """Watch every optimizer step of a test."""
    seen = Witness()
    handles = [
        register_optimizer_step_pre_hook(seen.before),
        register_optimizer_step_post_hook(seen.after),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def events(found: Trace, phase: Phase) -> list[list[float | None]]:
    """Return the norms each optimizer step recorded, in order of time; None where nothing was."""
    listed = []
    for step in found.steps:
        for ordinal in sorted({n.ordinal for n in step.walk() if n.phase is phase}):
            listed.append(
                [
                    None if (digest := value.per_rank[0]) is None else digest.l2
                    for node in step.walk()
                    if node.phase is phase and node.ordinal == ordinal
                    for view in node.slots
                    if view.slot.startswith(("grad:", "param:"))
                    and (value := node.value(view.slot)) is not None
                ]
            )
    return listed


def norms(tensors: list[Any]) -> list[float | None]:
    return [None if t is None else t.double().norm().item() for t in tensors]


def agree(recorded: list[list[float | None]], truth: list[list[Any]]) -> None:
    """Hold the events to what the optimizers saw, whatever the order of parameters."""
    assert len(recorded) == len(truth)
    for ours, theirs in zip(recorded, truth, strict=True):
        expected = norms(theirs)
        assert sum(n is None for n in ours) == sum(n is None for n in expected)
        assert sorted(n for n in ours if n is not None) == pytest.approx(
            sorted(n for n in expected if n is not None), rel=1e-6
        )


def train_steps(found: Trace) -> list[Step]:
    return [step for step in found.steps if step.mode is Mode.TRAIN]


def errors(found: Trace) -> list[Any]:
    """Return what went wrong inside the hooks."""
    of_ranks = [rank["errors"] for rank in found.completeness["ranks"] if rank["errors"]]
    return of_ranks + [node.errors for node in found.walk() if node.errors]


def flags(step: Step, phase: Phase, ordinal: int = 0) -> set[tuple[str, ...]]:
    """Return the flags of the parameters or gradients of one event."""
    return {
        fold.flags
        for node in step.walk()
        if node.phase is phase and node.ordinal == ordinal
        for view in node.slots
        if view.slot.startswith(("grad:", "param:"))
        for fold in view.folds
    }


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_unharmed_its_steps_counted_and_its_updates_recorded(
    tmp_path: Path, name: str, witness: Witness
) -> None:
    program, micro_batches, updates = LOOPS[name]
    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    steps = train_steps(found)
    counted = [sum(n.phase is Phase.FORWARD and n.path == "" for n in step.nodes) for step in steps]
    assert counted == micro_batches
    assert [sum(n.phase is Phase.PARAMS for n in step.nodes) for step in steps] == updates
    traced = len(witness.gradients) // 2  # the plain run came first
    agree(events(found, Phase.GRADS), witness.gradients[traced:])
    agree(events(found, Phase.PARAMS), witness.parameters[len(witness.parameters) // 2 :])
    assert not any("unheld" in f for step in steps for f in chain(*flags(step, Phase.GRADS)))
    assert not any(remarks(step) for step in steps)


def test_an_optimizer_that_raises_is_noted_and_its_step_goes_on(tmp_path: Path) -> None:
    found = traced_unharmed(raises_now_and_then, tmp_path / "trace", steps="all")
    steps = train_steps(found)
    assert [sum(n.phase is Phase.FORWARD for n in step.nodes) for step in steps] == [1, 2, 1]
    assert [n.ordinal for n in steps[1].nodes if n.phase is Phase.GRADS] == [0, 1]
    assert [n.ordinal for n in steps[1].nodes if n.phase is Phase.PARAMS] == [1]
    assert [tuple(map(str, remarks(step))) for step in steps] == [
        (), ("rank 0: the step of Fails did not return: it raised",), (),
    ]  # fmt: skip


def test_optimizers_that_step_inside_backward_record_their_own_parameter_once(
    tmp_path: Path, witness: Witness
) -> None:
    found = traced_unharmed(in_backward, tmp_path / "trace", steps="all")
    assert not errors(found)
    assert len(train_steps(found)) == 3
    agree(events(found, Phase.GRADS), witness.gradients[18:])
    agree(events(found, Phase.PARAMS), witness.parameters[18:])


# ---------------------------------------------------------------- loss scaling


def scales(spoil: int, *, unscales_first: bool = False, **options: Any) -> Callable[[], Any]:
    """Train under a GradScaler, and spoil one iteration with an infinity."""

    def program() -> Any:
        model, scales = nn.Linear(6, 2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for iteration in range(4):
            x = batch()
            if iteration == spoil:
                x[0, 0] = torch.inf
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if unscales_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, scales

    return program


@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_step_the_scaler_skipped_goes_on_and_shows_the_gradients_it_was_skipped_for(
    tmp_path: Path, unscales_first: bool
) -> None:
    program = scales(1, unscales_first=unscales_first)
    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    steps = train_steps(found)
    forwards = [sum(n.phase is Phase.FORWARD for n in step.nodes) for step in steps]
    assert forwards == [1, 2, 1]
    assert [tuple(map(str, remarks(step))) for step in steps] == [
        (), ("rank 0: GradScaler skipped the step of SGD: inf or NaN in its gradients",), (),
    ]  # fmt: skip
    assert [n.ordinal for n in steps[1].nodes if n.phase is Phase.GRADS] == [0, 1]
    assert [n.ordinal for n in steps[1].nodes if n.phase is Phase.PARAMS] == [1]
    assert flags(steps[1], Phase.GRADS, 0) == {("skipped",)}
    assert flags(steps[1], Phase.GRADS, 1) == {()}
    spoilt = found.value("", "grad:weight", step=1, phase="grads", ordinal=0).per_rank[0]
    assert spoilt is not None and spoilt.count - spoilt.nan - spoilt.posinf - spoilt.neginf < 12


def test_a_fused_optimizer_is_shown_with_the_scale_and_what_was_found(tmp_path: Path) -> None:
    found = traced_unharmed(scales(1, fused=True), tmp_path / "trace", steps="all")
    assert not errors(found)
    steps = train_steps(found)
    assert len(steps) == 4, "its step runs, and skips inside: it ends a step like any other"
    assert [flags(step, Phase.GRADS) for step in steps] == [
        {("scaled",)}, {("scaled", "skipped")}, {("scaled",)}, {("scaled",)},
    ]  # fmt: skip
    assert flags(steps[1], Phase.PARAMS) == {("skipped",)}
    for slot, expected in (("grad_scale", [64.0, 64.0, 32.0, 32.0]), ("found_inf", [0, 1, 0, 0])):
        values = [
            found.value("", f"scaler:{slot}", step=n, phase="grads").per_rank[0] for n in range(4)
        ]
        assert [value.max for value in values if value] == expected


def test_nothing_of_ours_stays_in_the_scaler(tmp_path: Path) -> None:
    before = torch.amp.GradScaler.step
    inside: list[bool] = []

    def program() -> Any:
        result = scales(9)()
        inside.append(torch.amp.GradScaler.step is before)
        return result

    traced_unharmed(program, tmp_path / "trace", steps="0-1")
    assert inside == [True, True], "nor in a step that is not traced"
    assert torch.amp.GradScaler.step is before


# ---------------------------------------------------------------- no optimizer, or not of this
