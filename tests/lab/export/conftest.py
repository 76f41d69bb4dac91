"""The fixtures of tests/export."""

from tests.export.conftest import trace, traces

__all__ = ["trace", "traces"]
