"""The programs of the benchmark, by what they split: batch, layers, tensors, sequence, experts."""
