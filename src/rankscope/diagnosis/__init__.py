"""Verdicts: what is wrong in a trace, where it began, and what followed from it."""
