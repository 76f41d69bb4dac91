"""Programs of training frameworks, driven as their users drive them."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.lab.faults import truth
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import RATE, STEPS, Setup, Trained


def stepped_right(setup: Setup, trained: Trained) -> str:
    """After the first step every parameter must be where one process has it, on all ranks."""
    alone = whole(setup)
    theirs = truth.reference_gradients(setup, alone)
    moves = {n: p.detach() - RATE * theirs[n] for n, p in alone.named_parameters()}
    seen = {n: trained.seen[n][0] - trained.before[n] for n in moves}
    wanted = {n: moves[n] - trained.before[n] for n in moves}
    return truth.said("parameters differ over ranks", truth.differing(seen)) or truth.said(
        "first step unlike one process", truth.wrong_values(setup, seen, wanted)
    )


def deepspeed_accumulation(setup: Setup) -> Trained:
    """DeepSpeed's ZeRO-2 with accumulation by the user. Bug: to the engine every backward ends a
    step, so it keeps the last one alone; the twin says which one is the last."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None  # it keeps the process groups of an earlier job of this process
    importlib.reload(groups)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = whole(setup)
    trained = Trained(model, before={n: p.detach().clone() for n, p in model.named_parameters()})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1e9,  # it clips by default
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    for step in range(STEPS):
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        for n, (x, y) in enumerate(zip(tokens.chunk(2), targets.chunk(2))):
            if not setup.is_faulty:
                engine.set_gradient_accumulation_boundary(n == 1)
            engine.backward(loss_of(engine(x), y) / 2)
        engine.step()
        for name, parameter in model.named_parameters():
            trained.note(name, parameter)
    return trained


def lightning_backward(setup: Setup) -> Trained:
    """Lightning's manual optimization under DDP. Bug: the step calls `loss.backward()`, and only
    `manual_backward` prepares the reduction."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    model = whole(setup)
    trained = Trained(model, before={n: p.detach().clone() for n, p in model.named_parameters()})

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.gpt = model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.gpt)

        def training_step(self, rows: list[Tensor], step: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = loss_of(self.gpt(rows[0]), rows[1])
            loss.backward() if setup.is_faulty else self.manual_backward(loss)
            optimizer.step()
            for name, parameter in model.named_parameters():
                trained.note(name, parameter)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=setup.ranks,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    mine = [batch(setup, step, dist.get_rank(), setup.ranks) for step in range(STEPS)]
    trainer.fit(Module(), torch.utils.data.DataLoader(mine, batch_size=None))
    return trained
