"""Module hooks in a rank: putting them on, and what happens when a call begins and ends."""
