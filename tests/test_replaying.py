"""`replay`: a module of one's own, handed the inputs of a recorded call."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankscope
from rankscope.errors import LayoutError, ReplayError, SelectionError
from rankscope.replaying import Replay
from tests.distributed import global_tensors_job
from tests.distributed.pool import RankPool
from tests.lab.distributed import forms_job


class Scale:
    """An argument that no text stands for."""

    def __init__(self, by: float) -> None:
        self.by = by


class Mixer(nn.Module):
    """Takes arguments of every kind, and gives several outputs."""

    def __init__(self, *, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=epsilon)
        self.fc = nn.Linear(8, 8)

    def forward(
        self,
        x: Tensor,
        pair: tuple[Tensor, Tensor],
        *,
        mask: Tensor | None = None,
        power: float = 1.0,
        dtype: torch.dtype | None = None,
        more: dict[str, Tensor] | None = None,
        scale: Scale | None = None,
    ) -> dict[str, object]:
        assert dtype is torch.float32
        cos, sin = pair
        y = self.fc(self.norm(x * cos)) * sin * power
        y = y + more["bias"] if more else y
        y = y * scale.by if scale else y
        return {"y": y, "picked": y.argmax(-1), "none": mask}


class Net(nn.Module):
    """A mixer, a norm with running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.batch, self.drop = Mixer(), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.plain, self.calls = nn.Linear(8, 8), 0
        self.opaque = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        turned = x.t().contiguous().t()
        extra = {"bias": torch.ones(8)}
        pair = (torch.cos(x), torch.sin(x))
        made = self.mixer(turned, pair, power=2.0, dtype=torch.float32, more=extra)
        other = self.opaque(x, pair, dtype=torch.float32, scale=Scale(3.0))
        return self.plain(self.drop(self.batch(made["y"]))) + self.plain(x) + other["y"]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two train steps and one of eval, all tensors kept but those of `batch`."""
    model = net()
    kept = ",".join([":*", "mixer*", "plain", "opaque", "drop:output"])
    with rankscope.trace(model, out=tmp_path_factory.mktemp("r") / "t", tensors=kept) as handle:
        for _ in range(2):
            model(torch.randn(6, 8)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(6, 8))
    assert handle.path is not None
    return handle.path


def test_the_module_that_was_recorded_gives_what_was_recorded(trace: Path) -> None:
    report = rankscope.replay(net().mixer, trace, "mixer", step=1)
    assert report.agrees
    assert [(each.slot, each.error, each.unequal) for each in report.outputs] == [
        ("output.y", 0.0, 0),
        ("output.picked", 0.0, 0),
    ]
    assert report.text.splitlines()[:2] == [
        "agrees: mixer, forward of train step 1, micro-batch 0, given the inputs of rank 0",
        "  output.y  float32[6, 8]  every element is the recorded one",
    ]
    assert rankscope.replay(net().mixer, trace, "mixer", mode="eval").agrees
    again = rankscope.replay(net().plain, trace, "plain", ordinal=1, rank=0)
    assert (again.agrees, again.notes) == (True, ())
    assert "call 1" in again.text


def test_a_module_with_another_constant_is_off_by_so_much_and_there(trace: Path) -> None:
    torch.manual_seed(0)
    wrong = Mixer(epsilon=1e-1)
    report = rankscope.replay(wrong, rankscope.open_trace(trace), "mixer")
    first = report.outputs[0]
    assert not report.agrees
    assert first.tolerance == 5e-6
    recorded = rankscope.open_trace(trace).value("mixer", "output.y").local(0).double()
    given = rankscope.open_trace(trace)
    x = given.value("mixer", "input.0").local(0)
    pair = tuple(given.value("mixer", f"input.1.{at}").local(0) for at in (0, 1))
    with torch.no_grad():
        own = wrong(x, pair, power=2.0, dtype=torch.float32, more={"bias": torch.ones(8)})[
            "y"
        ].double()
    assert first.error == pytest.approx(float((own - recorded).norm() / recorded.norm()), rel=1e-9)
    at = np.unravel_index(int((own - recorded).abs().argmax()), (6, 8))
    assert f"most at [{at[0]}, {at[1]}]: " in first.text
    assert report.text.startswith("differs: mixer, ")
    assert rankscope.replay(wrong, trace, "mixer", tolerance=10.0).outputs[0].agrees


def test_other_weights_are_told_apart_from_other_code(trace: Path) -> None:
    model = net()
    assert rankscope.replay(model.plain, trace, "plain").notes == ()
    with torch.no_grad():
        model.plain.weight.mul_(1.01)
    report = rankscope.replay(model.plain, trace, "plain")
    assert not report.agrees
    assert report.notes == (
        "1 of 2 parameters are not those that were recorded before the step (weight): "
        "the module has other weights",
    )
    torch.manual_seed(0)
    assert rankscope.replay(Mixer(epsilon=1e-1), trace, "mixer").text.count("note: ") == 0


def test_nothing_of_the_module_or_of_random_numbers_is_changed(trace: Path) -> None:
    model = net().eval()
    model.drop.train()
    model(torch.ones(6, 8)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    versions = [buffer._version for buffer in model.buffers()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert not rankscope.replay(model, trace, "").agrees, "dropout draws other numbers"
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert [buffer._version for buffer in model.buffers()] == versions
    assert (model.training, model.batch.training, model.drop.training) == (False, False, True)
    assert model.calls == 1
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, now)) and gradients


def test_a_module_in_another_dtype_has_the_tolerance_of_that_dtype(trace: Path) -> None:
    half = net().plain.bfloat16()
    with pytest.raises(ReplayError, match=r"Linear raised RuntimeError: .* cast them with dtype="):
        rankscope.replay(half, trace, "plain")
    found = rankscope.replay(half, trace, "plain", dtype=torch.bfloat16).outputs[0]
    assert found.agrees and 1e-4 < found.error < found.tolerance == 2.4e-2
    assert "though bfloat16" in found.text


def test_what_cannot_be_replayed_is_said_with_what_to_do(trace: Path) -> None:
    model = net()
    with pytest.raises(SelectionError, match=r"trace again with --rs-tensors 'batch:"):
        rankscope.replay(model.batch, trace, "batch")
    with pytest.raises(SelectionError, match=r"drop:input.0 was not kept.*--rs-tensors 'drop:\*'"):
        rankscope.replay(model.drop, trace, "drop")
    with pytest.raises(ReplayError, match=r"argument scale of opaque .*arguments=\{'scale': "):
        rankscope.replay(model.opaque, trace, "opaque")
    assert rankscope.replay(model.opaque, trace, "opaque", arguments={"scale": Scale(3.0)}).agrees
    with pytest.raises(SelectionError, match="plain"):
        rankscope.replay(model.plain, trace, "plane")
    with pytest.raises(SelectionError, match="plain has no forward call in train step 5"):
        rankscope.replay(model.plain, trace, "plain", step=5)
    with pytest.raises(SelectionError, match="rank 3 did not call plain"):
        rankscope.replay(model.plain, trace, "plain", rank=3)
    with pytest.raises(ReplayError, match="names position 4"):
        rankscope.replay(model.plain, trace, "plain", arguments={4: None})


def test_another_kind_of_output_is_a_difference(trace: Path) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor, *others: object, **named: object) -> Tensor:
            return x[:, :2]

    report = rankscope.replay(Other(), trace, "plain")
    assert not report.agrees
    assert report.outputs[0].text == "the module gave float32[6, 2]"
    report = rankscope.replay(Other(), trace, "mixer", arguments={1: None})
    assert report.outputs[0].text == "the module gave no such output; it gave output"
    assert report.notes == ("not in the trace: output",)


class Gives(nn.Module):
    """Gives an output of one kind."""

    kinds: ClassVar[dict[str, Callable[[Tensor], object]]] = {
        "tensor": lambda y: y,
        "empty": lambda y: y[:0],
        "empty among others": lambda y: (y, None, y[:0].long(), 3),
        "none": lambda y: None,
        "text": lambda y: "tanh",
        "nothing": lambda y: (),
    }

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> object:
        return self.kinds[self.kind](self.fc(x))


class GivesAll(nn.Module):
    """One module of each kind, and one that gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Gives, Gives.kinds))

    def forward(self, x: Tensor) -> object:
        first, *_ = [part(x) for part in self.parts]
        return first


def test_outputs_without_an_element_agree_and_outputs_that_are_no_tensors_are_said(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = GivesAll()
    with rankscope.trace(model, out=tmp_path / "t", tensors="**"):
        model(torch.randn(6, 8)).sum().backward()
    part = {kind: (model.parts[n], f"parts.{n}") for n, kind in enumerate(Gives.kinds)}

    def replayed(kind: str, recorded: str | None = None) -> Replay:
        module, path = part[kind][0], part[recorded or kind][1]
        return rankscope.replay(module, tmp_path / "t", path)

    report = replayed("empty")
    assert report.agrees
    assert report.outputs[0].text == "there is no element to compare"
    report = replayed("empty among others")
    assert report.agrees and len(report.outputs) == 2
    assert report.notes == ("not compared, because it is not a tensor: output.3 = 3",)
    assert not replayed("tensor", recorded="empty").agrees
    assert replayed("none", recorded="empty").outputs[0].text.endswith("it gave no tensor")
    texts = {"none": "output = None", "text": "output = 'tanh'", "nothing": "nothing"}
    for kind, text in texts.items():
        with pytest.raises(SelectionError, match=f"gave no tensor in forward .*recorded: {text}"):
            replayed(kind)


def test_global_tensors_of_tensor_parallel_ranks_are_handed_to_a_whole_module(
    ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "tp"
    ranks.run(global_tensors_job.run, "tp", str(out), "", world_size=2)
    model = global_tensors_job.net()
    report = rankscope.replay(model.down, out, "down")
    assert report.agrees
    assert report.ranks == (0, 1)
    assert report.outputs[0].error < 1e-6
    with torch.no_grad():
        model.down.weight.mul_(2.0)
    wrong = rankscope.replay(model.down, out, "down")
    assert not wrong.agrees
    assert wrong.notes[0].startswith("1 of 2 parameters are not those that were recorded")


def test_each_data_parallel_rank_is_replayed_alone_or_all_batches_joined(
    ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "ddp"
    ranks.run(forms_job.train, "ddp", str(out), "**", world_size=2)
    torch.manual_seed(7)
    model = forms_job.Told()
    alone = rankscope.replay(model, out, "", rank=1)
    assert alone.agrees and alone.ranks == (1,)
    joined = rankscope.replay(model, out, "")
    assert joined.agrees and joined.outputs[0].shape == (8, 6)
    assert any("batches joined along dim 0" in note for note in joined.notes)


def test_pieces_in_an_unknown_layout_are_refused_with_the_words_of_this_call(
    ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "hand"
    ranks.run(global_tensors_job.run, "by hand", str(out), "", world_size=4)
    with pytest.raises(
        LayoutError, match=r"Take one rank's with rank=0, or declare how .*layouts="
    ):
        rankscope.replay(global_tensors_job.net().up, out, "up")


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="str is not a module: give the torch module"):
        rankscope.replay("fc", tmp_path, "fc")  # type: ignore[arg-type]
