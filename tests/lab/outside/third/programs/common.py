"""Where the random numbers of the third set begin."""

from laterprograms import Drawing

_DRAWING = Drawing(seed=4321, rows_from=70_000, points_from=90_000)
run, rows, points = _DRAWING.run, _DRAWING.rows, _DRAWING.points
