"""What is said of a job whose records are too many to judge again and again."""

from __future__ import annotations

import json
from pathlib import Path

from rankscope.live.verdicts import VerdictAsker

MANY = 300 << 20


def test_of_many_records_it_says_what_the_live_check_found(tmp_path: Path):
    asker = VerdictAsker(tmp_path)
    asker.wait(MANY)
    assert asker.answer()["verdict"] is None and "0.3 GB" in asker.answer()["trouble"]
    found = {"kind": "replica-mismatch", "message": "they differ", "step": 3}
    lines = [json.dumps({"notice": "something"}), json.dumps(found), "{torn"]
    (tmp_path / "findings.jsonl").write_text("\n".join(lines))
    asker.wait(MANY)
    answer = asker.answer()
    assert answer["verdict"] == "fault" and answer["findings"] == [{**found, "origin": True}]
