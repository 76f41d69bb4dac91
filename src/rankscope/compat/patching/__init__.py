"""Class patching of transformers: registered classes stand in for others while a block runs."""
