"""The one process beside the ranks of a host: it copies what they record, watches, and gathers the
run on the head host. zmq is known here alone."""
