"""Fixed cells in a mapped file: the write side, the read side, recovery. No torch, no sockets."""
