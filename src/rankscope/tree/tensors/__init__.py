"""Full tensors of a trace: found by name, put together from pieces, written out."""
