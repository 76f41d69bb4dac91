"""`rankscope keys`: make the keys by which a collector and its relays know each other."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.terminal import echo
from rankscope.companion.curve import new_keys
from rankscope.errors import SettingError
from rankscope.run.connection import relays_file, write_keys


def command(
    what: Annotated[str, typer.Argument(metavar="new", help="`new`: make keys.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it must not exist.")],
) -> None:
    """Make the keys of a collector on TCP: FILE for the collector, FILE.relay for training hosts.

    Exit code 0: made; 2: a file exists or cannot be written.
    """
    if what != "new":
        raise SettingError(f"keys {what!r}: expected `rankscope keys new FILE`")
    if not file.name:
        raise SettingError(f"keys new '{file}': expected the name of a file to make")
    whole = file.expanduser()
    write_keys(whole, new_keys())
    own, theirs = (shlex.quote(str(one)) for one in (whole, relays_file(whole)))
    echo(f"{whole}: for the collector: rankscope collect --bind tcp://HOST:PORT --keys {own}")
    echo(
        f"{relays_file(whole)}: for every training host: rankscope run --rs-collector "
        f"tcp://HOST:PORT --rs-keys {theirs}"
    )
