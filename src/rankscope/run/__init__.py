"""A run on one host: names and folders, locks, companions, and whether anybody is still at work."""
