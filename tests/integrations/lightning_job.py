"""Training with Lightning, with a callback or without: `lightning_job.py MODEL WAY DEVICES`.

MODEL: `plain` accumulates two batches and validates; `gan` has two optimizers that step in every
batch, with a forward between. WAY: `plain`, `callback`, `wrong` (a setting nobody knows).
"""

import hashlib
import sys

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankscope.integrations.lightning import RankscopeMonitor


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Gan(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.critic(self.generator(batch[0])).mean())
        first.step()
        first.zero_grad()
        made = self.generator(batch[0]).detach()
        self.manual_backward((self.critic(made) - self.critic(batch[0])).mean())
        second.step()
        second.zero_grad()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.critic(batch[0])

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        first = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        return first, torch.optim.SGD(self.critic.parameters(), lr=0.1)


def main() -> None:
    name, way, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    settings = {"callback": {"steps": "all"}, "wrong": {"nothing": "all"}}
    monitors = [RankscopeMonitor(**settings[way])] if way in settings else []
    model = Gan() if name == "gan" else Plain()
    parallel = "ddp_find_unused_parameters_true" if name == "gan" else "ddp"
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=parallel if devices > 1 else "auto",
        max_epochs=1, accumulate_grad_batches=1 if name == "gan" else 2, callbacks=monitors,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=4 // devices), DataLoader(data, batch_size=8))
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if trainer.is_global_zero:
        print("final", hashlib.sha256(bits).hexdigest(), random)
        for monitor in monitors:
            print("path", monitor.path)


if __name__ == "__main__":
    main()
