"""What watching costs: traced and untraced steps beside plain ones, and beside other tools, in one
process.

    python -m tests.lab.perf.overhead [--rounds 9] [--peers] [--training] [--calls] [--profile]
    python -m tests.lab.perf.overhead --tiny
    python -m tests.lab.perf.overhead --job     what stands beside the ranks, and finishing
    python -m tests.lab.perf.overhead --device cuda --training      after: rankscope doctor

Every figure is the median, with quartiles and extremes, of pairs: three steps in a row, plain,
watched, plain, and the ratio of the middle one to the mean of its neighbours; 15 pairs a round. On
CPU a step takes what its thread takes of a core, so that a busy machine shifts it little; on
accelerators the time until the device has done it. The model is a Llama (hidden 512, intermediate
1536, 8 layers, 8 heads, vocabulary 4096), batch 2 x 128, one thread; `--tiny`: hidden 64, 24
layers, batch 2 x 16.

`--job` runs the training step on two gloo ranks under `rankscope run`, each step traced: what the
companion and its reader take of a core, and the time from the last step until the trace is there.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import io
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import rankscope
from rankscope.record.phases import Phase
from tests.lab.perf.growing import processes_of

Step = Callable[[], None]
DEVICE = torch.device("cuda" if "cuda" in sys.argv else "cpu")
MICRO_BATCHES = 4
PHASES = frozenset(phase.word for phase in Phase)
HEADER = (
    "\n| {} | ratio to plain | quartiles | extremes | plain ms | added ms | load |"
    "\n|---|---|---|---|---|---|---|"
)
PAIRS = 15
HOOK_TABLES = [
    table
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, table in vars(sys.modules[module]).items()
    if name.startswith(("_global_forward", "_global_optimizer")) and isinstance(table, dict)
]
clock = time.thread_time if DEVICE.type == "cpu" else time.perf_counter


def llama(hidden: int = 512, layers: int = 8, heads: int = 8, words: int = 4096) -> nn.Module:
    """Build the model of the overhead bars."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=words, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE)


def inference(model: nn.Module, words: int = 4096, length: int = 128) -> Step:
    """Return one forward without gradients."""
    model.eval()
    tokens = torch.randint(0, words, (2, length), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(DEVICE)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)

    return forward


def training(model: nn.Module, micro_batches: int = 1) -> Step:
    """Return one whole training step."""
    model.train()
    tokens = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(micro_batches):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def seconds(step: Step, repeats: int) -> list[float]:
    """Time single steps."""
    taken = []
    for _ in range(repeats):
        start = clock()
        step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - start)
    return taken


@contextlib.contextmanager
def traced(model: nn.Module, **settings: object) -> Iterator[None]:
    """Trace into a new folder that is thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        rankscope.trace(model, out=Path(folder) / "trace", **settings),  # type: ignore[arg-type]
    ):
        yield


@contextlib.contextmanager
def hf_debugger(model: nn.Module) -> Iterator[None]:
    """Trace with transformers' debugger."""
    from transformers.model_debugging_utils import model_addition_debugger_context

    with (
        tempfile.TemporaryDirectory() as folder,
        model_addition_debugger_context(model, debug_path=folder, do_prune_layers=False),
    ):
        yield


@contextlib.contextmanager
def torch_debug_mode(model: nn.Module) -> Iterator[None]:
    """Trace with torch's DebugMode, tensor hashes on."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_inputs=True):
        yield
    del mode


@contextlib.contextmanager
def msprobe(model: nn.Module) -> Iterator[None]:
    """Trace with msProbe, statistics of every module (level L0)."""
    import json

    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = Path(folder) / "config.json"
        config.write_text(
            json.dumps({"task": "statistics", "dump_path": folder, "rank": [], "step": [], "level":
            "L0",
                        "statistics": {"scope": [], "list": [], "data_mode": ["all"]}})
        )  # fmt: skip
        debugger = PrecisionDebugger(config_path=str(config))
        debugger.start(model=model)
        yield
        debugger.stop()


def compare(
    name: str,
    step: Step,
    watched: Callable[[], contextlib.AbstractContextManager[None]],
    rounds: int,
    *,
    has_other_ways: bool = False,
) -> None:
    """Print the ratio of a watched step to the plain ones before and behind it, over all pairs.
    A tool that watches in other ways than by torch's global hooks has one pair a round."""
    ratios, plain, added = [], [], []

    def pair(before: float, cost: float, after: float) -> None:
        base = (before + after) / 2
        ratios.append(cost / base)
        plain.append(base)
        added.append(cost - base)

    for _ in range(rounds):
        before = seconds(step, 2)[1] if has_other_ways else 0.0
        with watched():
            step()  # set-up, first calls
            if has_other_ways:
                cost = seconds(step, 2)[1]
            else:
                without_hooks(step)
                before = without_hooks(step)
                for _ in range(PAIRS):
                    cost, after = seconds(step, 1)[0], without_hooks(step)
                    pair(before, cost, after)
                    before = after
        if has_other_ways:
            pair(before, cost, seconds(step, 2)[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {min(ratios):.3f} to "
        f"{max(ratios):.3f} | {statistics.median(plain) * 1e3:.1f} "
        f"| {statistics.median(added) * 1e3:.2f} | {os.getloadavg()[0]:.1f} |",
        flush=True,
    )


def without_hooks(step: Step) -> float:
    """Time a plain step: every hook on all modules or optimizers is off for it."""
    hooks = [dict(table) for table in HOOK_TABLES]
    for table in HOOK_TABLES:
        table.clear()
    (taken,) = seconds(step, 1)
    for table, own in zip(HOOK_TABLES, hooks, strict=True):
        table.update(own)
    return taken


def compare_untraced(step: Step, model: nn.Module, rounds: int) -> None:
    """Print the ratio of an untraced step while attached to a plain one."""
    compare("attached, step not traced", step, lambda: traced(model, steps="0"), rounds)


class ManySmall(nn.Module):
    """10,000 modules called once each."""

    def __init__(self, count: int = 10_000) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Identity() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call every module once."""
        for layer in self.layers:
            layer(x)
        return x * self.scale


def cost_per_call(rounds: int) -> None:
    """Print microseconds per module call: bare, with empty hooks, structure, digest."""
    model, x = ManySmall(), torch.zeros(4)

    def step() -> None:
        with torch.no_grad():
            model(x)

    def per_call(watched: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
        taken = []
        for _ in range(rounds):
            with watched():
                step()
                taken += seconds(step, 3)
        return statistics.median(taken) / 10_001 * 1e6

    @contextlib.contextmanager
    def empty_hooks() -> Iterator[None]:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        before = register_module_forward_pre_hook(lambda module, args: None)
        after = register_module_forward_hook(lambda module, args, output: None)
        yield
        before.remove()
        after.remove()

    bare = per_call(contextlib.nullcontext)
    print(f"\n10,000 modules, microseconds per call: bare {bare:.2f}")
    for name, watched in (
        ("empty pre and post hook", empty_hooks),
        ("structure", lambda: traced(model, digest="none")),
        ("digest of input and output", lambda: traced(model)),
    ):
        print(f"  {name}: +{per_call(watched) - bare:.2f}", flush=True)


JOB_STEPS = 20


def rank_of_job(last_step: Path) -> None:
    """Be one rank of the job of `--job`; write when its last step ended."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    step = training(llama())
    for _ in range(JOB_STEPS):
        step()
    ended = time.time()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        last_step.write_text(str(ended))
    torch.distributed.destroy_process_group()


def cost_beside(rounds: int) -> None:
    """Print what runs beside the ranks of a job takes of a core for each of its traced steps, and
    how long after its last step the trace is there."""
    figures: dict[str, list[float]] = {"beside the ranks, CPU ms a step": [], "finishing, s": []}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command = [sys.executable, "-m", "rankscope", "run", f"--rs-out={folder}/trace"]
            command += [f"--rs-spool={folder}/spool", "--rs-steps=all", "--nproc-per-node=2"]
            command += ["--standalone", "-m", "tests.lab.perf.overhead"]
            job = subprocess.Popen([*command, f"--rank={folder}/last"])
            used: dict[str, float] = {}
            while job.poll() is None:
                for words, process in processes_of(folder):
                    if b"rankscope.companion" in words:
                        with contextlib.suppress(OSError):
                            fields = (process / "stat").read_text().rpartition(") ")[2].split()
                            used[process.name] = (int(fields[11]) + int(fields[12])) * tick_s
                time.sleep(0.05)
            if job.returncode:
                raise SystemExit(f"the job ended with {job.returncode}")
            finished = (folder / "trace/trace.json").stat().st_mtime
            beside, finishing = figures.values()
            beside.append(sum(used.values()) / JOB_STEPS * 1e3)
            finishing.append(finished - float((folder / "last").read_text()))
    print("\n| job of two ranks | minimum | median | maximum | load |\n|---|---|---|---|---|")
    for what, numbers in figures.items():
        print(
            f"| {what} | {min(numbers):.2f} | {statistics.median(numbers):.2f} | "
            f"{max(numbers):.2f} | {os.getloadavg()[0]:.1f} |"
        )


def profile(step: Step, model: nn.Module) -> None:
    """Print where a traced step spends its time."""
    with traced(model):
        step()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(3):
            step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="measure other tools beside")
    parser.add_argument(
        "--training", action="store_true", help="whole training steps beside forwards"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of tiny modules instead")
    parser.add_argument("--calls", action="store_true", help="cost per call over 10,000 modules")
    parser.add_argument("--profile", action="store_true", help="profile instead of timing")
    parser.add_argument("--job", action="store_true", help="what stands beside the ranks instead")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        rank_of_job(options.rank)
        return
    if options.job:
        cost_beside(options.rounds)
        return
    if options.tiny:
        model = llama(hidden=64, layers=24, heads=4, words=256)
        step = inference(model, words=256, length=16)
    else:
        model = llama()
        step = inference(model)
    step()
    if options.profile:
        profile(training(model) if options.training else step, model)
        return
    print(HEADER.format("forward, no gradients"))
    compare("whole digest", step, lambda: traced(model), options.rounds)
    compare("structure only", step, lambda: traced(model, digest="none"), options.rounds)
    compare_untraced(step, model, options.rounds)
    if options.peers:
        for name, peer in (
            ("transformers' debugger", hf_debugger), ("torch DebugMode with hashes",
            torch_debug_mode), ("msProbe L0 statistics", msprobe),
        ):  # fmt: skip
            try:
                watched = functools.partial(peer, model)
                compare(name, step, watched, max(options.rounds // 3, 2), has_other_ways=True)
            except ImportError as error:
                print(f"| {name} | not installed: {error} | | | | |")
    if options.training:
        step = training(model)
        step()
        print(HEADER.format("training step"))
        compare("whole digest", step, lambda: traced(model), options.rounds)
        compare("structure only", step, lambda: traced(model, digest="none"), options.rounds)
        compare_untraced(step, model, options.rounds)
        step = training(model, MICRO_BATCHES)
        print(HEADER.format(f"training step of {MICRO_BATCHES} micro-batches"))
        for name, phases in (
            ("whole digest", PHASES),
            ("gradients read at the optimizer's step alone", PHASES - {"accumulated"}),
        ):
            taken = ",".join(sorted(phases))
            watched = functools.partial(traced, model, phases=taken)
            compare(name, step, watched, max(options.rounds // 2, 2))
    if options.calls:
        cost_per_call(options.rounds)


if __name__ == "__main__":
    main()
