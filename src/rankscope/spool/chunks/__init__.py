"""Files of full tensors: written by ranks, finished after them, found by reference."""
