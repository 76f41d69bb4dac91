"""Where the random numbers of the fourth set begin."""

from laterprograms import Drawing

_DRAWING = Drawing(seed=977, rows_from=130_000, points_from=170_000)
run, rows, points = _DRAWING.run, _DRAWING.rows, _DRAWING.points
