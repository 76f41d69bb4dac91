"""Collectives in pipelines and compiled models, and mismatches that gloo refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed import collectives_training_job as job
from tests.distributed import pipeline_job
from tests.distributed.pool import RankPool
from tests.distributed.test_collectives import collectives, digests, read


def test_a_pipeline_stage_receives_in_the_step_in_which_the_other_sends(
    ranks: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    ranks.run(pipeline_job.hold, str(folder), "1F1B", "0-1", world_size=2)
    found = read(folder)
    for step in (0, 1):
        sent: dict[Any, Any] = {}
        received: dict[Any, Any] = {}
        for rank in (0, 1):
            for call in collectives(found, rank, step):
                if call["op"] == "all_reduce":  # torch 2.15: the stages agree before they begin
                    continue
                ends = (rank, call["peer"]) if call["op"] == "send" else (call["peer"], rank)
                kept, slot = (sent, "inputs") if call["op"] == "send" else (received, "outputs")
                known = [value for value in call[slot] if "digest" in value]
                values = [] if call.get("object") else digests(known)
                kept[(*ends, call["tag"], call["sequence"])] = values
        assert sent.keys() == received.keys()
        for key, values in received.items():
            # torch up to 2.10 greets two neighbours at once with one tensor: neither is known then,
            # and sends a scalar where it receives one element
            assert [value[1:] for value in values] == [v[1:] for v in sent[key][: len(values)]]
        messages = [key for key, values in sent.items() if values and values[0][0] == [2, 6]]
        assert len(messages) == 2 * pipeline_job.MICRO_BATCHES


def test_what_torch_compile_compiles_does_not_change_with_collectives_watched(
    ranks: RankPool, tmp_path: Path
) -> None:
    for counts, graph in ranks.run(job.run_compiled, str(tmp_path / "trace"), world_size=2):
        assert sum("all_reduce" in target for target in graph) == 1
        assert counts[0] == 1 and counts[-1] <= 2, counts  # once more where hooks came on
        assert counts[1:] == [counts[-1]] * 3, counts
    read(tmp_path / "trace")


def test_a_mismatch_that_gloo_refuses_ends_as_it_does_without_tracing_and_is_written_down(
    ranks: RankPool, tmp_path: Path
) -> None:
    said = ranks.run(job.run_swapped, str(tmp_path), world_size=2)
    assert any(said), said
    found = json.loads((tmp_path / "trace" / "tree.json").read_text())
    first = [collectives(found, rank)[0] for rank in (0, 1)]
    assert [c["op"] for c in first] == ["all_reduce", "broadcast"]
    assert [c["sequence"] for c in first] == [0, 0]
    assert "raised" in [c["status"] for rank in (0, 1) for c in collectives(found, rank)]
