"""The fixture of tests/companion."""

from tests.companion.conftest import hosts

__all__ = ["hosts"]
