"""The rules of `check`: a file for each subject, one row of `table.py` for each rule."""
