"""The public fault benchmark: small programs that are right, one local patch that makes each of
them wrong, and an independent proof of both. `python -m tests.lab.faults` scores rankscope on them.
"""
