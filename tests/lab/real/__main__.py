"""`python -m tests.lab.real`: run the public bugs and their right twins, and print the scoreboard.

python -m tests.lab.real --only fsdp1-ignored-modules        # one bug and its twin
python -m tests.lab.real --oracles                           # the proofs alone, without rankscope
"""

from __future__ import annotations

import sys

from tests.lab.faults.__main__ import for_children, main, parser


def run() -> int:
    """Run what was asked for, but for bugs of libraries that are not installed, which it names."""
    options = parser("python -m tests.lab.real", seeds=1).parse_args()
    for_children()
    from tests.lab.real.rows import BY_NAME

    left_out = [n for n, row in BY_NAME.items() if not row.is_installed]
    for name in left_out:
        if not options.only or name in options.only:
            print(f"left out: {name} needs {BY_NAME[name].package}", file=sys.stderr)
    asked = options.only or BY_NAME
    options.only = [name for name in asked if name not in left_out]
    return main(options, "tests.lab.real.rows") if options.only else 0


if __name__ == "__main__":
    sys.exit(run())
