"""The traced program of a schedule. It writes down what it did itself, with one `write` each line:
nothing of that is lost when the process is killed.

    life LIFE                  how often a launcher has started it again
    call STEP PATH             the forward of this module runs, so its entry was recorded
    value STEP PATH MIN MAX    the call has returned, so its output was recorded
    nan STEP                   an output that is not finite was recorded
    step STEP                  the optimizer's step has returned
    end                        the program has nothing more to do
    dies                       it ends otherwise than in order now, on purpose
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANK = int(os.environ["RANK"])
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
SIZE = 6


class Account:
    """The program's own file."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"calls.{RANK}.{os.getpid()}", flags, 0o600)
        self.step = 0
        self.write("life", LIFE)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def returned(self, path: str, output: Tensor) -> Tensor:
        low, high = output.detach().aminmax()
        self.write("value", self.step, path, low.item().hex(), high.item().hex())
        return output


class Layer(nn.Linear):
    def __init__(self, path: str, account: Account) -> None:
        super().__init__(SIZE, SIZE)
        self.path, self.account = path, account

    def forward(self, x: Tensor) -> Tensor:
        self.account.write("call", self.account.step, self.path)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, path: str, account: Account) -> None:
        super().__init__()
        self.path, self.account = path, account
        self.up, self.down = Layer(f"{path}.up", account), Layer(f"{path}.down", account)

    def forward(self, x: Tensor) -> Tensor:
        self.account.write("call", self.account.step, self.path)
        x = self.account.returned(self.up.path, self.up(x)).tanh()
        return self.account.returned(self.down.path, self.down(x))


class Probe(nn.Module):
    """Returns what is not finite in some steps; nothing is computed from it."""

    def __init__(self, account: Account, steps: set[int]) -> None:
        super().__init__()
        self.account, self.steps = account, steps

    def forward(self, x: Tensor) -> Tensor:
        self.account.write("call", self.account.step, "probe")
        return x * float("nan") if self.account.step in self.steps else x + 1


class Model(nn.Module):
    def __init__(self, account: Account, blocks: int, nans: set[int]) -> None:
        super().__init__()
        self.account = account
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", account) for i in range(blocks))
        self.probe = Probe(account, nans)

    def forward(self, x: Tensor) -> Tensor:
        self.account.write("call", self.account.step, ".")
        for block in self.blocks:
            x = x + self.account.returned(block.path, block(x))
        self.probe(x.detach())
        if self.account.step in self.probe.steps:
            self.account.write("nan", self.account.step)
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    parser.add_argument("--gloo", action="store_true", help="ranks reduce their gradients")
    parser.add_argument("--gloo-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--ends", choices=["exit", "raise", "os._exit"], default="exit")
    parser.add_argument("--fails-until-life", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--nan", nargs="*", default=[], metavar="STEP@RANK")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(RANK)
    if given.gloo:
        dist.init_process_group("gloo", timeout=timedelta(seconds=given.gloo_timeout))
    account = Account(given.folder)
    nans = {
        int(step)
        for step, _, rank in (one.partition("@") for one in given.nan)
        if int(rank) == RANK
    }
    model = Model(account, given.blocks, nans)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fails_at = given.steps // 3 if given.fails_until_life > LIFE else -1
    for step in range(given.steps):
        account.step = step
        output = account.returned(".", model(torch.randn(4, SIZE)))
        if step == fails_at and RANK == LIFE % 2:
            account.write("dies")
            raise ValueError("on purpose")
        output.square().mean().backward()
        if given.gloo:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        account.write("step", step)
        time.sleep(given.pause_ms / 1000)
    if given.gloo:
        dist.destroy_process_group()
    account.write("end")
    if given.ends != "exit" and RANK == 0:
        account.write("dies")
    if given.ends == "raise" and RANK == 0:
        raise ValueError("on purpose")
    if given.ends == "os._exit" and RANK == 0:
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    main()
