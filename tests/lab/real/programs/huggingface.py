"""Programs of transformers, as its own loaders make them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.lab.faults import truth
from tests.lab.faults.parallel import average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train


def tokens_of(setup: Setup, step: int) -> Tensor:
    """The same rows on every tensor-parallel rank."""
    chooser = torch.Generator().manual_seed(9_000 + 100 * setup.seed + step)
    return torch.randint(3, 64, (4, 8), generator=chooser)


def loaded(setup: Setup, **how: Any) -> Any:
    """Save a tiny Apertus on rank 0 and load it on every rank, as `how` says."""
    from transformers import ApertusConfig, ApertusForCausalLM, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = ApertusConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    place = [""]
    with tempfile.TemporaryDirectory(prefix="apertus-") as folder:
        if dist.get_rank() == 0:
            torch.manual_seed(50 + setup.seed)
            ApertusForCausalLM(config).save_pretrained(folder)
            place = [folder]
        dist.broadcast_object_list(place, 0)
        model = AutoModelForCausalLM.from_pretrained(Path(place[0]), dtype=torch.float32, **how)
        dist.barrier()  # rank 0 takes the folder away
    return model.train()


def activations_of(model: torch.nn.Module) -> list[str]:
    """The names of the parameters of activation functions: scalars that every layer has."""
    return [name for name, _ in model.named_parameters() if ".act_fn." in name]


def apertus(setup: Setup) -> Trained:
    """Apertus under `tp_plan="auto"`. Bug: xIELU's two scalars see only this rank's columns, and
    nobody sums their gradients; the twin does."""
    model = loaded(setup, tp_plan="auto")
    scalars = activations_of(model)

    def one(step: int) -> Tensor:
        tokens = tokens_of(setup, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    def meet(step: int) -> None:
        if not setup.is_faulty:
            parameters = dict(model.named_parameters())
            average_gradients([parameters[n] for n in scalars], dist.group.WORLD, 1.0)

    return train(Trained(model), sgd(model), one, before_update=meet)


def scalars_right(setup: Setup, trained: Trained) -> str:
    """The scalars must stay the same on all ranks, with the gradients of one process."""
    names = activations_of(trained.model)
    now = dict(trained.model.named_parameters())
    alone = loaded(setup)
    tokens = tokens_of(setup, 0)
    alone(input_ids=tokens, labels=tokens).loss.backward()
    found = dict(alone.named_parameters())
    # all together: one scalar of its own is a difference of large numbers, rounded in other ways
    theirs = {"scalars": torch.cat([found[n].grad for n in names])}
    ours = {"scalars": torch.cat([trained.gradients[n] for n in names])}
    differing = truth.differing({n: now[n] for n in names})
    return truth.said("parameters differ over ranks", differing) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, ours, theirs)
    )
