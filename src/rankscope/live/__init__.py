"""What the ranks of a running job are doing, read off the ends of their streams of records."""
