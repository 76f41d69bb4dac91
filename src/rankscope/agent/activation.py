"""Switching tracing on in a process, once, and ending it in order."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import get_worker_info

from rankscope.agent.guard import attempt, say, text_of
from rankscope.agent.identity import launcher_place
from rankscope.agent.join import RUN_FOLDER_VARIABLE, JoinedRun, join_run, settings_here, who_am_i
from rankscope.agent.pythonstack import forget_exits, note_exits, what_ends_the_program
from rankscope.agent.session import OpenedSpool, Session
from rankscope.agent.steps.optimizers import HIDDEN
from rankscope.capture.torch_internals.compiling import dynamo_has_compiled
from rankscope.errors import FolderError, RankscopeError, SettingError
from rankscope.record.ranks import EndReason
from rankscope.settings import Settings, as_keywords, as_variables, misspelt_variables

_OWNER_VARIABLE = "RANKSCOPE_OWNER"
"""rank/local rank:pid of a process that traces, for those it starts."""
_ALONE = "alone"
"""Stands for the rank of a process that traces and is no rank of a job."""
_SAID_VARIABLE = "RANKSCOPE_SAID"
"""Tells child processes what their parent has said already, so that they do not repeat it."""
_said_before = os.environ.get(_SAID_VARIABLE)
_session: Session | None = None
_joined: JoinedRun | None = None
_keywords: dict[str, object] | None = None
"""Keywords of the armed session; None without a session, or where another caller opened it."""
_tell: Callable[..., object] | None = None
_is_forked = False
_watches_forks = False


def current_session() -> Session | None:
    """Return the session of this process, None where nothing is armed."""
    return _session


def folder_taken(asked: Path) -> Path:
    """Return the trace folder of the run that this process has joined, `asked` before that."""
    return asked if _joined is None else _joined.out


def hold(session: Session | None) -> None:
    """Make a session that somebody else opens and closes this process's; None lets it go."""
    global _session, _keywords
    _session, _keywords = session, None


def attach(keywords: Mapping[str, object] | None = None) -> None:
    """Arm tracing from inside a program; whatever fails is said once, and never raised."""
    error = attempt(arm, keywords)
    if error is not None:
        attempt(say, f"not tracing: {text_of(error)}")


def arm(
    keywords: Mapping[str, object] | None = None, tell: Callable[..., object] | None = None
) -> Session | None:
    """Arm tracing in this process, unless its settings are wrong: said once, and None is returned.

    Args:
        keywords: settings; the rest comes from a prepared run, or `RANKSCOPE_*` variables.
        tell: takes how far a process comes that opens no spool (`rankscope_launcher.untraced`).
    """
    global _session, _keywords, _watches_forks, _tell
    if _session is not None:
        return _session
    if _is_child_of_a_rank():
        return None
    _tell = tell or _tell
    misspelt = misspelt_variables()
    if misspelt and not os.environ.get(RUN_FOLDER_VARIABLE):  # else the launcher has said it
        _say_once_a_host(misspelt)
    try:
        settings = settings_here(keywords)
    except RankscopeError as error:
        _say_why_not(error, keywords)
        return None
    _keywords = dict(keywords or {})
    _session = Session(settings, lambda: _open(settings))
    _tell_stage("torch")
    atexit.unregister(close)  # of an earlier session: each would stay until the end
    atexit.register(close)
    note_exits()
    if not _watches_forks:
        _watches_forks = True
        # once in a process: such a function cannot be taken back
        os.register_at_fork(after_in_child=_after_fork)
    return _session


def _after_fork() -> None:
    """Arm a forked child again: it may become a rank of its own. A child of a tracing process stays
    untraced, and so does one without a process group at its first module call."""
    global _session, _joined, _keywords, _is_forked
    keywords, has_joined = _keywords, _joined is not None
    _session = _joined = _keywords = None
    _is_forked = True
    is_rank = dist.is_available() and dist.is_initialized()
    if keywords is not None and not has_joined and not is_rank:
        arm(keywords)


def _open(settings: Settings) -> OpenedSpool | None:
    global _joined
    if _is_helper():
        return None
    try:
        _joined = join_run(settings)
    except RankscopeError as error:
        _say_why_not(error, _keywords)
        return None
    if _joined is None:
        if settings.ranks is not None and who_am_i().rank not in settings.ranks:
            _tell_stage("unselected")
        return None
    identity = _joined.identity
    if not _owner()[0]:
        is_alone = identity.world_size == 1 and launcher_place() is None
        name = _ALONE if is_alone else f"{identity.rank}/{identity.local_rank}"
        os.environ[_OWNER_VARIABLE] = f"{name}:{os.getpid()}"
    if multiprocessing.parent_process() is not None:  # leaves by os._exit, without `atexit`
        multiprocessing.util.Finalize(None, close, exitpriority=0)
    return _joined


def close(reason: EndReason = EndReason.EXIT) -> Path | None:
    """End the session, then wait for the tree unless a launcher does; safe to call again. Failures
    are reported, never raised. Returns the trace folder on the rank that waited for the tree."""
    folders: list[Path | None] = []
    error = attempt(lambda: folders.append(_close(reason)))
    if error is not None:
        attempt(say, f"the trace was not ended in order ({text_of(error)}); the job goes on")
    return folders[0] if folders else None


def _close(reason: EndReason) -> Path | None:
    global _session, _joined, _keywords
    session, _session = _session, None
    joined, _joined = _joined, None
    _keywords = None
    if session is None:
        return None
    forget_exits()
    raised = what_ends_the_program() if reason is EndReason.EXIT else None
    if raised is not None:
        reason = EndReason.RAISED
    session.close(reason, raised)
    if joined is None and dynamo_has_compiled():
        _tell_stage("refused", HIDDEN)
    elif joined is None:
        _tell_stage("no-call", "" if raised is None else f"{raised.error} at {raised.where}")
    if _owner() == (_ALONE, str(os.getpid())):
        del os.environ[_OWNER_VARIABLE]
    is_own = joined is not None and joined.identity.pid == os.getpid()  # no forked child's
    return joined.out if joined is not None and is_own and joined.wait_for_tree(reason) else None


def _say_why_not(error: RankscopeError, keywords: Mapping[str, object] | None) -> None:
    text = f"not tracing: {error}"
    _tell_stage("refused", text)
    if keywords:
        text = as_keywords(text)
    elif not os.environ.get(RUN_FOLDER_VARIABLE):
        text = as_variables(text)
    if isinstance(error, (SettingError, FolderError)):
        _say_once_a_host(text)
    else:
        say(text)


def _tell_stage(stage: str, text: str = "") -> None:
    if _tell is not None:
        _tell(stage, text)


def _say_once_a_host(text: str) -> None:
    """Say what all ranks of a host share: its first one says it, or the process that started it."""
    place = launcher_place()
    if place is not None and place.local_rank:
        return
    if text != _said_before:
        os.environ[_SAID_VARIABLE] = text
        say(text)


def _owner() -> tuple[str, str]:
    """Return (rank/local rank, pid) of the nearest process above that traces, or of this one."""
    name, _, pid = os.environ.get(_OWNER_VARIABLE, "").rpartition(":")
    return name, pid


def _is_child_of_a_rank() -> bool:
    """True in a process that a rank started: it must not trace as that rank. Ranks leave their name
    in the environment of their children. A name without a local rank may come from a launcher that
    was given a RANK itself (its node's number): then only a process of exactly that name is a
    child."""
    rank = os.environ.get("RANK")
    rank_name = "" if rank is None else f"{rank}/{os.environ.get('LOCAL_RANK', '')}"
    name, pid = _owner()
    if pid != str(os.getpid()) and "/" in name and (not name.endswith("/") or name == rank_name):
        return True
    if rank_name:
        os.environ[_OWNER_VARIABLE] = f"{rank_name}:{os.getpid()}"
    return False


def _is_helper() -> bool:
    """True in a process that works for one that trains: a loader's worker, a rankless child."""
    if get_worker_info() is not None:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    name, pid = _owner()
    return _is_forked or (name == _ALONE and pid != str(os.getpid()))
