"""What a trace of one process holds: real models, real sessions, the finished tree read back."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankscope
from rankscope.record.call import Mode, Phase
from rankscope.tree.reader import Trace


class Block(nn.Module):
    """Two linears, a buffer, a keyword argument."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.relu(self.up(x))) * self.mask


class Net(nn.Module):
    """A small model with a list of blocks."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def train(
    model: nn.Module, steps: int = 2, micro_batches: int = 1, loss: nn.Module | None = None
) -> list[float]:
    """Train with SGD; return the losses."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            out = model(torch.randn(4, 8, generator=generator))
            value = loss(out, torch.zeros_like(out)) if loss is not None else out.square().mean()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def trace(
    tmp_path: Path, body: Callable[[], object], model: nn.Module | None = None, **settings: Any
) -> Trace:
    """Trace a body and open the tree."""
    with rankscope.trace(model, out=tmp_path / "trace", **settings) as handle:
        body()
    return handle.open()


def paths(trace: Trace, phase: str, step: int = 0) -> list[str]:
    """Return the paths of one phase in tree order."""
    return [node.path for node in trace.find("*", phase=phase, step=step)]


def test_a_training_step_has_every_phase_in_the_order_it_ran(tmp_path: Path) -> None:
    model = Net()
    found = trace(tmp_path, lambda: train(model))
    assert [n.path for n in found.steps[0].nodes] == ["", "", "", ""]
    assert [n.phase for n in found.steps[0].nodes] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.GRADS,
        Phase.PARAMS,
    ]
    forward = [
        "",
        "layers.0",
        "layers.0.up",
        "layers.0.down",
        "layers.1",
        "layers.1.up",
        "layers.1.down",
        "head",
    ]
    assert paths(found, "forward") == forward
    assert sorted(paths(found, "backward")) == sorted(forward)
    assert found.is_complete


def test_inputs_by_position_and_keyword_are_recorded_under_their_names(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net()))
    (node,) = found.find("layers.0", phase="forward", step=0)
    assert [view.slot for view in node.slots] == ["input.0", "input.scale", "output"]
    assert node.slots[1].dtype == "python"


def test_digests_are_those_of_the_tensors(tmp_path: Path) -> None:
    model, kept = Net(), []
    model.layers[1].up.register_forward_hook(
        lambda module, args, output: kept.append(output.detach().clone())
    )
    found = trace(tmp_path, lambda: train(model, steps=1))
    digest = found.value("layers.1.up", "output").per_rank[0]
    assert digest is not None
    assert digest.mean == pytest.approx(kept[0].double().mean().item(), rel=1e-6)
    assert digest.std == pytest.approx(kept[0].double().std().item(), rel=1e-6)
    assert digest.l2 == pytest.approx(kept[0].double().norm().item(), rel=1e-6)
    assert (digest.min, digest.max) == (kept[0].min().item(), kept[0].max().item())


def test_gradients_of_activations_and_parameters_are_the_real_ones(tmp_path: Path) -> None:
    model, gradients = Net(), {}

    def body() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        hidden = model(x)
        hidden.retain_grad()
        hidden.square().sum().backward()
        gradients.update(output=hidden.grad, x=x.grad)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients["weight"] = model.head.weight.grad.clone()
        optimizer.step()

    found = trace(tmp_path, body)
    for slot, phase, path in (("grad_output", "backward", ""), ("grad_input.0", "backward", "")):
        digest = found.value(path, slot, phase=phase).per_rank[0]
        truth = gradients["output" if slot == "grad_output" else "x"]
        assert digest is not None and digest.l2 == pytest.approx(
            truth.double().norm().item(), rel=1e-6
        )
    digest = found.value("head", "grad:weight", phase="grads").per_rank[0]
    assert digest is not None and digest.l2 == pytest.approx(
        gradients["weight"].double().norm().item(), rel=1e-6
    )


def test_micro_batches_of_an_accumulated_step_are_told_apart(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net(), steps=2, micro_batches=3))
    assert [n.micro_batch for n in found.find("head", phase="forward", step=0)] == [0, 1, 2]
    assert len(found.steps) == 2
    assert [n.micro_batch for n in found.find("head", phase="grads", step=1)] == [None]


def test_a_loss_module_is_recorded_and_counts_as_no_micro_batch(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net(), micro_batches=2, loss=nn.MSELoss()))
    losses = found.find("@MSELoss", phase="forward", step=1)
    assert [n.micro_batch for n in losses] == [0, 1]
    assert [n.micro_batch for n in found.find("", phase="forward", step=1)] == [0, 1]


def test_evaluation_is_counted_apart_and_closes_no_step(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 8))
                model(torch.ones(2, 8))
            optimizer.step()

    found = trace(tmp_path, body)
    steps = [(step.mode, step.step) for step in found.steps]
    assert [s for s in steps if s[0] is Mode.TRAIN] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    assert [s for s in steps if s[0] is Mode.EVAL] == [(Mode.EVAL, i) for i in range(4)]
    assert found.find("head", phase="grads", step=1, mode="train")


def test_inference_without_an_optimizer_counts_every_root_forward(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        with torch.inference_mode():
            for _ in range(3):
                model(torch.ones(2, 8))

    assert [(s.mode, s.step) for s in trace(tmp_path, body).steps] == [
        (Mode.EVAL, i) for i in range(3)
    ]


def test_several_optimizers_make_one_step_with_an_event_each(tmp_path: Path) -> None:
    model = Net(blocks=1)

    def body() -> None:
        first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            first.step()
            second.step()

    found = trace(tmp_path, body)
    assert [(s.mode, s.step) for s in found.steps] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    heads = [n.ordinal for n in found.find("head", phase="params", step=1)]
    blocks = [n.ordinal for n in found.find("layers.0.up", phase="params", step=1)]
    assert (blocks, heads) == ([0], [1]), "each optimizer's event holds its own parameters"


def test_setup_holds_parameters_and_buffers_as_they_were_before_the_first_forward(
    tmp_path: Path,
) -> None:
    model = Net()
    before = model.head.weight.detach().clone()
    found = trace(tmp_path, lambda: train(model), steps="1")
    digest = found.value("head", "param:weight", phase="setup").per_rank[0]
    assert digest is not None and digest.l2 == pytest.approx(
        before.double().norm().item(), rel=1e-6
    )
    assert found.value("layers.0", "buffer:mask", phase="setup").per_rank[0] is not None
    assert [(s.mode, s.step) for s in found.steps] == [(Mode.TRAIN, 1)], (
        "setup is recorded whatever the steps"
    )


def test_a_module_called_twice_and_a_shared_module_get_an_ordinal_each(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.first(x))

    found = trace(tmp_path, lambda: Twice()(torch.ones(2, 4)))
    nodes = found.find("first", phase="forward")
    assert [n.ordinal for n in nodes] == [0, 1]
    first, second = (n.value("output").per_rank[0] for n in nodes)
    assert first is not None and second is not None and first.hash != second.hash


@dataclass
class Result:
    """An output as a dataclass."""

    logits: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


def test_any_nesting_of_outputs_is_walked(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any]) -> Any:
            y = self.linear(batch["x"])
            return Result(y, {"states": [y, y + 1]}), OrderedDict(a=y)

    found = trace(tmp_path, lambda: Nested()({"x": torch.ones(2, 4), "flag": True}))
    (node,) = found.find("", phase="forward")
    assert [view.slot for view in node.slots] == [
        "input.0.x", "input.0.flag", "output.0.logits", "output.0.extra.states.0",
        "output.0.extra.states.1", "output.1.a",
    ]  # fmt: skip


def test_wrappers_leave_no_trace_in_paths(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = trace(tmp_path / "plain", lambda: train(Net()))
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    wrapped = trace(tmp_path / "wrapped", lambda: train(model))
    assert paths(wrapped, "forward") == paths(plain, "forward")
    (node,) = wrapped.find("layers.0.up", phase="forward", step=0)
    assert node.raw_path == "layers.0._checkpoint_wrapped_module.up"
    assert "layers.0.up" in paths(wrapped, "recompute")


def test_the_largest_root_is_the_root_and_others_are_named_by_their_class(tmp_path: Path) -> None:
    small, large = nn.Linear(8, 8), Net()

    def body() -> None:
        with torch.no_grad():
            large(small(torch.ones(2, 8)))

    found = trace(tmp_path, body)
    assert [n.class_name for n in found.find("", phase="forward")] == ["Net"]
    assert found.find("@Linear", phase="forward")


def test_the_model_given_to_trace_is_the_root_however_small(tmp_path: Path) -> None:
    small, large = nn.Linear(8, 8), Net()

    def body() -> None:
        with torch.no_grad():
            large(small(torch.ones(2, 8)))

    found = trace(tmp_path, body, small)
    assert [n.class_name for n in found.find("", phase="forward")] == ["Linear"]
    assert found.find("@Net", phase="forward")


def test_an_in_place_forward_does_not_change_the_input_that_was_recorded(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
            return x.mul_(0) + y.add_(1) * self.scale

    x, y = torch.full((3, 4), 5.0), torch.full((3, 4), 7.0)
    found = trace(tmp_path, lambda: InPlace()(x, y=y))
    first, second = found.value("", "input.0").per_rank[0], found.value("", "input.y").per_rank[0]
    assert first is not None and first.mean == 5.0
    assert second is not None and second.mean == 7.0


def test_what_a_modules_own_hooks_replace_is_seen_on_both_sides(tmp_path: Path) -> None:
    model = Net()
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 3,))
    model.head.register_forward_hook(lambda module, args, output: output * 0 + 9)
    found = trace(tmp_path, lambda: train(model, steps=2))
    for step in (0, 1):
        read = {
            slot: found.value("head", slot, step=step).per_rank[0]
            for slot in ("input.0", "output", "returned")
        }
        assert read["input.0"] is not None and read["input.0"].mean == 3
        assert read["returned"] is not None and read["returned"].mean == 9
        assert read["output"] is not None and read["output"].mean != 9


def test_an_input_replaced_by_the_roots_own_hook_is_read_again_and_keeps_its_place(
    tmp_path: Path,
) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x + y)

    model = Root()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 3, args[1]))
    found = trace(tmp_path, lambda: model(torch.ones(2, 4), torch.zeros(2, 4)))
    (node,) = found.find("", phase="forward")
    assert [view.slot for view in node.slots] == ["input.0", "input.1", "output"]
    digest = found.value("", "input.0").per_rank[0]
    assert digest is not None
    assert digest.mean == 4


def test_a_value_changed_in_place_without_a_new_version_is_seen_again(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            y.detach().numpy()[:] = 42  # no version counts this
            return self.b(y)

    found = trace(tmp_path, lambda: Shared()(torch.ones(2, 4)))
    before, after = found.value("a", "output").per_rank[0], found.value("b", "input.0").per_rank[0]
    assert before is not None and after is not None
    assert after.mean == 42 and before.hash != after.hash


def test_an_exception_in_forward_is_recorded_and_passes_through(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear(x)
            raise LookupError("no such expert")

    model = Broken()

    def body() -> None:
        for _ in range(2):
            with pytest.raises(LookupError, match="no such expert"):
                model(torch.ones(2, 4))

    found = trace(tmp_path, body)
    (node,) = found.find("", phase="forward", step=0)
    assert any("no such expert" in str(outcome) for outcome in node.outcomes)
    assert len(found.steps) == 2


def test_a_keyboard_interrupt_leaves_no_call_open_for_the_next_step(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.is_new = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if self.is_new:
                self.is_new = False
                raise KeyboardInterrupt
            return y

    model = Interrupted()

    def body() -> None:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))

    found = trace(tmp_path, body)
    (broken,) = found.find("", phase="forward", mode="train")
    (whole,) = found.find("", phase="forward", mode="eval")
    assert broken.status == "abandoned"
    assert whole.status == "returned"
    assert [child.path for child in whole.children] == ["linear"]


def test_a_scripted_module_is_opaque_and_its_parameters_are_seen(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8))), nn.Linear(8, 2))
    found = trace(tmp_path, lambda: train(model, steps=1))
    assert "0" in paths(found, "forward")
    assert found.value("0.0", "param:weight", phase="setup").per_rank[0] is not None
    assert not found.completeness["ranks"][0]["errors"]


def test_only_the_steps_paths_phases_and_slots_asked_for_are_taken(tmp_path: Path) -> None:
    found = trace(
        tmp_path,
        lambda: train(Net(), steps=4),
        steps="1,3",
        paths="layers.*",
        phases="forward",
        slots="output",
    )
    assert [s.step for s in found.steps] == [1, 3]
    nodes = list(found.walk())
    assert {n.phase for n in nodes} == {Phase.FORWARD}
    assert all(n.path.startswith("layers.") for n in nodes)
    assert {view.slot for n in nodes for view in n.slots} == {"output"}


def test_a_glob_that_matches_no_module_is_said_with_names_that_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trace(tmp_path, lambda: train(Net()), paths="layer.0,head")
    said = capsys.readouterr().err
    assert "'layer.0' matched no module" in said
    assert "layers.0" in said
    assert "'head'" not in said
    assert found.find("head")


def test_a_fused_optimizer_step_is_seen_although_it_counts_no_version(tmp_path: Path) -> None:
    model, truth = Net(), []

    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            truth.append(model.head.weight.detach().double().norm().item())

    found = trace(tmp_path, body)
    digests = [
        found.value("head", "param:weight", phase="params", step=s).per_rank[0] for s in range(3)
    ]
    assert [d.l2 for d in digests if d is not None] == pytest.approx(truth, rel=1e-6)
    assert len({d.hash for d in digests if d is not None}) == 3


def test_structure_alone_keeps_calls_and_no_values(tmp_path: Path) -> None:
    found = trace(tmp_path, lambda: train(Net()), digest="none")
    assert paths(found, "forward")[:2] == ["", "layers.0"]
    assert not any(node.slots for node in found.walk())


def test_a_step_can_be_closed_by_hand(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            model(torch.ones(2, 8)).sum().backward()
            rankscope.step()

    found = trace(tmp_path, body)
    steps = [s.step for s in found.steps]
    assert len(steps) == 4, "the first step closes by the rule, the others by hand"


@pytest.mark.parametrize("digest", ["full", "none"])
def test_losses_parameters_and_random_state_are_bitwise_the_same_with_tracing_on(
    tmp_path: Path, digest: str
) -> None:
    def run() -> tuple[list[float], list[np.ndarray], bytes]:
        torch.manual_seed(5)
        model = nn.Sequential(Net(), nn.Dropout(0.5))
        losses = train(model, steps=3, micro_batches=2)
        return (
            losses,
            [p.detach().numpy().copy() for p in model.parameters()],
            torch.get_rng_state().numpy().tobytes(),
        )

    off = run()
    with rankscope.trace(out=tmp_path / "trace", digest=digest):
        on = run()
    assert on[0] == off[0] and on[2] == off[2]
    assert all(np.array_equal(a, b) for a, b in zip(on[1], off[1], strict=True))


def test_nothing_of_ours_is_left_in_torch_or_on_the_model_afterwards(tmp_path: Path) -> None:
    from torch.nn.modules import module as hooks
    from torch.optim import optimizer as optimizers

    def registered() -> list[int]:
        tables = (
            hooks._global_forward_hooks, hooks._global_forward_pre_hooks,
            hooks._global_forward_hooks_always_called,
            hooks._global_forward_hooks_with_kwargs, optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )  # fmt: skip
        return [len(table) for table in tables]

    model = Net()
    model.head.register_forward_hook(lambda module, args, output: None)
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    own = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before = registered()
    trace(tmp_path, lambda: train(model))
    assert registered() == before
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == own


def test_an_untraced_step_runs_without_a_module_hook_after_its_first_call(tmp_path: Path) -> None:
    from torch.nn.modules import module as hooks

    seen: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks))
            return x

    trace(tmp_path, lambda: train(nn.Sequential(Net(), Spy()), steps=4), steps="1")
    assert seen == [0, 2, 0, 0]


def test_no_tensor_and_no_module_outlives_its_step_because_of_us(tmp_path: Path) -> None:
    import weakref

    kept: list[weakref.ref[Any]] = []

    def body() -> None:
        model = Net()
        out = model(torch.ones(4, 8))
        out.sum().backward()
        kept.extend([weakref.ref(out), weakref.ref(model), weakref.ref(model.head.weight)])
        del model, out
        other = Net()
        other(torch.ones(4, 8))
        gc.collect()
        assert [ref() for ref in kept] == [None, None, None]

    trace(tmp_path, body)


def test_a_failure_inside_a_hook_never_reaches_the_program_and_is_written_down(
    tmp_path: Path,
) -> None:
    class Hostile(dict[str, Any]):
        """A mapping that explodes when it is walked."""

        def items(self) -> Any:
            raise RuntimeError("do not touch")

        def keys(self) -> Any:
            raise RuntimeError("do not touch")

        def __iter__(self) -> Any:
            raise RuntimeError("do not touch")

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, bag: Any) -> torch.Tensor:
            return self.linear(x)

    found = trace(tmp_path, lambda: Takes()(torch.ones(2, 4), Hostile(a=1)))
    assert found.find("linear", phase="forward"), "the call is there all the same"


def test_settings_that_cannot_be_used_are_said_and_the_block_runs_untraced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    for settings, said in (
        ({"steps": "2-1"}, "2-1"),
        ({"out": tmp_path / "full"}, "not empty"),
        ({"colour": 1}, "colour"),
    ):
        with rankscope.trace(**{"out": tmp_path / "new", **settings}) as handle:
            ran = Net()(torch.ones(1, 8)).sum().item()
        assert handle.path is None and isinstance(ran, float)
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_attach_without_arguments_does_nothing_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKSCOPE", raising=False)
    rankscope.attach()
    from rankscope.agent.arming import current_session

    assert current_session() is None


def test_gradients_around_an_in_place_operation_are_told_apart(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    torch.manual_seed(1)
    x, kept = torch.randn(4, 8), {}

    def body() -> None:
        hidden = torch.relu(model[0](x)).detach().requires_grad_()
        model[2](hidden).square().sum().backward()
        kept["after"] = hidden.grad
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().sum().backward()

    found = trace(tmp_path, body, phases="forward,backward")
    last = found.steps[-1].step
    digest = found.value("2", "grad_input.0", phase="backward", step=last).per_rank[0]
    assert digest is not None
    assert digest.l2 == pytest.approx(kept["after"].double().norm().item(), rel=1e-6)
    digest = found.value("1", "grad_output", phase="backward", step=last).per_rank[0]
    assert digest is not None
    assert digest.l2 == pytest.approx(kept["after"].double().norm().item(), rel=1e-6)


def test_a_model_saved_or_copied_inside_a_traced_step_carries_nothing_of_ours(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import copy
    import io

    model = nn.Sequential(Net(), nn.Linear(3, 3))
    model[1].register_forward_hook(print_nothing)
    model[1].register_forward_pre_hook(print_nothing)

    def body() -> None:
        x = torch.randn(2, 8, requires_grad=True)
        out = model(x)
        out.sum().backward()
        torch.save(x, io.BytesIO())
        torch.save(model, io.BytesIO())
        twin = copy.deepcopy(model)
        assert [len(m._forward_hooks) for m in twin] == [0, 1]
        assert [len(m._forward_pre_hooks) for m in twin] == [0, 1]

    found = trace(tmp_path, body)
    assert found.find("1", phase="forward")
    assert not [w for w in recwarn if "hook" in str(w.message)]


def print_nothing(*arguments: object) -> None:
    """A hook that can be pickled."""


def test_memory_taken_from_under_a_tensor_is_not_read(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *freed: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    whole, shrunk = torch.ones(100), torch.ones(100)
    view = whole[10:]
    whole.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(16)
    found = trace(tmp_path, lambda: Takes()(torch.ones(2, 4), view, shrunk))
    for slot in ("input.1", "input.2"):
        assert found.value("", slot).per_rank[0] is None
    assert found.value("", "input.0").per_rank[0] is not None


def test_an_optimizer_step_that_raises_does_not_stop_the_counting_of_steps(tmp_path: Path) -> None:
    model = Net()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def broken() -> float:
            raise LookupError("no loss")

        for step in range(4):
            model(torch.ones(2, 8)).sum().backward()
            if step == 1:
                with pytest.raises(LookupError):
                    optimizer.step(broken)
            optimizer.step()

    assert [s.step for s in trace(tmp_path, body).steps] == [0, 1, 2, 3]
