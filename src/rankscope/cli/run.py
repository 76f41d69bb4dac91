"""`rankscope run`: torchrun's command line, traced. All of it is in the launcher, with torch."""

from __future__ import annotations

import typer

CONTEXT: dict[str, object] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Settings of the typer command: every argument goes to torchrun's parser, `--help` included."""


def command(context: typer.Context) -> None:
    """Run a job exactly as torchrun would, and trace every rank into one tree."""
    from rankscope_launcher.runcommand import main

    main(context.args)
