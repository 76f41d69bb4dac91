"""`python -m tests.lab.hangs`: jobs that stand still. Does `check` name who is missing?

python -m tests.lab.hangs --only pipeline-fewer-sent         # one job; may be repeated
python -m tests.lab.hangs --keep FOLDER                      # keep the traces
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.lab.faults.__main__ import for_children


def main() -> int:
    """Run what was asked for; return 0 where every answer is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.hangs", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a job; may be repeated")
    parser.add_argument("--keep", type=Path, help="keep every trace in this folder")
    options = parser.parse_args()
    for_children()
    from tests.lab.hangs.rows import BY_NAME
    from tests.lab.hangs.runs import judged

    wrong = 0
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        for name in options.only or BY_NAME:
            outcome = judged(BY_NAME[name], (options.keep or Path(folder)) / name)
            wrong += not outcome.is_right
            mark = "right" if outcome.is_right else "WRONG"
            print(f"{mark:6} {name}: {outcome.said}", flush=True)
    count = len(options.only or BY_NAME)
    print(f"{count - wrong} of {count} right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
