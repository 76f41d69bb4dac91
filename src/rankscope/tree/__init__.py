"""What a trace is: assembly of the ranks' records into one tree, its files, and typed reading."""
