"""What a trace shows, computed from its steps alone: rules judge it and read nothing else."""
