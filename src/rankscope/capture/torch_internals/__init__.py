"""Every private name of torch that rankscope uses, each with what happens where it is missing.

torch's own tracing tools live off the same names; they change between releases. Nothing here raises
for a missing name: each function says what it then does. One file for each part of torch.
"""
