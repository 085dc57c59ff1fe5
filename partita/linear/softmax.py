"""Multinomial logistic regression: sum_i c_i (log sum_k exp(m_ik) - m_iy) + l1 |W|_1 + l2/2 |W|^2, intercepts without penalty.

Without L1, Newton's direction for all classes at once, factorised or by conjugate gradients. With L1, one class after another
by working sets on the second-order model of that class. The dual point is U = c (onehot - softmax(m)); the gap is as in
`problem`, with -sum_i c_i H(onehot_i - U_i / c_i) for the conjugates, H the entropy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.special import log_softmax, logsumexp, xlogy

from partita.linear.coordinate import Model, violators
from partita.linear.fitting import Setting, fitted, start_of
from partita.linear.losses import LOGISTIC
from partita.linear.problem import Certificate, Problem
from partita.linear.refusing import bad
from partita.linear.rows import Columns, Rows, Vector
from partita.linear.stopping import Outcome, Stop

Matrix = NDArray[np.float64]
WEIGHTS = 600  # classes x features up to which the whole Hessian is factorised


@dataclass
class Softmax:
    """The objective over W, (classes, features + 1), and what its solvers need of it."""

    rows: Any  # Rows or Columns
    labels: NDArray[np.intp]
    c: Vector
    classes: int
    l2: float
    l1: float

    def __post_init__(self) -> None:
        self.ones = np.zeros((len(self.labels), self.classes))
        self.ones[np.arange(len(self.labels)), self.labels] = 1.0
        self.ridge = np.full(self.rows.size, self.l2)
        self.ridge[-1] = 0.0
        self.null = float(self.c.sum()) * np.log(self.classes)

    def margins(self, W: Matrix) -> Matrix:
        return np.stack([self.rows.margins(w) for w in W], axis=1)

    def pull(self, U: Matrix) -> Matrix:
        return np.stack([self.rows.pull(np.ascontiguousarray(u)) for u in U.T])

    def loss(self, M: Matrix) -> float:
        return float(self.c @ (np.asarray(logsumexp(M, axis=1)) - M[np.arange(len(M)), self.labels]))

    def penalty(self, W: Matrix) -> float:
        return 0.5 * float((self.ridge * W * W).sum()) + self.l1 * float(np.abs(W[:, :-1]).sum())

    def shares(self, M: Matrix) -> Matrix:
        """Probabilities."""
        return np.asarray(np.exp(log_softmax(M, axis=1)))

    def settle(self, W: Matrix, M: Matrix) -> None:
        """Set the intercepts to their best values, of sum zero, in W and in M."""
        s = self.rows.constant
        if s == 0:
            return
        for _ in range(30):
            P = self.shares(M)
            g = self.c @ (self.ones - P)
            if np.abs(g).max() <= 1e-14 * self.c.sum():
                return
            H = np.diag(self.c @ P) - P.T @ (self.c[:, None] * P)
            move = np.clip(np.linalg.lstsq(H, g, rcond=None)[0], -4.0, 4.0)
            W[:, -1] += move / s
            M += move

    def certify(self, W: Matrix, M: Matrix) -> Certificate:
        """Value, gap, margins, dual point U and X^T U; the intercepts move to their best."""
        self.settle(W, M)
        U = self.c[:, None] * (self.ones - self.shares(M))
        Z = self.pull(U)
        value = self.loss(M) + self.penalty(W)
        if not self.l1 and self.l2:
            away = (self.ridge * W - Z)[:, :-1]
            return Certificate(value, float((away * away).sum()) / (2 * self.l2), M, U, Z, least=1e-9 * self.null)
        sizes = np.abs(Z[:, :-1])
        most, best = float(sizes.max(initial=0.0)), -np.inf
        for by in {min(1.0, self.l1 / most) if most > 0 else 1.0} | ({1.0} if self.l2 else set()):
            over = np.maximum(0.0, by * sizes - self.l1)
            paid = float((over * over).sum()) / (2 * self.l2) if self.l2 else 0.0
            T = np.maximum(self.ones - by * U / self.c[:, None], 0.0)
            best = max(best, -float(self.c @ xlogy(T, T).sum(1)) - paid)
        gap = max(0.0, value - best) if self.l1 or self.l2 else float(np.abs(self.ridge * W - Z).max())
        return Certificate(value, gap, M, U, Z, least=1e-9 * self.null)


def softmax_newton(problem: Softmax, stop: Stop, W: Matrix) -> tuple[Matrix, int, Certificate]:
    """Newton's method over all classes."""
    M = problem.margins(W)
    factored = W.size <= WEIGHTS
    found = problem.certify(W, M)
    for count in range(stop.most):
        if found.holds(stop.tol):
            return W, count, found
        g, P = problem.ridge * W - found.pulled, problem.shares(M)
        forcing = min(0.1, stop.tol / max(found.relative, 1e-300))
        p, T = _factorised(problem, P, g) if factored else _conjugate(problem, P, g, forcing)
        by = _search(problem, W, M, p, T, float((g * p).sum()))
        if by == 0.0:
            return W, count + 1, found
        W, M = W + by * p, M + by * T
        found = problem.certify(W, M)
    return W, stop.most, found


def _search(problem: Softmax, W: Matrix, M: Matrix, p: Matrix, T: Matrix, slope: float) -> float:
    """How far to go along p; 0 where nothing is better."""
    here = problem.loss(M) + problem.penalty(W)
    by = 1.0
    for _ in range(40):
        if problem.loss(M + by * T) + problem.penalty(W + by * p) <= here + 1e-4 * by * slope + 1e-14 * abs(here):
            return by
        by *= 0.5
    return 0.0


def _factorised(problem: Softmax, P: Matrix, g: Matrix) -> tuple[Matrix, Matrix]:
    """-H^-1 g; shifting all classes alike changes nothing, so that direction is given a curvature of its own."""
    K, d = g.shape
    H = np.zeros((K, d, K, d))
    for k in range(K):
        for l in range(k + 1):
            h = problem.c * P[:, k] * ((k == l) - P[:, l])
            H[k, :, l, :] = problem.rows.gram(h)
            H[l, :, k, :] = H[k, :, l, :]
        H[k, np.arange(d), k, np.arange(d)] += problem.ridge
    even = np.trace(H[:, -1, :, -1]) / K if problem.rows.constant else 1.0
    H[:, -1, :, -1] += even / K if problem.rows.constant else np.eye(K)
    flat = H.reshape(K * d, K * d)
    try:
        p = -cho_solve(cho_factor(flat, check_finite=False), g.ravel(), check_finite=False)
    except LinAlgError:
        p = -np.linalg.lstsq(flat, g.ravel(), rcond=None)[0]
    p = np.asarray(p, np.float64).reshape(K, d)
    return p, problem.margins(p)


def _conjugate(problem: Softmax, P: Matrix, g: Matrix, forcing: float) -> tuple[Matrix, Matrix]:
    """-H^-1 g by conjugate gradients to a residual of sqrt(forcing) |g|."""
    p, T, r = np.zeros_like(g), np.zeros_like(P), -g
    s, old = r.copy(), float((r * r).sum())
    enough = min(forcing, 0.25) * old
    for _ in range(10 * g.size):
        if old <= enough or old == 0.0:
            break
        along = problem.margins(s)
        spread = P * along
        turned = problem.pull(problem.c[:, None] * (spread - P * spread.sum(1, keepdims=True))) + problem.ridge * s
        by = old / float((s * turned).sum())
        p += by * s
        T += by * along
        r -= by * turned
        new = float((r * r).sum())
        s = r + (new / old) * s
        old = new
    return p, T


def softmax_coordinates(problem: Softmax, stop: Stop, W: Matrix) -> tuple[Matrix, int, Certificate]:
    """One class after another, each by coordinates of its second-order model."""
    M = problem.margins(W)
    shim = Problem(problem.rows, np.zeros(len(M)), problem.c, LOGISTIC, problem.l2, problem.l1)
    found = problem.certify(W, M)
    for count in range(stop.most):
        if found.holds(stop.tol):
            return W, count, found
        for k in range(problem.classes):
            W, M = _one_class(problem, shim, found, W, M, k)
        found = problem.certify(W, M)
    return W, stop.most, found


def _one_class(problem: Softmax, shim: Problem, found: Certificate, W: Matrix, M: Matrix, k: int) -> tuple[Matrix, Matrix]:
    share = problem.shares(M)[:, k]
    h, b = problem.c * share * (1 - share), problem.c * (problem.ones[:, k] - share)
    z = problem.rows.pull(b)
    now = Certificate(found.value, found.gap, M, b, z)
    model = Model(shim, np.maximum(h, 1e-12 * h.max()), W[k].copy(), b.copy())
    model.descend(violators(shim, W[k], now), 1e-3 * found.gap / problem.classes, problem.rows.features)
    p, T = np.zeros_like(W), np.zeros_like(M)
    p[k] = model.w - W[k]
    p[k, -1] = -model.shift / problem.rows.constant if problem.rows.constant else 0.0
    T[:, k] = problem.rows.margins(p[k])
    size = problem.l1 * float(np.abs(W[k, :-1] + p[k, :-1]).sum() - np.abs(W[k, :-1]).sum())
    by = _search(problem, W, M, p, T, float((problem.ridge * W[k] - z) @ p[k]) + size)
    return W + by * p, M + by * T


def fit_softmax(estimator: Any, X: Any, labels: NDArray[np.intp], c: Vector, setting: Setting) -> tuple[list[Outcome], str]:
    """Fit all classes; an outcome per class, with the certificate of the whole, and what was chosen."""
    classes = int(labels.max()) + 1
    if estimator.solver != "auto" or estimator.memory_limit is not None:
        raise bad(
            f"solver = {estimator.solver!r}, memory_limit = {estimator.memory_limit} with {classes} classes",
            law="a softmax has one form per penalty, and its samples no dual variables of their own",
            cure='solver="auto", memory_limit=None; or sklearn.multiclass.OneVsRestClassifier',
            at="solver",
        )

    def solve(X: Any, labels: Vector, c: Vector, team: Any, stop: Stop) -> tuple[list[Outcome], str]:
        start = [start_of(estimator, setting.constant, k) for k in range(classes)]
        W = np.array(start) if all(s is not None for s in start) else np.zeros((classes, X.shape[1] + 1))
        rows = (Columns if setting.l1 else Rows)(X, setting.constant, team)
        problem = Softmax(rows, labels.astype(np.intp), c, classes, setting.l2, setting.l1)
        solver = softmax_coordinates if setting.l1 else softmax_newton
        W, rounds, found = solver(problem, stop, W)
        size = f"{classes} classes x {X.shape[1]} features"
        said = (
            f"working_set: {size}, L1: one class after another"
            if setting.l1
            else f"newton: {size}: the whole Hessian is small"
            if W.size <= WEIGHTS
            else f"cg: {size}: Newton's direction for all classes at once by conjugate gradients"
        )
        return [Outcome(w, rounds, found) for w in W], said

    return fitted(estimator, X, labels, c, solve, by_columns=bool(setting.l1))
