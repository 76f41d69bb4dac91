"""The rules of `check`: a file for each subject, one row of `STEP_RULES` for each rule."""
