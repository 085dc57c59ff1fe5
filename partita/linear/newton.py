"""Newton's method: the direction from a factorised Hessian, by conjugate gradients, or by coordinates where there is an L1
penalty.

Rows are read in panels that stay in cache; a step reads the data two or three times. A line search costs no pass: margins are
kept, and so are the changes a direction makes to them. A kink is softened to a width that shrinks as Newton converges (the
central path of the box on the dual variables, with entropy as its barrier), so a few tens of steps reach any accuracy,
whatever the conditioning. Where there are many more samples than features, the first steps are made on every SKIP-th sample:
what they cost does not show, and the steps that remain are one or two.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from partita.linear.interior import interior
from partita.linear.losses import OPTIONS, SQUARED, soften
from partita.linear.problem import KINKED, Problem, best_constant
from partita.linear.rows import Rows, Vector
from partita.linear.searching import along
from partita.linear.stopping import Outcome, Stop

SKIP, MANY = 16, 400  # every how many samples the first steps use; samples per feature from which that pays
NARROW = 0.2  # by how much the softened kink shrinks once Newton has converged on it

Direction = Callable[[Problem, Vector, Vector, Vector, float], tuple[Vector, Vector]]


def newton(problem: Problem, stop: Stop, start: Vector | None, direction: Direction) -> Outcome:
    """Minimise by Newton steps along `direction`."""
    rows = problem.rows
    if problem.loss in KINKED and rows.samples <= MANY * rows.size:
        return interior(problem, stop)
    if start is None and rows.samples > MANY * rows.size and problem.c.min() > 0 and direction is not conjugate:
        start = newton(_thinned(problem), Stop(max(stop.tol, 1e-3), 30), None, direction).w
    w = best_constant(problem) if start is None else start.copy()
    m = rows.margins(w)
    problem.width = 1.0 if problem.loss in KINKED else 0.0
    for count in range(stop.most):
        found = problem.certify(w, m)
        if found.holds(stop.tol):
            return Outcome(w, count, found)
        gradient = problem.ridge * w - found.pulled
        p, t = direction(problem, w, m, gradient, min(0.1, stop.tol / max(found.relative, 1e-300)))
        by, promised = along(problem, w, m, p, t, gradient)
        w += by * p
        m += by * t
        if problem.width and by < 1.0:  # the softened kink has become too narrow for this method
            return interior(problem, stop)
        if by == 0.0:
            return Outcome(w, count + 1, problem.certify(w, m))
        if promised <= found.gap and found.loose > 0.5 * stop.tol * abs(found.value):
            problem.width *= NARROW
    return Outcome(w, stop.most, problem.certify(w, m))


def _thinned(problem: Problem) -> Problem:
    """The same problem on every SKIP-th sample."""
    rows, some = problem.rows, problem.rows.matrix[::SKIP]
    thin = Rows(some if rows.sparse else np.ascontiguousarray(some), rows.constant, rows.team)
    y, c = problem.y[::SKIP], problem.c[::SKIP]
    return replace(problem, rows=thin, y=np.ascontiguousarray(y), c=c * (problem.c.sum() / c.sum()))


def factorised(problem: Problem, w: Vector, m: Vector, gradient: Vector, forcing: float) -> tuple[Vector, Vector]:
    """-H^-1 g with the Hessian summed over panels of rows."""
    H = _hessian(problem, m)
    try:
        p = -cho_solve(cho_factor(H, check_finite=False), gradient, check_finite=False)
    except LinAlgError:  # without a penalty H may be singular: the shortest step then
        p = -np.linalg.lstsq(H, gradient, rcond=None)[0]
    p = np.asarray(p, np.float64)
    if problem.rows.constant == 0:
        p[-1] = 0.0
    return p, problem.rows.margins(p)


def _hessian(problem: Problem, m: Vector) -> Vector:
    H = problem.rows.gram(problem.curvature(m))
    H[np.diag_indices_from(H)] += problem.ridge
    if problem.rows.constant == 0:
        H[-1, -1] = 1.0
    return H


def conjugate(problem: Problem, w: Vector, m: Vector, gradient: Vector, forcing: float) -> tuple[Vector, Vector]:
    """-H^-1 g by conjugate gradients to a residual of sqrt(forcing) |g|, one pass over the data a step."""
    h = problem.curvature(m)
    p, t, r = np.zeros_like(gradient), np.zeros_like(m), -gradient
    if problem.rows.constant == 0:
        r[-1] = 0.0
    scale = np.ones_like(r)
    if problem.intercept:
        scale[-1] = 1.0 / max(float(h.sum()) * problem.rows.constant**2, 1e-300)
    z = scale * r
    s, old, enough = z.copy(), float(r @ z), min(forcing, 0.25) * float(r @ r)
    for _ in range(10 * len(r)):
        if float(r @ r) <= enough or old == 0.0:
            break
        along, turned = problem.rows.product(s, h)
        turned += problem.ridge * s
        by = old / float(s @ turned)
        p += by * s
        t += by * along
        r -= by * turned
        z = scale * r
        new = float(r @ z)
        s = z + (new / old) * s
        old = new
    return p, t


@njit(**OPTIONS)
def _by_coordinates(H: Any, g: Any, w: Any, p: Any, l1: float, positive: Any, tol: float, most: int) -> None:
    """Minimise g p + p H p / 2 + l1 |w + p|_1 over p (the last coordinate free), one coordinate after another, from p = 0."""
    d, r = w.shape[0], g.copy()
    for _ in range(most):
        moved = 0.0
        for j in range(d):
            if H[j, j] > 0:
                here = w[j] + p[j]
                new = here - r[j] / H[j, j]
                if j < d - 1:
                    new = soften(new, l1 / H[j, j])
                    if positive:
                        new = max(new, 0.0)
                by = new - here
                if by != 0:
                    p[j] += by
                    for k in range(d):
                        r[k] += by * H[j, k]
                    moved += H[j, j] * by * by
        if moved <= tol:
            break


def sparse_step(problem: Problem, w: Vector, m: Vector, gradient: Vector, forcing: float) -> tuple[Vector, Vector]:
    """The minimiser of the quadratic model with the L1 penalty, by coordinates of the Gram matrix."""
    H, p = _hessian(problem, m), np.zeros_like(w)
    tol = 1e-15 if problem.loss == SQUARED else 1e-12
    _by_coordinates(H, gradient, w, p, problem.l1, problem.positive, tol * max(problem.value(w, m), 1e-300), 100_000)
    return p, problem.rows.margins(p)
