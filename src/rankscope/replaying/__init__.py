"""`replay`: one module alone, handed the inputs of a recorded call."""
