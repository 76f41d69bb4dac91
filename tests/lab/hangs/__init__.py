"""Jobs that stand still, and some that are only slow: who is missing?"""
