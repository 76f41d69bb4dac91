"""The reader of a running job, a child of the companion: it says where the ranks are, judges steps
that are over, and writes them into the tree."""
