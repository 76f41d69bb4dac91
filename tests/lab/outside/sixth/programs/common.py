"""Where the random numbers of the sixth set begin."""

from laterprograms import Drawing

_DRAWING = Drawing(seed=1613, rows_from=310_000, points_from=350_000)
run, rows, points = _DRAWING.run, _DRAWING.rows, _DRAWING.points
