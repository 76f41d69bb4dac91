"""Every setting, parsed in one place: `--rs-name`, `RANKSCOPE_NAME` and the keyword `name` mean the
same.

No torch here: the launcher and the command line read this table too.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rankscope.errors import LayoutError, SettingError
from rankscope.globs import without_wrappers
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.phases import Phase
from rankscope.record.ranks import MINIMUM_LIMIT_BYTES, ranks_text
from rankscope.record.stepselection import LAST_HELP, StepSelection, rank_ranges

DRAIN_SECONDS = 10.0
"""Default grace for ranks that vanished without an end record."""
FINISH_SECONDS = 60.0
"""Default time that a finished job waits for its tree."""
_STALL_SECONDS = 300.0
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?$", re.IGNORECASE)
_MOST_RANKS = 1 << 20
_MOST_ROUNDINGS = 16
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of `256M`, `1.5GiB` or `4096` (powers of 1024). Raises SettingError."""
    match = _SIZE.match(text.strip())
    if not match:
        raise SettingError(f"{text!r} is not a size: write 256M, 1.5G or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _parse_spool_bytes(text: str) -> int:
    size = parse_size(text)
    if size < MINIMUM_LIMIT_BYTES:
        raise SettingError(
            f"{text!r} is too little: a rank needs {MINIMUM_LIMIT_BYTES >> 10}K or more"
        )
    return size


def _parse_globs(text: str) -> tuple[str, ...]:
    globs = tuple(part.strip() for part in text.split(",") if part.strip())
    if not globs:
        raise SettingError("an empty glob selects nothing: leave the setting out, or write '*'")
    return globs


def _parse_paths(text: str) -> tuple[str, ...]:
    """Return the globs, and those that have names of wrappers without them too: only the job knows
    whether a module is called `module`."""
    globs = _parse_globs(text)
    return tuple(dict.fromkeys((*globs, *map(without_wrappers, globs))))


def _parse_ranks(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    chosen: set[int] = set()
    for first, last in rank_ranges(text):
        if last >= _MOST_RANKS:
            raise SettingError(
                f"rank {last} is out of range: no job has more than {_MOST_RANKS} ranks; write all "
                f"for every rank there is"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def _parse_phases(text: str) -> tuple[str, ...]:
    words = tuple(phase.word for phase in Phase)
    if text == "all":
        return words
    chosen = _parse_globs(text)
    if wrong := sorted(set(chosen) - set(words)):
        raise SettingError(f"unknown phase {wrong[0]!r}: choose from {', '.join(words)}")
    for phase in (Phase.BACKWARD.word, Phase.RECOMPUTE.word):
        if phase in chosen and Phase.FORWARD.word not in chosen:
            raise SettingError(
                f"{phase!r} records nothing by itself, its calls are seen from those of forward: "
                f"write {','.join((Phase.FORWARD.word, *chosen))}"
            )
    return chosen


def _parse_bool(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off", ""}:
        return False
    raise SettingError(f"{text!r} is neither yes nor no: write 1 or 0")


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise SettingError(f"{text!r} is not a number of seconds") from None
    if not 0 <= seconds < 1e7:
        raise SettingError(f"{text!r} seconds is out of range")
    return seconds


def _parse_port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 1 << 16:
        raise SettingError(f"{text!r} is not a port: write a number from 1 to 65535")
    return int(text)


def _parse_whole(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise SettingError(f"{text!r} is not a whole number")
    return int(text)


def _parse_roundings(text: str) -> int:
    roundings = _parse_whole(text)
    if not 0 <= roundings <= _MOST_ROUNDINGS:
        raise SettingError(f"{text!r} is out of range: write 0 to {_MOST_ROUNDINGS} roundings")
    return roundings


def _word(*words: str, problem: str) -> Callable[[str], str]:
    """Return a parser for one of these words; `problem` names them."""

    def parse(text: str) -> str:
        if text not in words:
            raise SettingError(f"{text!r} is {problem}")
        return text

    return parse


def _parse_path(text: str) -> Path:
    try:
        if b"\0" not in os.fsencode(text):
            return Path(text).expanduser().absolute()
    except (ValueError, RuntimeError) as error:  # a lone surrogate, a home folder of nobody
        raise SettingError(f"{text!r} cannot be a path: {error}") from None
    except OSError as error:
        raise SettingError(
            f"{text!r} is not below any folder, the working folder is gone ({error.strerror}): "
            "give an absolute path"
        ) from None
    raise SettingError(f"{text!r} cannot be a path: it holds a zero byte")


def _parse_layout(text: str) -> LayoutFile:
    return LayoutFile.load(_parse_path(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table: its name, how its text is read, and one line of help."""

    name: str
    """Name as options spell it: `spool-bytes`; the field is `spool_bytes`."""
    parse: Callable[[str], object]
    default: str
    metavar: str
    help: str
    is_flag: bool = False
    is_secret: bool = False
    """The text may hold a password or a token: traces and ranks only learn that it is set."""

    @property
    def field(self) -> str:
        """Keyword and field name."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Environment variable."""
        return "RANKSCOPE_" + self.field.upper()


def _setting(**row: Any) -> Any:
    return field(metadata={"default": "", **row})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one session, parsed: every field is a row of the table."""

    out: Path | None = _setting(
        parse=_parse_path,
        metavar="DIR",
        help="trace folder, made with its parents; where it is not empty, the sibling DIR-2 is "
        "taken; %j in it is the scheduler's job id; default rankscope-<time> here",
    )
    steps: StepSelection = _setting(
        parse=StepSelection.parse,
        default="0-2",
        metavar="STEPS",
        help="steps to trace: 0-2,10 or every:100 or all, or at:FILE for one soon after each touch "
        "of that file; several with commas; or last:N for those before something happens, "
        + LAST_HELP,
    )
    ranks: tuple[int, ...] | None = _setting(
        parse=_parse_ranks, default="all", metavar="RANKS", help="ranks to trace: 0-3,8 or all"
    )
    paths: tuple[str, ...] = _setting(
        parse=_parse_paths,
        default="*",
        metavar="GLOBS",
        help="modules to trace: fnmatch globs on the whole path, separated by commas",
    )
    phases: tuple[str, ...] = _setting(
        parse=_parse_phases,
        default="all",
        metavar="PHASES",
        help="phases to trace, separated by commas, or all",
    )
    slots: tuple[str, ...] = _setting(
        parse=_parse_globs,
        default="*",
        metavar="GLOBS",
        help="slots to take: input.*, output, grad:weight ...",
    )
    digest: str = _setting(
        parse=_word(
            *("full", "none"),
            problem="neither: write full (statistics, hash, sketch) or none (structure only)",
        ),
        default="full",
        metavar="full|none",
        help="numbers kept per value: full, or none for the structure alone",
    )
    compile: str = _setting(
        parse=_word(
            *("opaque", "eager"),
            problem="neither: write opaque (a compiled region is one node) or eager (traced steps "
            "run it as written: all is seen, but the numbers are not bitwise the compiled)",
        ),
        default="opaque",
        metavar="opaque|eager",
        help="compiled regions: one opaque node each, or run as written while a step is traced",
    )
    batch_dim: int = _setting(
        parse=_parse_whole,
        default="0",
        metavar="DIM",
        help="dimension that counts samples: 0, or 1 for [sequence, batch, hidden]",
    )
    layout: LayoutFile | None = _setting(
        parse=_parse_layout,
        metavar="FILE",
        help="TOML file: how plain tensors lie that were cut by hand; goes into the trace",
    )
    spool: Path | None = _setting(
        parse=_parse_path,
        metavar="DIR",
        help="local disk folder for the ranks' spools; default the system's temporary folder",
    )
    spool_bytes: int = _setting(
        parse=_parse_spool_bytes,
        default="256M",
        metavar="SIZE",
        help="unsent bytes a rank may hold before whole steps are dropped",
    )
    keep_spool: bool = _setting(
        parse=_parse_bool,
        default="0",
        metavar="0|1",
        help="keep the ranks' records beside the tree after finishing",
        is_flag=True,
    )
    collector: str = _setting(
        parse=str,
        metavar="ADDRESS",
        help="a collector already running: ipc:///path, or tcp://HOST:PORT with keys; or shared",
    )
    keys: Path | None = _setting(
        parse=_parse_path,
        metavar="FILE",
        help="keys to a collector on TCP: FILE.relay, made by `rankscope keys new FILE`",
    )
    metrics: int | None = _setting(
        parse=_parse_port,
        metavar="PORT",
        help="serve metrics for Prometheus at 127.0.0.1:PORT of the head host; default none",
    )
    live_check: bool = _setting(
        parse=_parse_bool,
        default="1",
        metavar="0|1",
        help="judge each traced step soon after it ended, on the head host: findings go to stderr "
        "and findings.jsonl",
    )
    on_finding: str = _setting(
        parse=str,
        metavar="CMD",
        help="shell command given each finding of the live check, as JSON on stdin",
        is_secret=True,
    )
    parquet: bool = _setting(
        parse=_parse_bool,
        default="0",
        metavar="0|1",
        help="write each step into a Parquet dataset too, parquet/ in the trace folder, soon after "
        "it is over",
    )
    tree: str = _setting(
        parse=_word(
            *("auto", "always", "never"), problem="none of these: write auto, always or never"
        ),
        default="auto",
        metavar="auto|always|never",
        help="tree.json, for jq and people: auto writes it where it takes up to 100 MB",
    )
    finish_seconds: float = _setting(
        parse=_parse_seconds,
        default=f"{FINISH_SECONDS:g}",
        metavar="SECONDS",
        help="how long the finished job waits for its tree",
    )
    drain_seconds: float = _setting(
        parse=_parse_seconds,
        default=f"{DRAIN_SECONDS:g}",
        metavar="SECONDS",
        help="grace for ranks that vanished without an end record, "
        "before the tree is built without them",
    )
    stall_seconds: float = _setting(
        parse=_parse_seconds,
        default=f"{_STALL_SECONDS:g}",
        metavar="SECONDS",
        help="note it once no rank of a host has moved for that long inside a traced step; 0 never",
    )
    tensors: tuple[str, ...] | None = _setting(
        parse=_parse_paths,
        metavar="GLOBS",
        help="full tensors to keep: path:slot globs such as 'layers.0.*:output', without a slot "
        "all of a path, '**' everything; default none",
    )
    tensor_budget: int | None = _setting(
        parse=parse_size,
        metavar="SIZE",
        help="disk a rank may use for full tensors; default its share of half the free disk",
    )
    tensor_memory: int = _setting(
        parse=parse_size,
        default="256M",
        metavar="SIZE",
        help="pinned memory for full tensors on their way from an accelerator",
    )
    perturb: int = _setting(
        parse=_parse_roundings,
        default="0",
        metavar="ROUNDINGS",
        help="changes the run: floating inputs are off by so many roundings, for diff --noise",
    )

    def traced_of(self, world_size: int) -> int:
        """Return how many ranks of a world are selected."""
        if self.ranks is None:
            return world_size
        return sum(rank < world_size for rank in self.ranks)

    def as_text(self) -> dict[str, str]:
        """Return {name: text} of every setting, as it would be written on a command line."""
        return {s.name: _as_text(getattr(self, s.field)) or s.default for s in SETTINGS}

    def as_recorded(self) -> dict[str, str]:
        """Return the same for a trace, which others may read: a secret is "set"."""
        texts = self.as_text()
        return texts | {s.name: "set" for s in SETTINGS if s.is_secret and texts[s.name]}


SETTINGS = tuple(Setting(name=f.name.replace("_", "-"), **f.metadata) for f in fields(Settings))


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, StepSelection):
        return value.text
    if isinstance(value, LayoutFile):
        return value.name
    if isinstance(value, tuple):
        is_ranks = value and isinstance(value[0], int)
        return ranks_text(value) if is_ranks else ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def settings_from(
    texts: Mapping[str, object] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings: given texts (keywords) first, then `RANKSCOPE_*`, then defaults. Raises
    SettingError, with the names, for an unreadable value, two that do not fit each other, or a
    keyword that is no setting."""
    texts_left = dict(texts or {})
    values: dict[str, object] = {}
    for setting in SETTINGS:
        text = texts_left.pop(setting.field, None)
        source = setting.field
        if text is None:
            text, source = environ.get(setting.variable), setting.variable
        if text is None:
            text, source = setting.default, setting.field
        if isinstance(text, bool):
            text = "1" if text else "0"
        if isinstance(text, (tuple, list, range)):
            text = ",".join(map(str, text))
        empty = "" if setting.parse is str else None
        try:
            is_given = str(text) or setting.default
            values[setting.field] = setting.parse(str(text)) if is_given else empty
        except (SettingError, LayoutError) as error:
            raise SettingError(f"{source}: {error}") from None
    if texts_left:
        names = ", ".join(s.field for s in SETTINGS)
        raise SettingError(f"{sorted(texts_left)[0]!r} is not a setting: choose from {names}")
    settings = Settings(**values)  # type: ignore[arg-type]  # every field is filled from the table
    settings.steps.check(
        keeps_tensors=bool(settings.tensors),
        keeps_numbers=settings.digest == "full",
        spool_bytes=settings.spool_bytes,
    )
    return settings


def settings_of_run(texts: Mapping[str, str]) -> Settings:
    """Return the settings in `run.json`, whatever the variables of this process say; without the
    layout, whose file the ranks have read. Raises SettingError for an unreadable one."""
    keywords = {name.replace("-", "_"): text for name, text in texts.items()}
    keywords.pop("layout", None)
    steps = keywords.pop("steps", "")
    settings = settings_from(keywords, {})
    return replace(settings, steps=StepSelection.parse(steps, is_known=True)) if steps else settings


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """True where the variable RANKSCOPE asks for a trace."""
    return environ.get("RANKSCOPE", "").lower() not in {"", "0", "false", "no", "off"}


_PREFIX = "RANKSCOPE_"
_OPTION = re.compile(r"--rs-([a-z]+(?:-[a-z]+)*)")
_OTHERS = {
    "RANKSCOPE",
    "RANKSCOPE_KERNEL",
    "RANKSCOPE_OWNER",
    "RANKSCOPE_PYTHON",
    "RANKSCOPE_RUN_FOLDER",
    "RANKSCOPE_SAID",
    "RANKSCOPE_TORCH",
    "RANKSCOPE_VENV",
}
"""Variables of rankscope that are no settings."""


def as_variables(text: str) -> str:
    """Name variables where a message names options of `rankscope run`."""
    return _OPTION.sub(lambda m: _PREFIX + m[1].replace("-", "_").upper(), text)


def as_keywords(text: str) -> str:
    """Name keyword arguments where a message names options of `rankscope run`."""
    return _OPTION.sub(lambda m: m[1].replace("-", "_") + "=", text)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "did you mean x? " with what a name begins, or else is most like; "" for neither."""
    names = list(candidates)
    matches = [name_near for name_near in names if name.strip("-") and name_near.startswith(name)]
    matches = matches or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {' or '.join(matches)}? " if matches else ""


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> str:
    """Return one sentence on variables that begin like ours and mean nothing; "" without any."""
    variables = {setting.variable for setting in SETTINGS} | _OTHERS
    ends = {name.removeprefix(_PREFIX): name for name in variables}
    switch = _PREFIX.rstrip("_")
    parts = [
        f"{name} is not a setting, did you mean {switch}?"
        for name in sorted(environ)
        if name != switch and not name.startswith(_PREFIX) and _is_nearly(name, switch)
    ]
    wrong = [name for name in environ if name.startswith(_PREFIX) and name not in variables]
    for name in sorted(wrong):
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
        parts.append(
            f"{name} is not a setting" + (f", did you mean {ends[near[0]]}?" if near else "")
        )
    return "; ".join(parts)


def _is_nearly(name: str, switch: str) -> bool:
    """True for one letter too few, too many, another or in its neighbour's place."""
    if abs(len(name) - len(switch)) > 1 or name[:1] != switch[:1]:
        return False
    return difflib.SequenceMatcher(None, name, switch, autojunk=False).ratio() > 0.85
