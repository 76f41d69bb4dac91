"""Torch values to records: what a value is, and its digest. Nothing here is seen by torch."""
