"""What a traced step costs under DeepSpeed (ZeRO 1, 2 and 3) and under the Trainer of transformers.

    python -m tests.lab.perf.frameworks [--only deepspeed-2 trainer] [--steps 30] [--profile]

Two gloo ranks on the CPU train a small GPT under `rankscope run --rs-steps every:3`, then the same
job runs under torchrun. Of every three steps of the first job one is traced, the next closes what
the traced one has left, and the third is not traced: medians of each are taken on rank 0, behind a
warm-up. Losses and final parameters of both jobs have to be bitwise the same.

`--profile` prints where the time of the traced steps goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import importlib.util
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

_CASES = ("deepspeed-1", "deepspeed-2", "deepspeed-3", "trainer")
_NEEDED = {"deepspeed": ("deepspeed",), "trainer": ("accelerate", "transformers")}
_EVERY = 3
_WARM_UP = 2 * _EVERY
_WORDS = 1000
_WIDTH = 256
_MARK = "frameworks: "


class Watch:
    """What rank 0 saw of its steps."""

    def __init__(self, *, is_profiling: bool) -> None:
        self.clocks: dict[str, list[float]] = {"cpu": [], "wall": []}
        """Milliseconds of each step."""
        self._began = (0.0, 0.0)
        self._profile = cProfile.Profile() if is_profiling else None

    def begin(self) -> None:
        """Note when a step begins."""
        count = len(self.clocks["cpu"])
        if self._profile and count >= _WARM_UP and count % _EVERY < _EVERY - 1:
            self._profile.enable()
        self._began = time.process_time(), time.perf_counter()

    def end(self) -> None:
        """Note how long a step took."""
        ended = time.process_time(), time.perf_counter()
        for name, begin, end in zip(("cpu", "wall"), self._began, ended, strict=True):
            self.clocks[name].append((end - begin) * 1e3)
        if self._profile:
            self._profile.disable()

    def tell(self, model: Gpt) -> None:
        """Print what was seen, with a hash of every loss and of the parameters, as one line."""
        found = hashlib.sha256()
        for tensor in [*model.losses, *model.parameters()]:
            found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        if self._profile:
            text = io.StringIO()
            pstats.Stats(self._profile, stream=text).sort_stats("cumulative").print_stats(
                "rankscope|deepspeed|torch/optim|accelerate|trainer", 60
            )
            print(text.getvalue(), flush=True)
        print(f"{_MARK}{json.dumps(self.clocks | {'hash': found.hexdigest()})}", flush=True)


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then feed forward: [batch, length, width] to the same."""
        batch, length, width = x.shape
        heads = self.mix(self.before(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        query, key, value = (each.transpose(1, 2) for each in heads)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.between(x))


class Gpt(nn.Module):
    """A small GPT that returns its loss as models of transformers do, and keeps what it was."""

    def __init__(self, width: int = _WIDTH, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same on every rank
        self.losses: list[torch.Tensor] = []
        self.embed = nn.Embedding(_WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, _WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predict the next words: both [batch, length]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
        self.losses.append(loss.detach())
        return {"loss": loss}


def train_deepspeed(stage: int, steps: int, watch: Watch) -> Gpt:
    """Train under DeepSpeed with torch's AdamW, in the customary two groups."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # it would be compiled at the first collective otherwise
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Gpt()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 10**6},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for batch in torch.randint(_WORDS, (steps, 2, 64), generator=generator):
        watch.begin()
        engine.backward(engine(input_ids=batch, labels=batch)["loss"])
        engine.step()
        watch.end()
    gathered = deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3)
    gathered.__enter__()  # for good: the job ends here
    return model


def train_trainer(steps: int, watch: Watch) -> Gpt:
    """Train with the Trainer of transformers, which wraps the model in DDP here."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watcher(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.end()

    model = Gpt()
    batches = torch.randint(_WORDS, (steps * 4, 64), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in batches]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no",
            per_device_train_batch_size=2, max_steps=steps, logging_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, callbacks=[Watcher()]).train()
    return model


def work(case: str, steps: int, *, is_profiling: bool) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    watch = Watch(is_profiling=is_profiling)
    kind, _, stage = case.partition("-")
    is_trainer = kind == "trainer"
    model = train_trainer(steps, watch) if is_trainer else train_deepspeed(int(stage), steps, watch)
    if dist.get_rank() == 0:
        watch.tell(model)
    dist.barrier()
    dist.destroy_process_group()


def run(launcher: list[str], ranks: list[str]) -> tuple[dict[str, Any], str]:
    """Run a job; return what its rank 0 told, and everything it printed."""
    command = [sys.executable, "-m", *launcher, *ranks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if _MARK in line:
            found: dict[str, Any] = json.loads(line.partition(_MARK)[2])
            return found, done.stdout
    raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def compare(case: str, steps: int, *, is_profiling: bool) -> None:
    """Print the row of one framework."""
    worker = [str(Path(__file__).resolve()), "--work", case, f"--steps={steps}"]
    ranks = ["--nproc-per-node=2", "--standalone", *worker, *["--profile"] * is_profiling]
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--rs-out={folder}/trace", f"--rs-steps=every:{_EVERY}"]
        watched, text = run(["rankscope", "run", *options], ranks)
    if is_profiling:
        print(text)
        return
    plain, _ = run(["torch.distributed.run"], ranks)
    row = [case]
    for clock in ("cpu", "wall"):
        base = statistics.median(plain[clock][_WARM_UP:])
        traced, closing, untraced = (
            statistics.median(watched[clock][_WARM_UP + place :: _EVERY]) for place in range(_EVERY)
        )
        added = traced + closing - 2 * untraced
        row += [f"{base:.0f}", f"{untraced / base:.2f}", f"{1 + added / untraced:.2f}"]
        row += [f"{added:.0f}"]
    row.append("yes" if watched["hash"] == plain["hash"] else "NO")
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=_CASES, default=_CASES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="profile instead of timing")
    parser.add_argument("--work", choices=_CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, is_profiling=options.profile)
        return
    clocks = [f"{name}: plain ms | untraced | traced | ms added" for name in ("CPU", "wall")]
    print(f"| job | {' | '.join(clocks)} | bitwise the same |\n|{'---|' * 10}")
    for case in options.only:
        names = _NEEDED[case.partition("-")[0]]
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            hint = f"DS_BUILD_OPS=0 pip install {' '.join(missing)}"
            print(f"{case} is left out, for {' and '.join(missing)} is missing: {hint}")
            continue
        compare(case, options.steps, is_profiling=options.profile)


if __name__ == "__main__":
    main()
