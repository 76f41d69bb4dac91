"""The fixtures of tests/compat."""

from tests.compat.conftest import empty_mapping, make_package

__all__ = ["empty_mapping", "make_package"]
