"""What every solver minimises, and the duality gap that tells when it is done.

    P(w) = sum_i c_i f(y_i, <x_i, w> + s w_0) + l1 |w|_1 + l2/2 |w|^2

w_0 is the intercept (the last entry), s the value of the constant column. It is penalised like a weight (liblinear's
convention, which scikit-learn's LinearSVC and LinearSVR keep), or not at all. For any b that the conjugates admit, with z =
X^T b,

    D(b) = - sum_i c_i f*(-b_i / c_i) - sum_j max(0, |z_j| - l1)^2 / 2 l2   <=   min P,

so P(w) - D(b) certifies how far w is from the best. An intercept without penalty wants sum_i b_i = 0: it is set to its best
value first, which makes that so. Without l2 the bound is infinite unless |z_j| <= l1: b is then shrunk until it holds.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit

from partita.linear.losses import (
    EPSILON,
    HINGE,
    LOGISTIC,
    OPTIONS,
    POISSON,
    SQUARED,
    conjugate_sum,
    curvatures,
    loss_along,
    loss_sum,
    slope,
    slopes,
)
from partita.linear.rows import Rows, Vector, add, dot

KINKED = (HINGE, EPSILON)
VANISHING = 1e-9  # of the objective of w = 0
BALANCED = 1e-15  # what counts as zero for a sum of dual variables, relative to the sum of their sizes


@njit(**OPTIONS)
def _respond(
    rows: Any,
    constant: float,
    loss: int,
    y: Any,
    c: Any,
    e: float,
    h: float,
    w: Any,
    m: Any,
    b: Any,
    out: Any,
    lo: int,
    hi: int,
) -> None:
    shift, total = constant * w[-1], 0.0
    for i in range(lo, hi):
        m[i] = dot(rows, i, w) + shift
        b[i] = -c[i] * slope(loss, y[i], m[i], e, h)
        if b[i] != 0:
            add(rows, i, b[i], out)
            total += b[i]
    out[-1] += constant * total


@dataclass(frozen=True)
class Certificate:
    """Value, gap and dual point of one w."""

    value: float
    gap: float
    margins: Vector
    dual: Vector
    pulled: Vector  # X^T dual
    loose: float = 0.0  # the part of the gap that lies between margins and dual variables
    least: float = 0.0  # what the objective is taken to be at least where a gap is called relative

    @property
    def relative(self) -> float:
        """The gap, relative to the objective."""
        scale = max(abs(self.value), self.least)
        return self.gap / scale if scale > 0 else (0.0 if self.gap == 0 else np.inf)

    def holds(self, tol: float) -> bool:
        if not (np.isfinite(self.value) and np.isfinite(self.gap)):
            raise FloatingPointError("the objective is not finite")
        return self.relative <= tol


@dataclass
class Problem:
    """min P(w); see the module."""

    rows: Any  # Rows, or Columns for solvers that visit features
    y: Vector
    c: Vector
    loss: int
    l2: float = 0.0
    l1: float = 0.0
    e: float = 0.0
    penalised: bool = False  # the intercept
    positive: bool = False
    width: float = field(default=0.0)  # of the softened kink, while a solver needs one

    @cached_property
    def ridge(self) -> Vector:
        """The factor of w_j^2 / 2 for each weight, the intercept included."""
        out = np.full(self.rows.size, self.l2)
        out[-1] = self.l2 if self.penalised else 0.0
        return out

    @cached_property
    def least(self) -> float:
        """VANISHING times the objective of w = 0: a fit without any loss would have no scale of its own."""
        return VANISHING * abs(loss_sum(self.loss, self.y, np.zeros(len(self.y)), self.c, self.e, 0.0))

    @property
    def intercept(self) -> bool:
        """There is an intercept without penalty."""
        return self.rows.constant != 0 and not self.penalised

    def penalty(self, w: Vector) -> float:
        total = 0.5 * float(self.ridge @ (w * w))
        return total + self.l1 * float(np.abs(w[:-1]).sum()) if self.l1 else total

    def value(self, w: Vector, m: Vector) -> float:
        """P(w), given the margins."""
        return loss_sum(self.loss, self.y, m, self.c, self.e, 0.0) + self.penalty(w)

    def softened(self, m: Vector, t: Vector, by: float) -> float:
        """The loss at m + by t, its kink softened."""
        return loss_along(self.loss, self.y, m, t, by, self.c, self.e, self.width)

    def dual(self, m: Vector) -> tuple[Vector, float]:
        """B = -c f'(m) and its sum."""
        b = np.empty(len(m))
        return b, slopes(self.loss, self.y, m, self.c, self.e, self.width, b)

    def curvature(self, m: Vector) -> Vector:
        h = np.empty(len(m))
        curvatures(self.loss, self.y, m, self.c, self.e, self.width, h)
        return h

    def settle(self, w: Vector, m: Vector) -> tuple[Vector, float]:
        """Set an intercept without penalty to its best value, in w and in m; the dual variables and their sum."""
        b, total = self.dual(m)
        if not self.intercept:
            return b, total
        s, low, high = self.rows.constant, -np.inf, np.inf
        for _ in range(60):
            if abs(total) <= BALANCED * float(np.abs(b).sum()):
                break
            low, high = (w[-1], high) if total > 0 else (low, w[-1])
            move = self._one_step(m, b, total) / s
            if not low < w[-1] + move < high:
                move = 0.5 * (low + high) - w[-1]
            if not np.isfinite(move) or w[-1] + move == w[-1]:
                break
            w[-1] += move
            m += s * move
            b, total = self.dual(m)
        return b, total

    def _one_step(self, m: Vector, b: Vector, total: float) -> float:
        """What to add to all margins: exact for the squared and the Poisson loss, Newton's step for the others."""
        if self.loss == POISSON:
            seen = float(self.c @ self.y)
            return float(np.log(seen / (seen - total))) if seen > 0 else -1.0
        curved = float(self.c.sum()) if self.loss == SQUARED else float(self.curvature(m).sum())
        return float(np.clip(total / max(curved, 1e-300), -4.0, 4.0))

    def certify(self, w: Vector, m: Vector | None = None) -> Certificate:
        """The certificate of w with the dual point its margins give; an intercept without penalty is moved to its best."""
        if m is None and not self.intercept and isinstance(self.rows, Rows):
            return self.certified(w, *self._answer(w))
        at: Vector = self.rows.margins(w) if m is None else m
        b, _ = self.settle(w, at)
        return self.certified(w, at, b, self.rows.pull(b))

    def _answer(self, w: Vector) -> tuple[Vector, Vector, Vector]:
        """Margins, their dual variables b and X^T b, in one pass over the data."""
        rows, m, b = self.rows, np.empty(len(self.y)), np.empty(len(self.y))
        out = np.zeros((rows.team.size, rows.size))
        common = rows.parts, rows.constant, self.loss, self.y, self.c, self.e, self.width, w, m, b
        rows.team.each(lambda k: _respond(*common, out[k], *rows.cuts[k]))
        return m, b, out.sum(0) if rows.team.size > 1 else out[0]

    def certified(self, w: Vector, m: Vector, b: Vector, z: Vector) -> Certificate:
        """The certificate of w and a feasible b, z = X^T b."""
        if not self.l1 and not self.positive and self.l2:  # the penalty's part in closed form, without cancellation
            value = self.value(w, m)
            away = self.ridge * w - z
            away[-1] = away[-1] if self.penalised else 0.0
            loose = self._loose(m, b) if self.loss in KINKED else 0.0
            return Certificate(value, loose + float(away @ away) / (2 * self.l2), m, b, z, loose, self.least)
        return self._shrunk(w, m, b, z)

    def _loose(self, m: Vector, b: Vector) -> float:
        """The part of the gap that lies between margins and dual variables."""
        hard = loss_sum(self.loss, self.y, m, self.c, self.e, 0.0)
        return max(0.0, hard + conjugate_sum(self.loss, self.y, b, self.c, self.e) + float(b @ m))

    def _shrunk(self, w: Vector, m: Vector, b: Vector, z: Vector) -> Certificate:
        value, best = self.value(w, m), -np.inf
        sizes = z[:-1] if self.positive else np.abs(z[:-1])
        most = float(sizes.max(initial=0.0))
        shrinks = {1.0} if self.l2 else set()
        shrinks.add(min(1.0, self.l1 / most) if most > 0 else 1.0)
        for by in shrinks:
            over = np.maximum(0.0, by * sizes - self.l1)
            if not self.l2 and by * most > self.l1 * (1 + 1e-12):
                continue
            paid = float(over @ over) / (2 * self.l2) if self.l2 else 0.0
            best = max(best, -conjugate_sum(self.loss, self.y, by * b, self.c, self.e) - paid)
        return Certificate(value, max(0.0, value - best), m, b, z, least=self.least)


def best_constant(problem: Problem) -> Vector:
    """W = 0 with the intercept at its best."""
    w, m = np.zeros(problem.rows.size), np.zeros(problem.rows.samples)
    if problem.loss == POISSON and problem.intercept:
        w[-1] = np.log(max(float(problem.c @ problem.y) / float(problem.c.sum()), 1e-300)) / problem.rows.constant
    elif problem.loss in (LOGISTIC, SQUARED):
        problem.settle(w, m)
    return w
