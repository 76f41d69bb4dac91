"""Bringing records to one place: a relay per host, a collector; zmq is known here alone."""
