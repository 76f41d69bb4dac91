"""Verdicts while a job runs: every traced step goes through `check` soon after it ended."""
