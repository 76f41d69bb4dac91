"""A further board of programs from outside."""
