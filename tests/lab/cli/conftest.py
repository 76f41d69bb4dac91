"""The fixture of tests/cli."""

from tests.cli.conftest import _lines_of_any_length

__all__ = ["_lines_of_any_length"]
