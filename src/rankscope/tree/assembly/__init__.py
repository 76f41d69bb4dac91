"""From the ranks' records to merged tables: streams, calls, values, and wholes put together."""
