"""What a trace looks like outside: exports for other tools. Reads the tree, knows no torch."""
