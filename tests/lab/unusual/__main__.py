"""`python -m tests.lab.unusual`: ask `check` and `diff` of programs of unusual kinds.

python -m tests.lab.unusual --only ring-attention            # one program
python -m tests.lab.unusual --half seen                      # half of them, drawn by a seed
python -m tests.lab.unusual --reference                      # `diff` alone
python -m tests.lab.unusual --oracles                        # the proofs alone, without rankscope
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys

from tests.lab.faults.__main__ import for_children, main, parser

CHECK, DIFF = "tests.lab.unusual.rows", "tests.lab.unusual.referencerows"


def asked() -> argparse.Namespace:
    """Return the command line."""
    options = parser("python -m tests.lab.unusual", seeds=1)
    options.description = __doc__
    options.add_argument("--half", choices=("seen", "unseen"), help="by default both")
    options.add_argument("--check", action="store_true", help="`check` alone")
    return options.parse_args()


def run(options: argparse.Namespace, table: str) -> int:
    """Run what was asked for of one table."""
    rows = importlib.import_module(table).BY_NAME
    names = [name for name in options.only or rows if name in rows or table == CHECK]
    halves = (options.half,) if options.half else ("seen", "unseen")
    chosen = copy.copy(options)
    chosen.only = [n for n in names if n not in rows or rows[n].half in halves]
    if options.keep:
        chosen.keep = options.keep / table.rpartition(".")[2]
    from tests.lab.unusual.summary import summary

    return main(chosen, table, summary) if chosen.only else 0


def every_table() -> int:
    """Ask `check`, then `diff`; the proofs once."""
    options = asked()
    for_children()
    tables = [CHECK] * (not options.reference) + [DIFF] * (not options.check)
    ends = [run(options, table) for table in (tables[:1] if options.oracles else tables)]
    return max(ends)


if __name__ == "__main__":
    sys.exit(every_table())
