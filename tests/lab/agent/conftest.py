"""The fixture of tests/agent."""

from tests.agent.conftest import _no_optimizer_of_another_file_is_left

__all__ = ["_no_optimizer_of_another_file_is_left"]
