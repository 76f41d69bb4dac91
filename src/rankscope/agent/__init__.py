"""Life inside a rank: settings, identity, the clock that counts steps, hooks, and the session that
joins them.
"""
