"""rankscope as a callback of the frameworks that own the training loop: one framework, one file,
the only one that imports it.

Nothing is imported here: `from rankscope.integrations.transformers import RankscopeCallback`.
"""
