"""The command `rankscope`: finds the commands, and is the one place that catches errors.

Each command is a module of this room with a function `command`; it is imported when it is asked
for. Whatever rankscope raises on purpose becomes one line on stderr and exit code 2, and with
`--json` one JSON object on stdout as well.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rankscope.cli.arguments import ExitCode
from rankscope.errors import RankscopeError, SettingError
from rankscope.settings import did_you_mean

COMMANDS = (
    "run",
    "doctor",
    "collect",
    "check",
    "diff",
    "layout",
    "show",
    "report",
    "serve",
    "top",
    "capture",
    "tensor",
    "export",
    "verify",
    "recover",
    "clean",
    "keys",
)

_HELP = """One trace for the whole distributed job: every module call on every rank, in one tree.

\b
  rankscope run --nproc-per-node 4 train.py   trace a job: as torchrun, one word changed
  rankscope doctor                            would a job be traced here? what to do if not
  rankscope check                             what went wrong first: module, rank, kind
  rankscope diff REF TEST                     where a run leaves another one, of any topology
  rankscope layout                            a layout file, proposed from what the run shows
  rankscope show                              the newest trace here, on one screen
  rankscope report                            one HTML file of it: verdict, map, values
  rankscope serve                             the same page beside the running job
  rankscope top                               where its ranks are, on one screen of the terminal
  rankscope capture TRACE --steps 3           trace the next steps of the running job
  rankscope show --path 'layers.0*' --rank 1  one module, one rank
  rankscope tensor TRACE 'layers.0:output' --global --print    numbers, where they were kept
  rankscope export --format jsonl --out FILE  for jq and pandas; also perfetto, parquet
  rankscope verify                            is everything there? per rank, exit 1 if not
  rankscope recover SPOOL... --out NEW        a tree from what a killed job left behind
  rankscope clean                             remove what dead runs left on this host
  rankscope keys new FILE                     keys for a collector on TCP

\b
A trace is a folder: tree.json (for jq and people), steps/ (the numbers of every rank).
Each command explains its options with --help; docs/trace-format.md explains the files.
"""


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's, which newer versions of typer carry inside and older ones import."""


class _SaysWhichOption:
    """Says which option may have been meant by one that a command does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]  # a mixin
        except _UsageError as error:
            if type(error).__name__ != "NoSuchOption":  # click's or typer's own, as above
                raise
            name = str(getattr(error, "option_name", ""))
            parameters = ctx.command.get_params(ctx)
            known = [each for one in parameters for each in one.opts if each.startswith("-")]
            raise SettingError(
                f"no option {name} of {ctx.command_path}; {did_you_mean(name, known)}"
                f"`{ctx.command_path} --help` lists all of them"
            ) from None
        return parsed


class _Command(_SaysWhichOption, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line; what follows `--script FILE` is the script's own."""
        has_script = any("--script" in parameter.opts for parameter in self.get_params(ctx))
        if has_script and "--script" in args[:-1]:
            after = args.index("--script") + 2
            args = [*args[:after], "--", *args[after:]]
        return super().parse_args(ctx, args)


class _Commands(_SaysWhichOption, TyperGroup):
    """Imports a command's module only when that command is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            raise SettingError(
                f"no command {args[0]!r}; {did_you_mean(args[0], COMMANDS)}"
                f"`{ctx.command_path} --help` lists all of them"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print no second list: the help has one, and asking each command would import it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rankscope.cli.{cmd_name}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = getattr(module, "CONTEXT", None)
        alone.command(name=cmd_name, cls=_Command, context_settings=settings)(module.command)
        return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"rankscope {version('rankscope')}")
        except PackageNotFoundError:
            typer.echo("rankscope (not installed, run from its sources)")
        raise typer.Exit


@app.callback(help=_HELP)
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Hold the options that come before any command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default that of the process); always leaves by SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:  # its frames alone stand in the traceback of a job that failed
        from rankscope_launcher.runcommand import main as run

        run(words[1:])
        raise SystemExit(0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that a terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=words, prog_name="rankscope")
    except (RankscopeError, OSError) as error:  # an odd path, a folder that is gone: said as well
        from rankscope.cli.terminal import remark

        line = " ".join(str(error).split())
        _report_trouble(words, line)
        remark(line)
        raise SystemExit(ExitCode.TROUBLE) from None
    except SystemExit as leaving:
        if leaving.code == ExitCode.TROUBLE:  # typer has said what it could not understand
            _report_trouble(words, "the command line cannot be understood: see stderr")
        raise


def _report_trouble(words: Sequence[str], line: str) -> None:
    own = words[: words.index("--script")] if "--script" in words else words
    if "--json" in own:
        from rankscope.cli.terminal import echo_json
        from rankscope.record.texts import visible

        echo_json(words[0] if words[0] in COMMANDS else "", "error", None, [visible(line)])
