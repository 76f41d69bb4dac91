"""The fixtures of tests/launcher."""

from tests.launcher.conftest import ddp_run, launch

__all__ = ["ddp_run", "launch"]
