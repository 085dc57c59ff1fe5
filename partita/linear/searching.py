"""The line search of the second-order solvers: margins and their changes are known, so that a trial costs no pass over the
data.
"""

import numpy as np

from partita.linear.problem import Problem
from partita.linear.rows import Vector

ARMIJO = 1e-4  # of the promised decrease, the least that counts
HALVINGS = 40  # until a direction is given up


def along(problem: Problem, w: Vector, m: Vector, p: Vector, t: Vector, gradient: Vector) -> tuple[float, float]:
    """How far to go along p, and the decrease a whole step promises."""
    size = lambda v: problem.l1 * float(np.abs(v[:-1]).sum()) if problem.l1 else 0.0
    linear, square, here = float(problem.ridge @ (w * p)), float(problem.ridge @ (p * p)), size(w)
    slope = float(gradient @ p) + size(w + p) - here
    old = problem.softened(m, t, 0.0)
    noise = 1e-14 * (abs(old) + problem.penalty(w))
    by = 1.0
    for _ in range(HALVINGS):
        change = problem.softened(m, t, by) - old + by * linear + 0.5 * by * by * square + size(w + by * p) - here
        if change <= ARMIJO * by * slope + noise:
            return by, -slope
        by *= 0.5
    return 0.0, -slope
