"""Bugs that people had, from public trackers, as programs of their own: each with its source, a
proof that knows nothing of rankscope, and its right twin. `python -m tests.lab.real` scores
`check`.
"""
