"""Training with Accelerate: accumulation over two micro-batches, an evaluation after each epoch."""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def main() -> None:
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    per_rank = 4 // accelerator.num_processes
    loader = DataLoader(data, batch_size=per_rank)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(data.tensors[0][:4])
    state = accelerator.unwrap_model(model).state_dict()
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in state.values())
    accelerator.print("final", hashlib.sha256(bits).hexdigest())
    # nothing of the group outlives it: its threads may abort an interpreter that is ending
    accelerator.free_memory(model, optimizer, loader)
    del model, optimizer, loader, state
    accelerator.end_training()


if __name__ == "__main__":
    main()
