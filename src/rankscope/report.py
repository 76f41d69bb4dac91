"""Reports where people look: a page to send (`write`), a line in the tracker of the experiment
(`to`), a piece of a notebook (`fragment`).

    rankscope.report.write("trace")                  # report.html: opens in any browser
    rankscope.report.to("wandb", "trace")            # verdict and page in the run that is active

A tracker is handed the verdict, the first finding, how much was judged, and the page. It is never
handed a number for each module: a job has thousands of them.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError, TrackerError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Report
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.views import Trace
from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import check_page
from rankscope.words.page.verdicthtml import job_html, ranks_html, table_html, text, verdict_html
from rankscope.words.reports import tracker_fields

__all__ = ["fragment", "to", "write"]

_PAGE_NAME: Final = "rankscope-report"
_MOST_JUDGED: Final = 200_000
"""Values of a trace that is judged to be shown: `check` takes a few seconds for so many."""
_MOST_ROWS: Final = 12
_STYLE: Final = """
.rankscope-piece { border-left: 4px solid #8888; padding-left: 0.8em; max-width: 60em }
.rankscope-piece:has(.verdict.fault) { border-color: #d33 }
.rankscope-piece:has(.verdict.incomplete) { border-color: #c80 }
.rankscope-piece:has(.verdict.clean) { border-color: #3a5 }
.rankscope-piece p, .rankscope-piece dl { margin: 0.3em 0 }
.rankscope-piece dt { float: left; clear: left; width: 5em; opacity: 0.7 }
.rankscope-piece dd { margin: 0 0 0 5.5em; overflow-wrap: anywhere }
.rankscope-piece table { border-collapse: collapse; margin: 0.3em 0 }
.rankscope-piece caption { text-align: left; opacity: 0.7 }
.rankscope-piece :is(td, th) { text-align: left; padding: 0.1em 1em 0.1em 0 }
"""


def write(
    trace: TraceLike, out: str | Path = "report.html", *, layout: str | Path | None = None
) -> Path:
    """Write the page of a trace, as `rankscope report` does; return the file.

    Args:
        trace: open, its folder, or what `with rankscope.trace(...)` gave.
        out: the file; a page that is there is replaced.
        layout: a layout file, for values that no DTensor describes.

    Raises:
        FolderError, TraceError: no trace there, a damaged one, or a file that cannot be written.
        LayoutError: the layout file cannot be read, or is for another number of ranks.
    """
    with opened_trace(trace) as opened:
        return _written(opened, Path(out), layout)[0]


def to(
    tracker: str,
    trace: TraceLike,
    *,
    run: Any = None,
    step: int | None = None,
    layout: str | Path | None = None,
) -> Report:
    """Write verdict and page into a run of an experiment tracker; return the report.

    Call it on one rank, once the trace is there. What the tracker itself raises passes through.

    Args:
        tracker: `wandb`, `mlflow` or `tensorboard`.
        trace: open, its folder, or what `with rankscope.trace(...)` gave.
        run: where to write: a run of W&B; a run of MLflow, or its id; a `SummaryWriter`, or the
            log folder of TensorBoard. By default the active run, which TensorBoard has none of.
        step: the training step it belongs to, None where it belongs to the whole run.
        layout: a layout file, for values that no DTensor describes.

    Raises:
        TrackerError: no such tracker, its package is missing, or no run is active; says what to do.
        FolderError, TraceError, LayoutError: as `write`.
    """
    if tracker not in _TRACKERS:
        trackers = ", ".join(_TRACKERS)
        raise TrackerError(f"{tracker!r} is not a known tracker", f"choose from {trackers}")
    send = _TRACKERS[tracker](run)
    with opened_trace(trace) as opened, tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
        name = _PAGE_NAME if step is None else f"{_PAGE_NAME}-step{step}"
        page, report = _written(opened, Path(folder) / f"{name}.html", layout)
        send(tracker_fields(report, str(opened.path.absolute())), page, step)
    return report


def fragment(shown: TraceLike | Report) -> str:
    """Return a trace or a report as a piece of HTML without script, as notebooks show it: light or
    dark ones, and those that take styles out.

    Raises:
        FolderError, TraceError: no trace is there, or a damaged one.
    """
    if isinstance(shown, Report):
        return _report_fragment(shown)
    with opened_trace(shown) as trace:
        ranks = ranks_html(trace, reads_calls=False)
        return _framed([_verdict_of(trace), job_html("", trace), ranks])


def _report_fragment(report: Report) -> str:
    parts = [verdict_html(report)]
    kinds = Counter((f.kind.value, "origin" if f.is_origin else "follows") for f in report.findings)
    if len(report.findings) > 1:
        rows = [(*kind, f"{number:,}") for kind, number in kinds.most_common(_MOST_ROWS)]
        parts.append(table_html(("finding", "place", "count"), rows))
    parts += [f"<p>{text(note)}</p>" for note in report.notes[:_MOST_ROWS]]
    return _framed(parts)


def _verdict_of(trace: Trace) -> str:
    values = sum(len(s.columns()["values.rank"]) for s in (*trace.setup, *trace.steps))
    if values > _MOST_JUDGED:
        return f"<p>not judged here ({values:,} values): rankscope.check(trace)</p>"
    try:
        return verdict_html(check(trace))
    except RankscopeError as error:
        return f"<p>not judged: {text(error)}</p>"


def _framed(parts: Sequence[str]) -> str:
    return f'<div class="rankscope-piece"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _written(trace: Trace, out: Path, layout: str | Path | None) -> tuple[Path, Report]:
    layouts = None if layout is None else LayoutFile.load(Path(layout))
    content, report = check_page(trace, layouts)
    return write_file(content, out), report


# ------------------------------------------------------------------------------------- trackers

_Facts = Mapping[str, "str | int | float"]
_Send = Callable[[_Facts, Path, "int | None"], None]


def _package(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(
            f"{name} cannot be imported here ({error})", f"pip install {distribution}"
        ) from error


def _wandb(run: Any) -> _Send:
    wandb = _package("wandb", "wandb")
    active = wandb.run if run is None else run
    if active is None:
        raise TrackerError("no run of W&B is active here", "call wandb.init() before, or give run=")

    def send(facts: _Facts, page: Path, step: int | None) -> None:
        at = {} if step is None else {"step": step}
        active.summary.update({f"rankscope/{key}": fact for key, fact in {**facts, **at}.items()})
        artifact = wandb.Artifact(f"rankscope-{active.id}", type="rankscope-report")
        artifact.add_file(str(page))
        active.log_artifact(artifact)

    return send


def _mlflow(run: Any) -> _Send:
    mlflow = _package("mlflow", "mlflow")
    active = mlflow.active_run() if run is None else run
    if active is None:
        raise TrackerError(
            "no run of MLflow is active here",
            "call it inside `with mlflow.start_run():`, or give run=mlflow.last_active_run()",
        )
    number = active if isinstance(active, str) else active.info.run_id

    def send(facts: _Facts, page: Path, step: int | None) -> None:
        client = mlflow.MlflowClient()
        at = {} if step is None else {"step": step}
        for key, fact in {**facts, **at}.items():
            client.set_tag(number, f"rankscope.{key}", fact)
        client.log_artifact(number, str(page))

    return send


def _tensorboard(run: Any) -> _Send:
    if run is None:
        raise TrackerError(
            "TensorBoard has no active run", "give run=writer, a SummaryWriter, or its log folder"
        )
    writers = _package("torch.utils.tensorboard", "tensorboard")

    def send(facts: _Facts, page: Path, step: int | None) -> None:
        is_folder = isinstance(run, (str, Path))
        writer = writers.SummaryWriter(str(run)) if is_folder else run
        page_copy = Path(writer.log_dir).absolute() / page.name
        shutil.copy(page, page_copy)  # TensorBoard shows no files: its text names this one
        lines = [*(f"{key}: {fact}" for key, fact in facts.items()), f"page: {page_copy}"]
        block = "\n".join(f"    {line}" for line in lines)  # as code: nothing in it is markup
        writer.add_text("rankscope", block, step)
        writer.flush()
        if is_folder:
            writer.close()

    return send


_TRACKERS: Final[Mapping[str, Callable[[Any], _Send]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
}
