"""The digest of values on accelerators."""
