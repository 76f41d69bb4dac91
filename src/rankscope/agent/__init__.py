"""Life inside a rank: switching tracing on, the session, and what it joins: hooks, steps, values
and collectives.
"""
