"""Every claim of a report recomputed from full tensors: `python -m tests.lab.claims`. The rooms
that compute the report are not imported here: what is wrong there would be wrong here too.
"""
