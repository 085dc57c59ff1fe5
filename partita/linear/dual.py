"""Dual coordinate descent in buckets, one replica of the shared vector per thread, buckets dealt anew every epoch.

    w = sum_i b_i x_i / l2 is shared; a step on b_i reads <x_i, w> and adds to w.

Buckets of consecutive samples are shuffled, samples in a bucket are not: fewer random numbers, and memory is read ahead. Each
of T threads works on its own copy of w against a quadratic model that is T times as steep, and the copies are merged once per
epoch, w += sum of changes / T: nothing is shared while threads run, so a result depends on the seed and the number of threads
alone. Samples whose variables have not moved twice in a row rest while the others are gathered and visited alone for some
epochs. An intercept without penalty is held by rho/2 (w_0 - centre)^2, and the centre follows it.

Source: Ioannou, Mendler-Duenner, Parnell 2019, arXiv 1911.07722 (buckets, replicas, dynamic partitioning); Hsieh et al. 2008,
doi:10.1145/1390156.1390208 (the coordinate steps, samples that rest).
"""

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from partita.linear.losses import LOGISTIC, OPTIONS, dual_step
from partita.linear.problem import KINKED, Certificate, Problem
from partita.linear.rows import Rows, Vector, add, dot
from partita.linear.stopping import Outcome, Stop

BUCKET = 16  # samples: two cache lines of dual variables (Ioannou et al. use 8 or 16)

HOLD = 16.0  # the intercept's hold, in typical squared norms of a sample
RESTS = 2  # visits without a move after which a sample rests
ALONE = 6  # epochs at most over the samples that do not rest, before all are visited again
HALF = 0.5  # of the tolerance, times the objective of w = 0: the gain at which to look at the gap first
SETTLED = 0.05  # of the first of these epochs' gain, a gain after which they are visited no more


@njit(**OPTIONS)
def _epoch(
    rows: Any, constant: float, loss: int, e: float, y: Any, c: Any, q: Any, b: Any, still: Any, w: Any,
    by: float, last: float, awake: Any, order: Any, lo: int, hi: int,
) -> float:  # fmt: skip
    """Descend on the samples of some buckets; the gain of the dual, which near the end is about the gap."""
    gained = 0.0
    for k in range(lo, hi):
        for i in awake[order[k] * BUCKET : (order[k] + 1) * BUCKET]:
            m = dot(rows, i, w) + constant * w[-1]
            new = dual_step(loss, y[i], m, b[i], c[i], q[i], e)
            d = new - b[i]
            if d != 0:
                still[i] = 0
                b[i] = new
                add(rows, i, by * d, w)
                w[-1] += last * d
                gained += q[i] * d * d
            else:
                still[i] += 1
    return gained


class Descent:
    """State of one descent: dual variables, the shared vector, and who rests."""

    def __init__(self, problem: Problem, start: Vector | None, seed: np.random.Generator) -> None:
        rows, self.problem, self.random = problem.rows, problem, seed
        if start is not None:
            self.b = problem.dual(rows.margins(start))[0]
        else:
            self.b = 0.5 * problem.c * problem.y if problem.loss == LOGISTIC else np.zeros(rows.samples)
        squares, self.w = rows.measure(self.b)
        typical = max(float(squares.mean()) / max(rows.constant**2, 1e-300), 1e-12)
        self.rho = max(HOLD * typical, 2.0) * problem.l2
        self.kept = (self.rho - problem.l2) / self.rho if problem.penalised else 1.0
        self.q = squares / problem.l2 + rows.constant**2 / self.rho
        self.counts = self.q > 0  # an empty sample without an intercept keeps the best variable of margin 0
        self.still = np.where(self.counts, 0, RESTS).astype(np.uint8)
        self.b[~self.counts] = problem.dual(np.zeros(rows.samples))[0][~self.counts]
        self.centre = 0.0 if start is None else self.kept * float(start[-1])
        self.w[:-1] /= problem.l2
        self.w[-1] = self.w[-1] / self.rho + self.centre
        self.answer = self.w

    def epoch(self) -> float:
        """Visit every sample that does not rest once; the gain of the dual."""
        problem, rows, team = self.problem, self.problem.rows, self.problem.rows.team
        awake = np.flatnonzero(self.still < RESTS)
        order = self.random.permutation(-(-len(awake) // BUCKET))
        steep, ends = float(team.size), np.linspace(0, len(order), team.size + 1).astype(int).tolist()
        copies = [self.w] if team.size == 1 else [self.w.copy() for _ in range(team.size)]
        gained = team.each(
            lambda k: _epoch(
                rows.parts, rows.constant, problem.loss, problem.e, problem.y, problem.c, steep * self.q, self.b, self.still,
                copies[k], steep / problem.l2, steep * rows.constant / self.rho, awake, order, ends[k], ends[k + 1],
            )
        )  # fmt: skip
        if team.size > 1:
            self.w = self.w + (sum(copies) - team.size * self.w) / steep
        if rows.constant:
            follows = self.kept * float(self.w[-1])
            self.w[-1] += follows - self.centre
            self.centre = follows
        return sum(gained)

    def part(self, rows: Rows, chosen: NDArray[np.intp]) -> "Descent":
        """The same descent on some samples alone, whose rows are given; w is shared."""
        part, problem = copy(self), self.problem
        part.problem = replace(problem, rows=rows, y=problem.y[chosen], c=problem.c[chosen])
        part.b, part.q, part.counts = self.b[chosen], self.q[chosen], self.counts[chosen]
        part.still = np.where(part.counts, 0, RESTS).astype(np.uint8)
        return part

    def take(self, part: "Descent", chosen: NDArray[np.intp]) -> None:
        """Take over what a part has found."""
        self.b[chosen], self.w, self.centre = part.b, part.w, part.centre

    def certify(self) -> Certificate:
        """The certificate of the present w; whoever rests is woken, and the centre moves to the intercept."""
        problem, rows, w = self.problem, self.problem.rows, self.w.copy()
        if problem.loss in KINKED:
            m = rows.margins(w)
            z = problem.l2 * w
            z[-1] = rows.constant * float(self.b.sum())
            found = problem.certified(w, m, self.b, z)
        else:
            found = problem.certify(w)
        if problem.intercept and problem.loss not in KINKED:
            self.w[-1] += w[-1] - self.centre
            self.centre = float(w[-1])
        self.wake()
        self.answer = w
        return found

    def dwell(self) -> None:
        """Once most samples rest, gather the others in memory and visit them alone; then wake all, to rest again at the first
        visit without a move.
        """
        awake = np.flatnonzero(self.still < RESTS)
        if 2 * len(awake) > len(self.b):
            return
        rows = self.problem.rows
        part, first = self.part(Rows(rows.matrix[awake], rows.constant, rows.team), awake), 0.0
        for _ in range(ALONE):
            gained = part.epoch()
            first = max(first, gained)
            if gained <= SETTLED * first:
                break
        self.take(part, awake)
        self.wake()

    def wake(self) -> None:
        """Let every sample be visited again."""
        self.still[self.counts] = np.minimum(self.still[self.counts], RESTS - 1)


def descend(problem: Problem, stop: Stop, start: Vector | None, seed: np.random.Generator) -> Outcome:
    """Minimise by dual coordinate descent; wants l2 > 0 and no l1."""
    state = Descent(problem, start, seed)
    nothing = np.zeros(problem.rows.samples)
    ask, found = HALF * stop.tol * problem.softened(nothing, nothing, 0.0), None
    for count in range(1, stop.most + 1):
        gained = state.epoch()
        state.dwell()
        if gained <= ask or count == stop.most:
            found = state.certify()
            if found.holds(stop.tol) or gained == 0:
                return Outcome(state.answer, count, found)
            ask = next_look(gained, found, stop.tol)
    return Outcome(state.answer, stop.most, found or state.certify())


def next_look(gained: float, found: Certificate, tol: float) -> float:
    """The gain at which to look again: the gap falls about as the gain does, at most a hundredfold between two looks."""
    return gained * max(min(tol / max(found.relative, 1e-300), 0.5), 1e-2)
