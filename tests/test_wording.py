"""Messages name what the reader typed, and what they mistyped."""

from __future__ import annotations

from rankscope.settings import SETTINGS, as_keywords, as_variables, misspelt_variables

TEXT = "choose another disk with --rs-spool or less with --rs-spool-bytes; see --rs-out."


def test_options_become_variables_or_keywords():
    assert as_variables(TEXT) == (
        "choose another disk with RANKSCOPE_SPOOL or less with RANKSCOPE_SPOOL_BYTES; "
        "see RANKSCOPE_OUT."
    )
    assert (
        as_keywords(TEXT) == "choose another disk with spool= or less with spool_bytes=; see out=."
    )


def test_a_misspelt_variable_is_named_with_the_nearest_one():
    environ = {"RANKSCOPE": "1", "RANKSCOPE_OUTT": "x", "RANKSCOPE_STEP": "1", "HOME": "/"}
    assert misspelt_variables(environ) == (
        "RANKSCOPE_OUTT is not a setting, did you mean RANKSCOPE_OUT?; "
        "RANKSCOPE_STEP is not a setting, did you mean RANKSCOPE_STEPS?"
    )
    for name in ("RANKSCOP", "RANKSCOPES", "RANSKCOPE", "RANKSCOBE"):
        assert (
            misspelt_variables({name: "1"}) == f"{name} is not a setting, did you mean RANKSCOPE?"
        )
    assert misspelt_variables({"RANK": "1", "RANKS": "2", "TRANSCOPE": "1", "RANSOME": "1"}) == ""
    assert misspelt_variables({"RANKSCOPE_XYZZYQ": "1"}) == "RANKSCOPE_XYZZYQ is not a setting"


def test_variables_that_mean_something_are_never_misspelt():
    environ = {setting.variable: "1" for setting in SETTINGS}
    others = ("", "_RUN_FOLDER", "_OWNER", "_SAID", "_KERNEL", "_VENV", "_TORCH", "_PYTHON")
    assert misspelt_variables({**environ, **{"RANKSCOPE" + end: "1" for end in others}}) == ""
