"""The tests; a package so that ranks can import what is beside them."""
