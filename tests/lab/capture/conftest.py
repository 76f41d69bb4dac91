"""The fixtures of tests/capture."""

from tests.capture.conftest import kernel_cache, way

__all__ = ["kernel_cache", "way"]
