"""The command line: one command, one file, one page of documentation; no logic."""
