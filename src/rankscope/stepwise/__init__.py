"""What is done with each traced step of a running job, soon after it ended: it is written into the
tree, and goes through `check`."""
