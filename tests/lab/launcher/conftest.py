"""The fixture of tests/launcher."""

from tests.launcher.conftest import launch

__all__ = ["launch"]
