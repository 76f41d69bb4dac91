"""Tensors in a rank: read in hooks, at setup and around optimizer steps, and kept in full."""
