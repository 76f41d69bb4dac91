"""A further board of programs from outside, of other kinds than the first."""
