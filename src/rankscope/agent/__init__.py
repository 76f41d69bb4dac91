"""Life inside a rank: switching tracing on, the session, its hooks, steps, values, collectives."""
