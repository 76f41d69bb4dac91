"""`python -m tests.real`: run the public bugs and their right twins, and print the scoreboard.

python -m tests.real --only fsdp1-ignored-modules        # one bug and its twin
python -m tests.real --oracles                           # the proofs alone, without rankscope
"""

from __future__ import annotations

import sys

from tests.faults.__main__ import main, parser

if __name__ == "__main__":
    sys.exit(main(parser("python -m tests.real", seeds=1).parse_args(), "tests.real.rows"))
