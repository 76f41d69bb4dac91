"""Collectives in a rank: standing in for what issues them, and recording them as calls."""
