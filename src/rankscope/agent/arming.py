"""Switching tracing on in a process, once, and ending it in order."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping

from rankscope.agent.guard import say
from rankscope.agent.joining import Joined, join_run
from rankscope.agent.session import Opened, Session
from rankscope.agent.settings import Settings, settings_from
from rankscope.errors import FolderError, RankscopeError, SettingError
from rankscope.record.run import EndReason

__all__ = ["arm", "close", "current_session", "hold"]

_OWNER_VARIABLE = "RANKSCOPE_OWNER"
"""rank:pid of the process that traces under this RANK."""
_session: Session | None = None
_joined: Joined | None = None


def current_session() -> Session | None:
    """Return the session of this process, None where nothing is armed."""
    return _session


def hold(session: Session | None) -> None:
    """Make a session that somebody else opens and closes the one of this process; None
    lets it go.
    """
    global _session
    _session = session


def arm(given: Mapping[str, object] | None = None) -> Session | None:
    """Arm tracing in this process; what is wrong with the settings is said once, and the job goes
    on untraced.

    Args:
        given: settings by keyword; the rest comes from `RANKSCOPE_*` variables and defaults.

    Returns:
        the session, None where the settings cannot be used.
    """
    global _session
    if _session is not None:
        return _session
    if _is_child_of_a_rank():
        return None
    try:
        settings = settings_from(given)
    except RankscopeError as error:
        _say_once_a_host(error)
        return None
    _session = Session(settings, lambda: _open(settings))
    atexit.register(close)
    return _session


def _open(settings: Settings) -> Opened | None:
    global _joined
    try:
        _joined = join_run(settings)
    except RankscopeError as error:
        _say_once_a_host(error)
        return None
    return _joined.opened if _joined else None


def close(reason: EndReason = EndReason.EXIT) -> None:
    """End the session, then wait for the tree where no launcher does. Called at exit; safe to call
    again.
    """
    global _session, _joined
    session, _session = _session, None
    joined, _joined = _joined, None
    if session is None:
        return
    if reason is EndReason.EXIT and _is_ended_by_exception():
        reason = EndReason.RAISED
    session.close(reason)
    if joined is not None and joined.opened.identity.pid == os.getpid():  # not a forked child
        joined.wait_for_tree(reason)


def _say_once_a_host(error: RankscopeError) -> None:
    """Say why nothing is traced; what all ranks of a host share only its first one says."""
    is_shared = isinstance(error, (SettingError, FolderError))
    if not is_shared or os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"not tracing: {error}")


def _is_child_of_a_rank() -> bool:
    """True in a process that a rank started and that inherited its RANK: it must not pose as it.

    A rank leaves its own name in the environment for those it starts. The launcher's agent has no
    rank, so its name is nobody's.
    """
    rank = os.environ.get("RANK")
    if rank is None:
        return False
    name, _, pid = os.environ.get(_OWNER_VARIABLE, "").partition(":")
    if name == rank and pid != str(os.getpid()):
        return True
    os.environ[_OWNER_VARIABLE] = f"{rank}:{os.getpid()}"
    return False


def _is_ended_by_exception() -> bool:
    """True at exit after an uncaught exception; the interpreter notes it before `atexit` runs."""
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return not is_interactive and getattr(sys, "last_value", None) is not None
