"""The rules: each takes one step over all ranks and yields what it finds wrong there.

A file for each subject; `STEP_RULES` in `diagnosis/check.py` lists those that are applied.
"""
