"""How a job gets traced: torchrun's wrapper, its logs-specs entry point and the start-up file."""
