"""Programs as people write them, each small, self-contained and the same at every run: what
`tests.unharmed` runs plain and traced.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

from tests.models import Two

__all__ = ["step_through"]


def step_through(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None, steps: int = 2
) -> list[Any]:
    """Train for some steps; return all that counts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = [model, optimizer]
    for _ in range(steps):
        loss = (call or model)(torch.randn(3, 8)).square().mean()
        loss.backward()
        seen.append([loss.detach(), *[p.grad.clone() for p in model.parameters()
                                      if p.grad is not None]])  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return seen


# ---------------------------------------------------------------- several models


def evaluation_between_steps() -> Any:
    """A validation loop after every train step."""
    model, seen = Two(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train()
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen += [model(torch.randn(3, 8)) for _ in range(2)]
    return model, seen


def teacher_and_student() -> Any:
    """A larger teacher, frozen in one step and under no_grad in the other."""
    teacher, student, seen = Two(), nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(2):
        teacher.requires_grad_(step == 1)
        x = torch.randn(3, 8)
        with torch.set_grad_enabled(step == 0):
            target = teacher(x)
        loss = nn.functional.mse_loss(student(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss)
    return teacher, student, seen


def generator_and_discriminator() -> Any:
    """A GAN: two roots, two optimizers, two optimizer steps per round."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic, losses = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), []
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for _ in range(2):
        fake = generator(torch.randn(5, 4))
        of_critic.zero_grad()
        loss = critic(torch.randn(5, 8)).mean() - critic(fake.detach()).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        other = -critic(fake).mean()
        other.backward()
        of_generator.step()
        losses += [loss, other]
    return generator, critic, of_generator, of_critic, losses


# ---------------------------------------------------------------- how modules are called and kept


def submodules_called_directly() -> Any:
    """Submodules from outside, then the model."""
    model = Two()
    return step_through(model, lambda x: model.b(model.a(x)) + model(x))


def modules_added_and_replaced() -> Any:
    """One module more after the first forward, and another in the place of one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen = [step_through(model, steps=1)]
    model.append(nn.Linear(8, 8))
    seen.append(step_through(model, steps=1))
    model[0] = nn.Sequential(nn.Linear(8, 8))
    seen.append(step_through(model, steps=1))
    return seen


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding((x[:, :4].abs() * 5).long().clamp(max=9))))


def tied_weights() -> Any:
    """One parameter under two names."""
    return step_through(Tied())


def a_copy_in_the_middle() -> Any:
    """An average of the weights, as a deep copy taken between forward and backward."""
    model, seen = Two(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.randn(3, 8)).sum()
        average = copy.deepcopy(model)
        loss.backward()
        optimizer.step()
        seen.append(average(torch.randn(3, 8)))
    return model, average, seen


class Fan(nn.Module):
    """Runs its parts in threads, as DataParallel does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Two() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}

        def run(index: int) -> None:
            found[index] = self.parts[index](x)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([found[i] for i in range(3)])


def parts_in_threads() -> Any:
    """Threads inside forward."""
    return step_through(Fan())


def whole_forwards_in_threads() -> Any:
    """Threads that call one model at the same time."""
    model, found = Two(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 8)).sum().backward()

    def run(index: int) -> None:
        found[index] = model(torch.full((2, 8), float(index)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(found[i].sum() for i in range(3)).backward()
    optimizer.step()
    return model, [found[i] for i in range(3)]


def thousands_of_children() -> Any:
    """A flat model of many modules."""
    return step_through(nn.Sequential(*(nn.Identity() for _ in range(1500)), nn.Linear(8, 8)),
                        steps=1)  # fmt: skip


# ---------------------------------------------------------------- odd classes


class Slotted(Two):
    """Has `__slots__`."""

    __slots__ = ("extra",)


class Proud(Two):
    """Whose properties and dunders must not be asked."""

    @property
    def module(self) -> nn.Module:
        raise RuntimeError("asked for")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = nn.Module.__hash__

    def __len__(self) -> int:
        raise RuntimeError("measured")

    def __bool__(self) -> bool:
        raise RuntimeError("tested")

    def __repr__(self) -> str:
        raise RuntimeError("shown")


class Delegating(Two):
    """Hands unknown names on to a part of it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("a"), name)


class Doubling(nn.Linear):
    """Does something in `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class Keeping(nn.Module):
    """Modules under odd names, and parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"a b/c": nn.Linear(8, 8), "__metadata__": nn.Linear(8, 8)})
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.mapped = nn.ParameterDict({"q/é": nn.Parameter(torch.ones(8))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.named.values():
            x = module(x)
        return x * self.listed[0] * self.mapped["q/é"]


class Odd(nn.Module):
    """All of them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.proud, self.delegating = Slotted(), Proud(), Delegating()
        self.doubling, self.keeping = Doubling(8, 8), Keeping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slotted(self.proud(self.delegating(x)))
        return self.keeping(self.doubling(x))


def odd_classes() -> Any:
    """Slots, properties, `__getattr__`, `__call__`, names that are no names."""
    return step_through(Odd())


def lazy_modules() -> Any:
    """Parameters that do not exist before the first forward."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d())
    first = model(torch.randn(3, 8))
    return first, step_through(model)


def parametrized() -> Any:
    """Weights computed anew at every access, from others."""
    return step_through(
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
        )
    )


class Recurrent(nn.Module):
    """LSTM, GRU, a cell and a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.gru, self.cell = nn.GRU(8, 8, bidirectional=True), nn.LSTMCell(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(x.unsqueeze(1))
        y, _ = self.gru(y)
        h, c = self.cell(y[:, 0])
        packed, _ = self.lstm(pack_sequence([x[:2], x[:1]]))
        return h + c + packed.data.sum()


def recurrent() -> Any:
    """What returns tuples of tuples, and named tuples."""
    return step_through(Recurrent())


class Attending(nn.Module):
    """nn.Transformer, batch norm, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.norm, self.conv = nn.BatchNorm1d(8), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(self.inner(x[None], x[None])[0]).unsqueeze(1))


def transformer() -> Any:
    """torch's own transformer, with dropout."""
    return step_through(Attending())


def transformer_in_inference() -> Any:
    """Its fast path in evaluation, which runs no module of its layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        return model, model(torch.randn(2, 3, 8))


def in_place() -> Any:
    """Modules that overwrite their input."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(0.1))
    return step_through(model)


# ---------------------------------------------------------------- inputs


@dataclass
class Batch:
    """An input as a dataclass."""

    x: torch.Tensor
    extra: dict[str, Any]


class Reading(nn.Module):
    """Takes a batch in any form, and gives it back among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Any, **more: Any) -> Any:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return {"y": self.linear(x), "batch": batch, "more": more}


def nested_inputs() -> Any:
    """A dict of dicts and a dataclass, by position and by keyword."""
    model = Reading()

    def call(x: torch.Tensor) -> torch.Tensor:
        first = model({"x": x, "deep": {"list": [x, (x, None, "text")]}}, flag=True)
        return model(Batch(first["y"], {"mask": x > 0}), mask=x)["y"]

    return step_through(model, call)


def thousands_of_inputs() -> Any:
    """An input of 5,000 keys."""
    model = Reading()

    def call(x: torch.Tensor) -> torch.Tensor:
        batch = {f"k{i}": torch.full((1,), float(i)) for i in range(5000)}
        return model({"x": x, **batch})["y"]

    return step_through(model, call, steps=1)


# ---------------------------------------------------------------- hooks of the user


def hooks_of_the_user() -> Any:
    """Every kind of module hook, some that replace, one that comes and goes during the step."""
    log: list[Any] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    first, relu, third, last = model
    first.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    first.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True, prepend=True
    )
    first.register_forward_hook(lambda m, args, kwargs, out: out * 3, with_kwargs=True)
    third.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 2,))
    third.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 0.5,))
    last.register_full_backward_hook(lambda m, inputs, out: log.append(inputs[0].sum().item()))
    last.register_forward_hook(lambda m, args, out: log.append(out.sum().item()), always_call=True)
    relu.register_full_backward_hook(lambda m, inputs, outputs: None)
    model.register_forward_hook(lambda m, args, out: out.clone())
    model.register_full_backward_hook(lambda m, inputs, outputs: None)
    handles = []

    def comes_and_goes(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        handles.pop().remove()
        handles.append(third.register_forward_hook(lambda m, args, out: out + 1))

    handles.append(third.register_forward_hook(comes_and_goes))
    return step_through(model, steps=3), log


def global_hooks_of_the_user() -> Any:
    """The same for all modules at once."""
    from torch.nn.modules import module as torchs

    log: list[str] = []
    handles = [
        torchs.register_module_forward_pre_hook(lambda m, args: (args[0] + 1,)),
        torchs.register_module_forward_hook(lambda m, args, out: out * 1.5),
        torchs.register_module_full_backward_hook(lambda m, i, o: log.append(type(m).__name__)),
    ]
    try:
        return step_through(Two()), log
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- functions over models


def functional_calls() -> Any:
    """torch.func over a model, and then an ordinary step of it."""
    from torch.func import functional_call, grad, jacrev, jvp, vmap

    model = Two()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    seen = [
        grad(loss)(parameters, torch.randn(3, 8)),
        vmap(grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 3, 8)),
        vmap(model)(torch.randn(4, 3, 8)),
        jacrev(model)(torch.randn(8)),
        jvp(model, (torch.randn(8),), (torch.randn(8),)),
    ]
    return seen, step_through(model, steps=1)


def other_graphs() -> Any:
    """A module as torch.fx, jit.trace and jit.script write it down, while a step is traced."""
    model = Two()
    forms = nn.ModuleDict(
        {
            "fx": torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(model))),
            "traced": torch.jit.trace(model, torch.ones(2, 8)),
            "scripted": torch.jit.script(model),
        }
    )

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forms, self.head = forms, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(sum(form(x) for form in self.forms.values()))

    code = [forms["fx"].code, str(forms["traced"].graph), str(forms["scripted"].graph)]
    return [line.split("torch_mangle")[0] for line in code[0].splitlines()], step_through(All())
