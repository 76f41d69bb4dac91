"""`diff`: two traces of one model, compared value by value, whatever their topologies."""
