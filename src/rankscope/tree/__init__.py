"""What a trace is: the documented tree, its files, and typed reading."""
