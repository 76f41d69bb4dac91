"""Right programs that look wrong: each raised an alarm once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.models import Elastic, Headed, Writes


def rests(out: str) -> None:
    """A backbone that stands still, by its learning rate, while the head warms up."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    backbone, head = model.module
    groups = [{"params": backbone.parameters(), "lr": 0.0}, {"params": head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_group_with_a_learning_rate_of_zero_may_stay_where_it_is(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, rests, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def begins_small(rate: float, norms_rate: float, out: str) -> None:
    """A warm-up whose first steps are smaller than the spacing of numbers beside 1."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 6))
    )
    first, norm, last = model.module
    groups = [
        {"params": [*first.parameters(), *last.parameters()], "lr": rate},
        {"params": norm.parameters(), "lr": norms_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_weights_of_one_may_stay_where_a_step_is_less_than_their_spacing(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, begins_small, 1e-8, 1e-8, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def test_weights_of_one_that_stay_in_a_larger_step_are_named(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, begins_small, 1e-6, 1e-12, folder=tmp_path)
    assert {(each.kind, each.path) for each in report.findings} == {(Kind.PARAMETER, "1")}


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).masked_fill(padding[:, None, :], float("-inf"))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.scores, self.out = nn.Linear(6, 6), Attends(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.out(self.scores(self.query(x), padding).softmax(-1) @ x)


def pads(out: str) -> None:
    """Batches of which one alone, on one rank, holds padding."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Padded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(3):
            padding = torch.zeros(4, 5, dtype=torch.bool)
            if step > 0 and dist.get_rank():
                padding[2, 3:] = True
            model(torch.randn(4, 5, 6), padding).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_mask_that_some_batches_alone_have_is_a_warning_once(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, pads, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    (found,) = report.findings
    assert (found.severity, found.path, found.step) == (Severity.WARNING, "scores", 1)


class Local(nn.Module):
    """A feed-forward that each rank has for itself, with a norm as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x))


def has_its_own(out: str) -> None:
    """A shared embedding and output; between them what each rank has for itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6), Local(), nn.Linear(6, 6))
    torch.manual_seed(1 + dist.get_rank())
    model[1].up.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shared = [*model[0].parameters(), *model[2].parameters()]
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randint(0, 12, (3, 4))).square().mean().backward()
            for parameter in shared:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


def test_a_norm_beside_weights_that_each_rank_has_for_itself_is_one_of_them(
    ranks: RankPool, tmp_path: Path
):
    assert not report_of(ranks, has_its_own, folder=tmp_path).findings


class Probed(nn.Module):
    """A head that nothing trains, whose scores are gathered to be looked at; with `is_handed` they
    also weigh the output, without their gradient.
    """

    def __init__(self, is_handed: bool) -> None:
        super().__init__()
        self.body, self.probe, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.is_handed = is_handed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        scores = self.probe(x)
        pieces = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, scores)
        return self.out(torch.cat(pieces) if self.is_handed else x)


def probes(is_handed: bool, out: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Probed(is_handed), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_head_that_the_loss_does_not_use_may_be_gathered(ranks: RankPool, tmp_path: Path):
    assert not report_of(ranks, probes, False, folder=tmp_path).findings


def test_a_head_whose_gathered_output_the_loss_uses_without_its_graph_is_named(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, probes, True, folder=tmp_path)
    places = {(found.kind, found.path, found.slot) for found in report.findings}
    for name in ("weight", "bias"):
        assert (Kind.PARAMETER, "probe", f"param:{name}") in places


def train_apart(way: str, out: str) -> None:
    """Steps with gradients of each rank; in between the ranks bring their parameters together, by
    shares that are not the same, out of what all gathered, or with the neighbour alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            flat = nn.utils.parameters_to_vector(model.parameters()).detach()
            if way == "shares":
                flat *= 2 * (1 + rank) / (world * (world + 1))
                dist.all_reduce(flat)
            elif way == "gathered":
                parts = [torch.empty_like(flat) for _ in range(world)]
                dist.all_gather(parts, flat)
                flat = torch.stack(parts).mean(0)
            elif way == "neighbour":
                other = torch.empty_like(flat)
                sides = [
                    dist.P2POp(dist.isend, flat, rank ^ 1),
                    dist.P2POp(dist.irecv, other, rank ^ 1),
                ]
                for work in dist.batch_isend_irecv(sides):
                    work.wait()
                flat = (flat + other) / 2
            nn.utils.vector_to_parameters(flat, model.parameters())


@pytest.mark.parametrize("way", ["shares", "gathered", "neighbour"])
def test_ranks_that_train_apart_may_bring_their_parameters_together_in_any_way(
    ranks: RankPool, tmp_path: Path, way: str
):
    report = report_of(ranks, train_apart, way, folder=tmp_path, world=4)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings
    assert any("train apart" in note for note in report.notes)


def test_ranks_that_train_apart_and_bring_nothing_together_are_named(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, train_apart, "none", folder=tmp_path)
    assert report.verdict is Verdict.FAULT
    assert report.origins[0].kind is Kind.GRADIENT


def test_what_messages_brought_is_not_counted_as_undeclared_too(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, train_apart, "neighbour", folder=tmp_path)
    assert report.alone >= report.undeclared


def pads_collectives(is_used: bool, out: str) -> None:
    """Parts that ranks gather, of which the last is memory that nobody has written."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            own = torch.full((3, 6), float("nan")) if rank == world - 1 else torch.ones(3, 6)
            parts = [torch.empty(3, 6) for _ in range(world)]
            dist.all_gather(parts, own)
            if is_used:
                model.module.weight.grad[:3] *= parts[-1]
            optimizer.step()
            optimizer.zero_grad()


def test_what_only_pads_a_collective_may_be_no_number(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, pads_collectives, False, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert {(found.severity, found.step) for found in report.findings} == {(Severity.WARNING, 0)}


def test_what_pads_a_collective_and_is_used_is_named(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, pads_collectives, True, folder=tmp_path)
    assert report.origins[0].kind is Kind.NONFINITE
    assert report.origins[0].ranks == (1,)


def replaces_its_model(out: str) -> None:
    """A model that is made anew, while the old one lives and has the gradients of its last step."""
    kept = []
    with rankscope.trace(out=out, steps="all"):
        for _ in range(2):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            torch.manual_seed(1 + dist.get_rank())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
            kept.append(model)
            del optimizer


def test_gradients_of_a_model_that_was_replaced_need_no_optimizer(ranks: RankPool, tmp_path: Path):
    assert not report_of(ranks, replaces_its_model, folder=tmp_path).findings


def gathers_before_it_begins(out: str) -> None:
    """FSDP2's parameters are whole when they are first seen, and shards from the first step on."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        model.unshard()
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_shards_that_were_whole_when_they_were_first_seen_are_no_replicas(
    ranks: RankPool, tmp_path: Path
):
    assert not report_of(ranks, gathers_before_it_begins, folder=tmp_path).findings


def measures_the_whole_batch(is_wrapped: bool, out: str) -> None:
    """A model is trained on parts of a batch, and its copy is handed all parts on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    copied, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(out=out, steps="all"):
        for _ in range(2):
            parts = [torch.empty(4, 6) for _ in range(dist.get_world_size())]
            own = torch.randn(4, 6)
            dist.all_gather(parts, own)
            wrapped(torch.cat(parts) if is_wrapped else own).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                copied(torch.cat(parts))


def test_a_model_beside_the_wrapped_one_may_be_handed_the_same_on_all_ranks(
    ranks: RankPool, tmp_path: Path
):
    assert not report_of(ranks, measures_the_whole_batch, False, folder=tmp_path).findings


def test_a_wrapped_model_that_is_handed_the_same_on_all_ranks_is_warned_of(
    ranks: RankPool, tmp_path: Path
):
    (found,) = report_of(ranks, measures_the_whole_batch, True, folder=tmp_path).findings
    assert (found.kind, found.severity) == (Kind.DUPLICATE, Severity.WARNING)


class ReducesWhatNoNumberTells(nn.Linear):
    """Reduces a tensor without elements, and numbers whose squares no float holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            dist.all_reduce(x.new_empty(0), op)
        large = torch.full((64, 64), 1e37) * (1 + dist.get_rank())
        dist.all_reduce(large)
        dist.all_reduce(large.double() * 1e270)
        return super().forward(x)


def reduces_what_no_number_tells(out: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(ReducesWhatNoNumberTells(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rankscope.trace(out=out, steps="all"):
        model(torch.randn(4, 3) + dist.get_rank()).square().mean().backward()
        optimizer.step()


def test_a_reduction_whose_numbers_are_not_known_is_left_alone(ranks: RankPool, tmp_path: Path):
    assert not report_of(ranks, reduces_what_no_number_tells, folder=tmp_path).findings


def receives_ahead(steps: str, out: str) -> None:
    """A pipeline by hand whose second stage posts the receive of the next step in this one."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def posted() -> tuple[torch.Tensor, dist.Work]:
        tensor = torch.empty(4, 8)
        return tensor, dist.irecv(tensor, 0)

    with rankscope.trace(model, out=out, steps=steps):
        following = posted() if rank == 1 else None
        for step in range(6):
            if rank == 0:
                sent, gradient = model(torch.randn(4, 8)), torch.empty(4, 8)
                dist.send(sent.detach(), 1)
                dist.recv(gradient, 1)
                sent.backward(gradient)
            else:
                received, work = following
                work.wait()
                following = posted() if step < 5 else None
                model(received.requires_grad_()).square().mean().backward()
                dist.send(received.grad, 0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("steps", ["2-3", "every:2", "all"])
def test_a_receive_may_be_posted_in_a_step_that_is_not_traced(
    ranks: RankPool, tmp_path: Path, steps: str
):
    report = report_of(ranks, receives_ahead, steps, folder=tmp_path)
    assert not report.findings


def trains_a_model_of_its_own(way: str, out: str) -> None:
    """One rank trains a small model besides, with an optimizer of its own."""
    torch.manual_seed(0)
    rank, model, private = dist.get_rank(), nn.Linear(6, 6), nn.Linear(6, 3)
    shared = DistributedDataParallel(model) if way == "wrapped" else model
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (shared, private))
    torch.manual_seed(1 + rank)
    with rankscope.trace(shared, out=out, steps="2-6" if way == "late" else "all"):
        for step in range(5):
            shared(torch.randn(4, 6)).square().mean().backward()
            for parameter in model.parameters() if way != "wrapped" else ():
                if way != "forgets" or step:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                private(torch.randn(4, 6)).square().mean().backward()
                own.step()
                own.zero_grad()


@pytest.mark.parametrize("way", ["wrapped", "reduced", "late"])
def test_ranks_need_not_take_equally_many_optimizer_steps(
    ranks: RankPool, way: str, tmp_path: Path
):
    report = report_of(ranks, trains_a_model_of_its_own, way, folder=tmp_path)
    assert not report.findings
    assert any("rank 1 stepped another model than other ranks" in note for note in report.notes)


def test_what_ranks_forgot_before_their_steps_go_apart_is_named(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, trains_a_model_of_its_own, "forgets", folder=tmp_path)
    assert {each.step for each in report.findings} == {0}
    assert report.findings[0].kind is Kind.GRADIENT


def trains_heads(is_faulty: bool, out: str) -> None:
    """By hand: the trunk's gradients are averaged; with a fault not those of its bias."""
    torch.manual_seed(0)
    model = Headed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for name, parameter in model.trunk.named_parameters():
                if not (is_faulty and name == "bias"):
                    dist.all_reduce(parameter.grad)
            optimizer.step()


def test_a_head_of_each_rank_may_have_a_bias_that_began_alike(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, trains_heads, False, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def test_beside_such_a_head_a_gradient_that_is_not_reduced_is_named(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, trains_heads, True, folder=tmp_path)
    assert [(f.kind, f.path, f.slot) for f in report.origins] == [
        (Kind.GRADIENT, "trunk", "grad:bias")
    ]


def draws_to_a_center(is_faulty: bool, out: str) -> None:
    """Elastic averaging: workers train apart, and a centre that no optimizer holds follows their
    mean; with a fault each rank's own worker."""
    torch.manual_seed(0)
    model = Elastic()
    worker, center = model.worker, model.center
    optimizer = torch.optim.SGD(worker.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(3):
            optimizer.zero_grad()
            model.train()(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            for mine, shared in zip(worker.parameters(), center.parameters()):
                way = (mine - shared).detach()
                mean = way.clone()
                if not is_faulty:
                    dist.all_reduce(mean)
                with torch.no_grad():
                    mine.sub_(0.3 * way)
                    shared.add_(0.3 * mean)
            with torch.no_grad():
                model.eval()(torch.ones(2, 6))


def test_workers_drawn_to_a_center_train_apart(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, draws_to_a_center, False, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN


def test_a_center_that_each_rank_moves_by_itself_is_named(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, draws_to_a_center, True, folder=tmp_path)
    places = {(finding.kind, finding.path.partition(".")[0]) for finding in report.findings}
    assert (Kind.REPLICA, "center") in places
    assert len([path for kind, path in places if kind is Kind.GRADIENT]) == 1


def trains_on_what_it_wrote(is_wrapped: bool, out: str) -> None:
    """Generation under no_grad by the bare model, a reference model, an evaluation between."""
    torch.manual_seed(0)
    model = Writes()
    reference = copy.deepcopy(model).requires_grad_(False)
    wrapped = DistributedDataParallel(model) if is_wrapped else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            ids = torch.randint(9, (4, 3))
            with torch.no_grad():
                for _ in range(2):
                    ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
                reference(ids)
            optimizer.zero_grad()
            for rows in ids.chunk(2):
                wrapped(rows).log_softmax(-1).mean().backward()
            if not is_wrapped:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            with torch.no_grad():
                wrapped(torch.randint(9, (3, 3)))


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_data_parallel_job_is_never_told_to_declare_layouts(
    ranks: RankPool, tmp_path: Path, is_wrapped: bool
):
    report = report_of(ranks, trains_on_what_it_wrote, is_wrapped, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert report.undeclared == 0
    assert report.held_to_others > report.recorded // 4


class Actor(nn.Sequential):
    """Half of the ranks train it."""


class Critic(nn.Sequential):
    """The other half trains it; it looks like the actor and began with the same seed."""


def trains_two_models(out: str) -> None:
    """Two models in one world, each with replicas of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = (Actor, Critic)[rank // 2](nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(model, process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    with rankscope.trace(out=out, steps="all"):
        for _ in range(2):
            wrapped(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_models_of_other_classes_are_no_replicas(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, trains_two_models, folder=tmp_path, world=4)
    assert report.verdict is Verdict.CLEAN
    assert (report.findings, report.undeclared) == ((), 0)
