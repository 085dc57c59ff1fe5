"""A primal-dual interior point method for the losses with a kink: about a dozen d x d systems to any accuracy, whatever the
conditioning.

Each kink is a side t = a - s m of a margin that costs c max(0, t): one for the hinge (a = 1, s = y), two for the tube (a =
+-y - e, s = +-1). With p = max(0, t) and q = p - t, optimality is

    l2 w = sum s alpha x,   alpha q = 0,   (c - alpha) p = 0,   0 <= alpha <= c,

and Newton's method on it with 0 replaced by a falling mu needs X^T D X + l2 I, D = 1 / (q / alpha + p / (c - alpha)) summed
over sides.

Source: Mehrotra 1992, doi:10.1137/0802028 (predictor, corrector); Ferris & Munson 2002, doi:10.1137/S1052623400374379 (for
these problems).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from partita.linear.losses import HINGE
from partita.linear.problem import Certificate, Problem
from partita.linear.rows import Vector
from partita.linear.stopping import Outcome, Stop

BACK = 0.995  # of the way to the border
ROUNDED = 1e-6  # a relative gap from which a step that does not lower it is the last
Sides = NDArray[np.float64]  # (sides, samples)


@dataclass
class _Point:
    alpha: Sides
    beta: Sides  # c - alpha
    p: Sides
    q: Sides

    def mu(self, c: Vector) -> float:
        """Mean of the products that are to vanish, for a sample of weight 1."""
        return float((self.alpha * self.q).sum() + (self.beta * self.p).sum()) / (2 * len(self.alpha) * float(c.sum()))

    def reach(self, by: "_Point") -> float:
        """How far one can go along `by` before a border."""
        longest = 1.0
        for here, move in ((self.alpha, by.alpha), (self.beta, by.beta), (self.p, by.p), (self.q, by.q)):
            falling = move < 0
            if falling.any():
                longest = min(longest, float((-here[falling] / move[falling]).min()))
        return longest

    def moved(self, by: "_Point", length: float) -> "_Point":
        return _Point(*(h + length * m for h, m in zip(self.parts, by.parts, strict=True)))

    @property
    def parts(self) -> tuple[Sides, Sides, Sides, Sides]:
        return self.alpha, self.beta, self.p, self.q


def interior(problem: Problem, stop: Stop) -> Outcome:
    """Minimise a loss with a kink; wants l2 > 0 and few features."""
    problem.width = 0.0
    a, s = _sides(problem)
    w, m = np.zeros(problem.rows.size), np.zeros(problem.rows.samples)
    at = _begin(problem, a - s * m)
    best = _certify(problem, w, m, s, at)
    kept = w
    for count in range(stop.most):
        if best.holds(stop.tol):
            return Outcome(kept, count, best)
        w, m, at = _step(problem, w, m, a, s, at)
        found = _certify(problem, w, m, s, at)
        if found.gap < best.gap:
            best, kept = found, w
        elif best.relative < ROUNDED:  # rounding is all that is left
            return Outcome(kept, count + 1, best)
    return Outcome(kept, stop.most, best)


def _sides(problem: Problem) -> tuple[Sides, Sides]:
    y = problem.y
    if problem.loss == HINGE:
        return np.ones((1, len(y))), y[None, :]
    return np.stack([y - problem.e, -y - problem.e]), np.stack([np.ones_like(y), -np.ones_like(y)])


def _begin(problem: Problem, t: Sides) -> _Point:
    """The middle of the box, and p, q well inside with p - q = t."""
    alpha = np.broadcast_to(0.5 * problem.c, t.shape).copy()
    room = np.sqrt(t * t + float((problem.c * t * t).sum() / (len(t) * problem.c.sum())) + 1e-12)
    return _Point(alpha, alpha.copy(), 0.5 * (room + t), 0.5 * (room - t))


def _certify(problem: Problem, w: Vector, m: Vector, s: Sides, at: _Point) -> Certificate:
    b = (s * at.alpha).sum(0)
    return problem.certified(w, m, b, problem.rows.pull(b))


def _step(problem: Problem, w: Vector, m: Vector, a: Sides, s: Sides, at: _Point) -> tuple[Vector, Vector, _Point]:
    """A predictor for the size of mu, then the step that also corrects for the products of the predictor's changes."""
    rows, D = problem.rows, 1.0 / (at.q / at.alpha + at.p / at.beta)
    H = rows.gram((s * s * D).sum(0))
    H[np.diag_indices_from(H)] += problem.ridge
    if rows.constant == 0:
        H[-1, -1] = 1.0
    factor = cho_factor(H, check_finite=False)

    def solve(first: Sides | float, second: Sides | float) -> tuple[Vector, Vector, _Point]:
        """The step to alpha q = first, beta p = second."""
        pull = first / at.alpha - second / at.beta
        right = rows.pull((s * (at.alpha + D * (a + pull))).sum(0))
        new = cho_solve(factor, right, check_finite=False)
        margins = rows.margins(new)
        alpha = D * (a - s * margins + pull)
        q = (first - at.q * (at.alpha + alpha)) / at.alpha
        p = (second - at.p * (at.beta - alpha)) / at.beta
        return new - w, margins - m, _Point(alpha, -alpha, p, q)

    _, _, ahead = solve(0.0, 0.0)
    mu = at.mu(problem.c)
    target = mu * (at.moved(ahead, at.reach(ahead)).mu(problem.c) / mu) ** 3 * problem.c
    dw, dm, by = solve(target - ahead.alpha * ahead.q, target - ahead.beta * ahead.p)
    length = min(1.0, BACK * at.reach(by))
    w, m, at = w + length * dw, m + length * dm, at.moved(by, length)
    off = at.p - at.q - (a - s * m)  # rounding; the larger of the two can bear it
    at.p -= np.where(at.p > at.q, off, 0.0)
    at.q += np.where(at.p > at.q, 0.0, off)
    return w, m, at
