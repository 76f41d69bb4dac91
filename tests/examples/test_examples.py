"""Every example: it trains, knows nothing of rankscope, and tracing changes not one bit of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests import forked
from tests.ports import free_port
from tests.torches import of_program

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {
    "one_process": 1,
    "ddp": 2,
    "fsdp2": 2,
    "tensor_parallel": 2,
    "pipeline": 2,
    "fsdp2_tp": 4,
    "forgotten_all_reduce": 2,
}
ALIKE = {"ddp", "tensor_parallel", "forgotten_all_reduce"}
"""Others do the same, and more."""
FIRST_LOSS = {
    "tensor_parallel": "5.5509",
    "pipeline": "5.5509",
    "fsdp2_tp": "5.569",
    "forgotten_all_reduce": "5.490",
}
"""Without dropout: of the whole batch, and of its first half."""
README = EXAMPLES.with_name("README.md")
RANKSCOPE = str(Path(sys.executable).with_name("rankscope"))

Job = list["subprocess.Popen[str]"]


def begin(command: list[str], **variables: str) -> subprocess.Popen[str]:
    return forked.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def train(name: str, check_file: Path, *options: str) -> Job:
    """Start the ranks of an example, untraced and without a launcher, which is slow to start."""
    size = str(RANKS[name])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--check-file", str(check_file)]
    return [
        begin([*command, *options], RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(RANKS[name])
    ]


def train_traced(name: str, check_file: Path, *options: str, out: Path) -> Job:
    """Start an example under `rankscope run`."""
    command = [RANKSCOPE, "run", "--rs-out", str(out)]
    command += ["--rs-steps", "all", "--nproc-per-node", str(RANKS[name])]
    script = str(EXAMPLES / f"{name}.py")
    return [begin([*command, script, "--check-file", str(check_file), *options])]


def stdout_of(job: Job) -> str:
    """Wait for a job; return what its processes printed."""
    said = [process.communicate(timeout=300) for process in job]
    assert [process.returncode for process in job] == [0] * len(job), said
    return "".join(out for out, _ in said)


def bits(check_file: Path, rank: int) -> tuple[list[str], dict[str, tuple[str, bytes]]]:
    """Return losses and every tensor of one rank as bytes."""
    stem = f"{check_file}.rank{rank}"
    tensors = load_file(f"{stem}.safetensors")
    losses = json.loads(Path(f"{stem}.json").read_text())["losses"]
    return losses, {k: (f"{v.dtype}{v.shape}", v.tobytes()) for k, v in tensors.items()}


def readme_answer() -> list[str]:
    """Return what README's first console block shows of `rankscope check`."""
    block = README.read_text().partition("```console\n")[2].partition("```")[0]
    assert "examples/forgotten_all_reduce.py" in block
    return block.partition("$ rankscope check\n")[2].splitlines()


def without_numbers(lines: list[str]) -> list[str]:
    """Numbers depend on processor, torch and steps; those in the names of modules stay."""
    return [re.sub(r"(?<![\w.])-?\d[\d.e-]*", "N", line) for line in lines]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_no_example_knows_of_rankscope(path: Path):
    assert "rankscope" not in path.read_text().lower()


@pytest.mark.launch
@pytest.mark.skipif(
    not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
    reason="needs the start-up file: an environment made by launcher/test",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.lab if name in ALIKE else []) for name in RANKS],
)
def test_losses_gradients_parameters_and_random_state_are_bitwise_those_of_an_untraced_run(
    name: str, tmp_path: Path
):
    options = () if name in FIRST_LOSS else ("--dropout", "0.1")
    jobs = [
        train(name, tmp_path / "plain", *options),
        train_traced(name, tmp_path / "traced", *options, out=tmp_path / "trace"),
    ]
    plain, traced = (of_program(stdout_of(job)) for job in jobs)
    if name in FIRST_LOSS:
        assert plain.startswith(f"step 0 loss {FIRST_LOSS[name]}")
    assert traced == plain
    assert (tmp_path / "trace/trace.json").exists()
    if name == "forgotten_all_reduce":
        verdict = begin([RANKSCOPE, "check", str(tmp_path / "trace")], COLUMNS="0")
        said = verdict.communicate(timeout=300)[0].splitlines()[:5]
        assert without_numbers(said) == without_numbers(readme_answer())
        assert verdict.returncode == 1
    for rank in range(RANKS[name]):
        assert bits(tmp_path / "traced", rank) == bits(tmp_path / "plain", rank)
