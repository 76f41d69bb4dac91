"""The programs, by what is unusual in them."""
