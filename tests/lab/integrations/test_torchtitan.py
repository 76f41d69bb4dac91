"""torchtitan, its own training loop over FSDP2 on two gloo ranks, with the override and without."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from rankscope import open_trace
from tests.launcher.ways import TORCHRUN, installed

pytestmark = [
    installed,
    pytest.mark.launch,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan is not installed: pip install torchtitan==0.3.0 torchdata triton",
    ),
]

HERE = Path(__file__).parent
LOSS = re.compile(r"step:\s+(\d+)\D.*?loss: ([\d.]+).*?grad_norm:\s+([\d.]+)")


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A folder in which torchtitan finds the tokenizer and the texts of its debug model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"word{number}" for number in range(97)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "tests/assets/tokenizer").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "tests/assets/tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    config = tmp_path / "tests/assets/tokenizer/tokenizer_config.json"
    config.write_text(json.dumps(special))
    (tmp_path / "tests/assets/c4_test").mkdir()
    lines = [" ".join(words[(i * 7 + j) % 97] for j in range(100)) for i in range(300)]
    texts = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "tests/assets/c4_test/data.json").write_text(texts)
    return tmp_path


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "--nproc-per-node", "2", str(HERE / "titan_job.py")]
    command += ["--module", "titan_job", "--config", "tiny"]
    command += ["--training.steps", "3", "--training.seq-len", "32"]
    command += ["--training.local-batch-size", "2", "--training.global-batch-size", "8"]
    command += ["--training.disable-cuda-graphs", "--parallelism.spmd-backend", "full_dtensor"]
    command += ["--debug.seed", "3", "--debug.deterministic"]
    command += ["--override.imports", "titan_job.causal", *overrides]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "RANKSCOPE_OUT": str(folder / "trace")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_override_traces_torchtitans_steps_and_changes_no_loss(assets: Path):
    plain = train(assets)
    assert not (assets / "trace").exists()
    traced = train(assets, 'rankscope.integrations.torchtitan.traced={"steps": "all"}')
    losses = LOSS.findall(plain.stderr + plain.stdout)
    assert len(losses) == 6 and losses == LOSS.findall(traced.stderr + traced.stdout)
    said = [line for line in traced.stderr.splitlines() if line.startswith("rankscope: ")]
    assert said[0] == f"rankscope: tracing into {assets / 'trace'}"
    assert said[1].startswith(f"rankscope: trace in {assets / 'trace'}; read it: ")
    # on a CPU each rank draws its shards from the same seed: they do hold the same numbers
    assert said[2].startswith("rankscope: fault: duplicate-data")
    assert said[3].startswith("rankscope: first: tok_embeddings:param:weight: ranks 0-1 hold")
    trace = open_trace(assets / "trace")
    assert trace.is_complete and trace.run["world_size"] == 2
    steps = [step for step in trace.steps if step.mode.name == "TRAIN"]
    assert [step.step for step in steps] == [0, 1, 2]
    forwards = [n.micro_batch for n in steps[0].nodes if n.phase.name == "FORWARD" and not n.path]
    assert forwards == [0, 1], "gradients are accumulated over two micro-batches"
