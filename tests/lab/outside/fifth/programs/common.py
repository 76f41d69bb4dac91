"""Where the random numbers of the fifth set begin."""

from laterprograms import Drawing

_DRAWING = Drawing(seed=1409, rows_from=230_000, points_from=270_000)
run, rows, points = _DRAWING.run, _DRAWING.rows, _DRAWING.points
