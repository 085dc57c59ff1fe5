"""Primal coordinate descent on a growing working set, with Anderson extrapolation: the form for an L1 penalty.

Only coordinates that can matter are visited: those of the support and the worst violators outside, at most twice the support.
On the set, w_j goes to the minimiser of its own problem, and the intercept moves with it (columns are centred without being
written). Every few sweeps the last iterates are combined as if the iteration were linear, which near the end it is; a
combination that is no better is thrown away. A loss that is not quadratic is replaced by its second-order model and searched
along the step found (proximal Newton).

Source: Bertrand et al. 2022, arXiv 2204.07826 (working sets, extrapolation for coordinate descent); Massias et al. 2018,
arXiv 1802.07481; Bertrand & Massias 2021, arXiv 2011.10065 (Anderson).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from partita.linear.losses import OPTIONS, SQUARED, soften
from partita.linear.problem import Certificate, Problem, best_constant
from partita.linear.rows import Vector, add, dot, spread, weigh
from partita.linear.searching import along
from partita.linear.stopping import Outcome, Stop

FIRST = 64  # coordinates in the first working set
DEPTH = 5  # iterates that an extrapolation combines
SWEEPS = 200  # at most, between two looks at all coordinates

Chosen = NDArray[np.intp]


@njit(**OPTIONS)
def _measure(columns: Any, chosen: Any, h: Any, centred: Any, norms: Any, means: Any, total: float) -> None:
    """Curvature of each chosen coordinate, and its mean, under sample weights h."""
    for k in range(chosen.shape[0]):
        j = chosen[k]
        square, mean = weigh(columns, j, h)
        means[j] = mean / total if centred else 0.0
        norms[j] = max(0.0, square - total * means[j] * means[j])
        if norms[j] <= 1e-12 * square:  # a constant column
            norms[j] = 0.0


@njit(**OPTIONS)
def _sweep(
    columns: Any, chosen: Any, h: Any, even: Any, norms: Any, means: Any, total: float, shift: float, l1: float, l2: float,
    positive: Any, w: Any, r: Any,
) -> tuple[float, float]:  # fmt: skip
    """Visit the chosen coordinates once; the shift and the gain.

    r + shift h is b - h (change of the margins): the intercept's part of the change is not written to r.
    """
    gained = 0.0
    for k in range(chosen.shape[0]):
        j = chosen[k]
        steep = norms[j] + l2
        if norms[j] > 0:
            g = dot(columns, j, r) + shift * total * means[j]
            new = soften(w[j] * norms[j] + g, l1) / steep
            if positive:
                new = max(new, 0.0)
        else:
            new = 0.0
        by = new - w[j]
        if by != 0:
            w[j] = new
            if even:
                add(columns, j, -by * h[0], r)
            else:
                spread(columns, j, -by, h, r)
            shift += by * means[j]
            gained += steep * by * by
    return shift, gained


@dataclass
class Model:
    """The second-order model of the loss about some margins, and where it is being minimised."""

    problem: Problem
    h: Vector  # curvature of each sample
    w: Vector
    r: Vector
    shift: float = 0.0

    def __post_init__(self) -> None:
        self.total, self.even = float(self.h.sum()), bool(self.h.min() == self.h.max())
        self.norms, self.means = np.zeros(len(self.w)), np.zeros(len(self.w))
        self.inverse = np.divide(1.0, self.h, out=np.zeros_like(self.h), where=self.h > 0)

    def descend(self, chosen: Chosen, enough: float, sweeps: int) -> None:
        """Sweep the chosen coordinates until a sweep gains less than `enough`, or a hundredth of it while sweeps are cheap.

        Args:
            chosen: The working set.
            enough: Gain of a sweep that is small against the gap.
            sweeps: How many sweeps cost as much as a look at all coordinates.
        """
        problem, columns = self.problem, self.problem.rows
        _measure(columns.parts, chosen, self.h, problem.intercept, self.norms, self.means, self.total)
        trail = []
        for count in range(SWEEPS):
            trail.append((self.w[chosen], self.r.copy(), self.shift))
            self.shift, gained = _sweep(
                columns.parts, chosen, self.h, self.even, self.norms, self.means, self.total, self.shift,
                problem.l1, problem.l2, problem.positive, self.w, self.r,
            )  # fmt: skip
            if gained <= (enough if count >= sweeps else 0.01 * enough):
                return
            if len(trail) == DEPTH:
                self._extrapolate(chosen, [*trail, (self.w[chosen], self.r.copy(), self.shift)])
                trail = []

    def _extrapolate(self, chosen: Chosen, trail: list[tuple[Vector, Vector, float]]) -> None:
        """Combine the last iterates so that their changes cancel best; kept if it lowers the model."""
        places = np.array([w for w, _, _ in trail])
        changes = np.diff(places, axis=0)
        products = changes @ changes.T
        products[np.diag_indices_from(products)] += 1e-12 * np.trace(products)
        parts = np.linalg.solve(products, np.ones(len(changes)))
        if not np.isfinite(parts).all() or parts.sum() == 0:
            return
        parts /= parts.sum()
        w, r = self.w.copy(), np.tensordot(parts, np.array([r for _, r, _ in trail[1:]]), 1)
        w[chosen] = parts @ places[1:]
        shift = float(parts @ [s for _, _, s in trail[1:]])
        if self.problem.positive and w[chosen].min() < 0:
            return
        if self._value(w, r, shift) < self._value(self.w, self.r, self.shift):
            self.w[:], self.r, self.shift = w, r, shift

    def _value(self, w: Vector, r: Vector, shift: float) -> float:
        left = r + shift * self.h
        problem = self.problem
        return (
            0.5 * float(left @ (left * self.inverse)) + problem.l1 * np.abs(w[:-1]).sum() + 0.5 * problem.l2 * w[:-1] @ w[:-1]
        )


def coordinates(problem: Problem, stop: Stop, start: Vector | None) -> Outcome:
    """Minimise over a growing working set; wants rows given by columns, and a smooth loss."""
    w = best_constant(problem) if start is None else start.copy()
    m, exact = problem.rows.margins(w), 0.01
    found = problem.certify(w, m)
    for count in range(stop.most):
        if found.holds(stop.tol):
            return Outcome(w, count, found)
        chosen, before = violators(problem, w, found), found.gap
        h = problem.c if problem.loss == SQUARED else problem.curvature(m)
        model = Model(problem, h, w.copy(), found.dual.copy())
        model.descend(chosen, exact * found.gap, problem.rows.features // max(len(chosen), 1))
        p = model.w - w
        p[-1] = -model.shift / problem.rows.constant if problem.intercept else 0.0
        t = problem.rows.margins(p)
        by, _ = (1.0, 0.0) if problem.loss == SQUARED else along(problem, w, m, p, t, problem.ridge * w - found.pulled)
        w, m = w + by * p, m + by * t
        found = problem.certify(w, m)
        if found.gap > 0.5 * before:
            exact = max(0.1 * exact, 1e-8)
    return Outcome(w, stop.most, found)


def violators(problem: Problem, w: Vector, found: Certificate) -> Chosen:
    """The support and the worst violators outside, in order of memory."""
    weights, slack = w[:-1], found.pulled[:-1] - problem.l2 * w[:-1]
    outside = np.maximum(0.0, (slack if problem.positive else np.abs(slack)) - problem.l1)
    inside = weights != 0
    outside[inside] = np.inf
    most = max(FIRST, 2 * int(inside.sum()))
    wanted = int((outside > 0).sum())
    if wanted <= most:
        return np.flatnonzero(outside > 0)
    return np.sort(np.argpartition(outside, -most)[-most:])
