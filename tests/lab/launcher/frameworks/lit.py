"""Training with Lightning, by its own launcher where two devices are asked for; accumulation."""

import hashlib
import sys

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(LightningModule):
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


def main() -> None:
    seed_everything(3, verbose=False)
    devices = int(sys.argv[1])
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    model = Lit()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto",
        max_epochs=2, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=4 // devices), DataLoader(data, batch_size=8))
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    if trainer.is_global_zero:
        print("final", hashlib.sha256(bits).hexdigest())


if __name__ == "__main__":
    main()
