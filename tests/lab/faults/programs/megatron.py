"""Tensor parallelism by hand whose parameters are marked as Megatron marks them.

Nothing declares a layout, and no group has a name: the marks and the collectives say it all.
"""

from __future__ import annotations

from fnmatch import fnmatch

import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.layouttext import layout_text, weights
from tests.lab.faults.model import Parts, batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import (
    Column,
    Cut,
    Group,
    Row,
    SequenceCut,
    average_gradients,
)
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train

WIDTH = 2
"""Ranks that share a layer; further ranks hold other rows of the batch."""

_EVERYWHERE = {"dp": "Replicate()", "tp": "Replicate()"}
LAYOUT = layout_text(
    "dp={rows},tp=2",
    [
        *weights({"tp": "Shard(0)"}, "layers.*.[qkv]_proj", "layers.*.up_proj"),
        *weights({"tp": "Shard(1)"}, "layers.*.o_proj", "layers.*.down_proj"),
        *weights(_EVERYWHERE, "*norm", "embed", "positions", "head"),
    ],
)
"""The same as the marks say, for the twin that is judged with a layout file."""


def marked(model: nn.Module) -> nn.Module:
    """Write on every parameter what Megatron writes."""
    is_sequence = any("Sequence" in type(module).__name__ for module in model.modules())
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (Column, Row)):
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 0 if isinstance(module, Column) else 1
                parameter.partition_stride = 1
                parameter.allreduce = True
            elif isinstance(module, nn.RMSNorm):
                parameter.sequence_parallel = is_sequence
            else:
                parameter.tensor_model_parallel = False
                parameter.partition_dim = -1
                parameter.partition_stride = 1
    return model


def pairs(setup: Setup) -> tuple[Group, Group]:
    """This rank's tensor-parallel group, and its data-parallel one."""
    rank = dist.get_rank()
    rows = [dist.new_group([n, n + 1]) for n in range(0, setup.ranks, WIDTH)]
    columns = [dist.new_group(list(range(n, setup.ranks, WIDTH))) for n in range(WIDTH)]
    return rows[rank // WIDTH], columns[rank % WIDTH]


def slices(setup: Setup, parts: Parts, is_marked: bool) -> Trained:
    """This rank's slices of the model, marked."""
    model = whole(setup, parts)
    place = dist.get_rank() % WIDTH
    trained = Trained(model, cuts=cut_from(whole(setup), model, place, WIDTH))
    if is_marked:
        marked(model)
    return trained


def tensor_parallel(setup: Setup, is_marked: bool = True) -> Trained:
    """Two ranks share each layer. Fault: one row-parallel layer does not sum over them."""
    rows, columns = pairs(setup)
    trained = slices(setup, Cut(rows), is_marked)
    row = trained.model.layers[str(setup.layer)].attention.o_proj
    row.is_reducing = not setup.is_faulty
    return trained_on(setup, trained, columns)


def unmarked(setup: Setup) -> Trained:
    """The same program without marks."""
    return tensor_parallel(setup, is_marked=False)


def norms_apart(setup: Setup, is_marked: bool = True) -> Trained:
    """Two ranks share each layer. Fault: one of them counts one norm's gradient three times."""
    rows, columns = pairs(setup)
    trained = slices(setup, Cut(rows), is_marked)
    norm = trained.model.layers[str(setup.layer)].feed_forward_norm

    def thrice(step: int) -> None:
        if setup.is_faulty and dist.get_rank() % WIDTH:
            norm.weight.grad.mul_(3)

    return trained_on(setup, trained, columns, thrice)


def norms_apart_unmarked(setup: Setup) -> Trained:
    """The same program without marks."""
    return norms_apart(setup, is_marked=False)


def trained_on(setup: Setup, trained: Trained, columns: Group, meddle=lambda step: None) -> Trained:
    """Train; the rows of the batch are shared out over data-parallel ranks."""
    place, places = dist.get_rank() // WIDTH, setup.ranks // WIDTH

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, place, places)
        loss = loss_of(trained.model(tokens), targets)
        loss.backward()
        return loss

    def meet(step: int) -> None:
        if places > 1:
            average_gradients(trained.model.parameters(), columns, places)
        meddle(step)

    return train(trained, sgd(trained.model), one, before_update=meet)


def sequence_parallel(
    setup: Setup, is_marked: bool = True, left_out: str = "layers.{layer}.feed_forward_norm.weight"
) -> Trained:
    """Two ranks share each layer, norms work on slices of the sequence. Fault: the gradient of one
    norm is not summed over them, though its parameter is marked."""
    rank = dist.get_rank()
    rows, columns = pairs(setup)
    trained = slices(setup, SequenceCut(rows), is_marked)
    place, places = rank // WIDTH, setup.ranks // WIDTH
    width = setup.shape.context // WIDTH
    begin = rank % WIDTH * width
    kept_out = left_out.format(layer=setup.layer) if setup.is_faulty else ""
    own = trained.model.named_parameters()
    shared = [p for n, p in own if n not in trained.cuts and not fnmatch(n, kept_out)]

    def one(step: int) -> Tensor:
        halves = batch(setup, step, place, places)
        tokens, targets = (half[:, begin : begin + width] for half in halves)
        loss = loss_of(trained.model(tokens, begin), targets) / WIDTH
        loss.backward()
        return loss

    def meet(step: int) -> None:
        average_gradients(shared, rows, 1.0)
        if places > 1:
            average_gradients(trained.model.parameters(), columns, places)

    return train(trained, sgd(trained.model), one, before_update=meet)


def sequence_parallel_unmarked(setup: Setup) -> Trained:
    """The same program without marks."""
    return sequence_parallel(setup, is_marked=False)


def norms_forgotten(setup: Setup, is_marked: bool = True) -> Trained:
    """The same. Fault: nobody sums the gradients of the norms."""
    return sequence_parallel(setup, is_marked, left_out="*norm.weight")


def norms_forgotten_unmarked(setup: Setup) -> Trained:
    """The same program without marks."""
    return norms_forgotten(setup, is_marked=False)


def replicas_right(setup: Setup, trained: Trained) -> str:
    """What is not cut must be the same on ranks that share the layers, and gradients those of one
    process."""
    rows = [dist.new_group([n, n + 1]) for n in range(0, setup.ranks, WIDTH)]
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    found = truth.whole_gradients(trained, rows[dist.get_rank() // WIDTH])
    return truth.said("replicated parameters differ", truth.differing(kept)) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, found)
    )
