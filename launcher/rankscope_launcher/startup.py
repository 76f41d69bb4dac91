"""What `rankscope.pth` calls at interpreter start when RANKSCOPE is set: arm once torch is there.

Nothing of torch, and nothing of rankscope but this file, is imported here. A finder in front of
`sys.meta_path` waits for the import of `torch`, lets it finish, arms the session and leaves. That
torch is merely looked for (`importlib.util.find_spec`, as many libraries do) must not use it up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

_SAID_VARIABLE = "RANKSCOPE_SAID"


class _AfterTorch(MetaPathFinder):
    """Finds `torch` by the other finders, with a loader that arms rankscope afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # very old finders have none
            if find is not None and not isinstance(finder, _AfterTorch):
                spec: ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _ArmingLoader(spec.loader)
                    return spec
        return None


class _ArmingLoader(Loader):
    """Another loader, and one call after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        # inspect, pkgutil and importlib.resources ask a loader for much more than a Loader has
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _AfterTorch)]
        _arm()


def install() -> None:
    """Arm rankscope now where torch is imported already, else as soon as it is.

    Safe to call twice: a virtual environment on top of system packages runs two start-up files.
    """
    if "torch" in sys.modules:
        _arm()
    elif not _is_waiting():
        sys.meta_path.insert(0, _AfterTorch())
        tell("python")
        atexit.register(_tell_of_the_end, os.getpid())


def _is_waiting() -> bool:
    return any(isinstance(finder, _AfterTorch) for finder in sys.meta_path)


def _tell_of_the_end(pid: int) -> None:
    if _is_waiting() and os.getpid() == pid:  # no forked child
        error = getattr(sys, "last_value", None)
        tell("no-torch", "" if error is None else f"{type(error).__name__}: {error}")


def tell(stage: str, text: str = "") -> None:
    """Note how far this process came, for the launcher (`untraced`) where there is one."""
    rank, folder = os.environ.get("RANK"), os.environ.get("RANKSCOPE_RUN_FOLDER")
    if rank is None or folder is None:
        return
    with contextlib.suppress(Exception):  # an exception's text may raise, a disk may be full
        descriptor = os.open(f"{folder}/reached", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        line = f"{rank} {os.getpid()} {stage} {' '.join(text.split())}"[:400]
        os.write(descriptor, line.encode(errors="replace") + b"\n")
        os.close(descriptor)


def _arm() -> None:
    try:
        from rankscope.agent.activation import arm

        arm(tell=tell)
    except Exception as error:  # noqa: BLE001  # torch was imported to train, which goes on untraced
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            tell("refused", text)
        if os.environ.get(_SAID_VARIABLE) == text:
            return  # the process that started this one has said it
        os.environ[_SAID_VARIABLE] = text
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or None
            sys.stderr.write(
                f"rankscope: process {os.getpid()} goes on untraced: {text}. Check that rankscope "
                "and torch are in the same environment, or unset RANKSCOPE.\n"
            )
