"""Failures put into every function and every call of the rank side: is the training still the
same?
"""
