"""A board of mainstream and of unusual programs from outside."""
