"""The command `rankscope`, as it is installed: a module of that name in front is told in one line.

A folder `rankscope` on PYTHONPATH, or in site-packages of another's, hides the package; the command
starts here, in the other package, so that somebody is left to say so.
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; always leaves by SystemExit."""
    try:
        app = importlib.import_module("rankscope.cli.app")
    except ModuleNotFoundError as error:
        if error.name not in {"rankscope", "rankscope.cli", "rankscope.cli.app"}:
            raise
        other = sys.modules.get("rankscope")
        where = getattr(other, "__file__", None) or next(iter(getattr(other, "__path__", "?")))
        if sys.stderr is None:
            raise SystemExit(2) from None
        sys.stderr.write(
            f"rankscope: another module named rankscope stands in front of this one: {where}; "
            "take it off PYTHONPATH, or out of the way\n"
        )
        raise SystemExit(2) from None
    app.main()
