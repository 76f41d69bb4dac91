"""The rules: each takes one step over all ranks and yields what it finds wrong there."""
