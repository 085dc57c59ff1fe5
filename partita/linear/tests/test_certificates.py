"""A certificate is what it says: recomputed in plain NumPy, the gap is primal minus dual, and the dual point is feasible."""

import numpy as np
import pytest
from scipy import sparse
from scipy.special import xlogy

from partita.linear import losses
from partita.linear.arithmetic import exp, log1p
from partita.linear.coordinate import coordinates
from partita.linear.dual import descend
from partita.linear.newton import conjugate, factorised, newton
from partita.linear.problem import Problem
from partita.linear.rows import Columns, Rows, Team
from partita.linear.stopping import Stop

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 30)) * (RANDOM.random((90, 30)) < 0.4)
LABELS = np.where(X @ RANDOM.normal(size=30) + RANDOM.normal(size=90) > 0, 1.0, -1.0)
C = RANDOM.uniform(0.5, 2, 90)


def f(loss, y, m):
    out = np.abs(y - m)
    return {
        losses.SQUARED: lambda: out**2 / 2,
        losses.LOGISTIC: lambda: np.logaddexp(0, -y * m),
        losses.POISSON: lambda: np.exp(m) - y * m,
        losses.HINGE: lambda: np.maximum(0, 1 - y * m),
        losses.SQUARED_HINGE: lambda: np.maximum(0, 1 - y * m) ** 2,
        losses.EPSILON: lambda: np.maximum(0, out - 0.1),
        losses.SQUARED_EPSILON: lambda: np.maximum(0, out - 0.1) ** 2,
    }[loss]()


def conjugates(loss, y, b, c):
    """c f*(-b / c), and whether b is feasible."""
    a, t = b * y / c, y - b / c
    box, e = (a >= -1e-12) & (a <= 1 + 1e-12), 0.1 * np.abs(b)
    return {
        losses.SQUARED: lambda: (b * b / (2 * c) - b * y, True),
        losses.LOGISTIC: lambda: (c * (xlogy(a, a) + xlogy(1 - a, 1 - a)), box),
        losses.POISSON: lambda: (c * (xlogy(t, t) - t), t >= 0),
        losses.HINGE: lambda: (-b * y, box),
        losses.SQUARED_HINGE: lambda: (b * b / (4 * c) - b * y, a >= 0),
        losses.EPSILON: lambda: (e - b * y, np.abs(b) <= c * (1 + 1e-12)),
        losses.SQUARED_EPSILON: lambda: (b * b / (4 * c) + e - b * y, True),
    }[loss]()


CASES = [
    (loss, solver, constant)
    for loss in range(7)
    for solver in ("dual", "newton", "cg")
    for constant in (0.0, 1.0)
    if not (loss == losses.POISSON and solver == "dual") and not (loss in (losses.HINGE, losses.EPSILON) and solver == "cg")
]


@pytest.mark.law
@pytest.mark.parametrize(("loss", "solver", "constant"), CASES)
def test_the_gap_is_primal_minus_dual(loss, solver, constant):
    y = np.abs(np.round(2 * LABELS + X[:, 0])) if loss == losses.POISSON else LABELS
    with Team(1) as team:
        rows = Rows(sparse.csr_array(X) if solver == "dual" else X, constant, team)
        problem = Problem(rows, y, C, loss, l2=1.5, e=0.1, penalised=loss >= losses.HINGE)
        stop = Stop(1e-6, 2000)
        if solver == "dual":
            found = descend(problem, stop, None, np.random.default_rng(0))
        else:
            found = newton(problem, stop, None, factorised if solver == "newton" else conjugate)
    w, seen = found.w, found.certificate
    full = np.hstack([X, np.full((90, 1), constant)])
    ridge = np.full(31, 1.5)
    ridge[-1] = 1.5 if loss >= losses.HINGE else 0.0
    primal = C @ f(loss, y, full @ w) + 0.5 * ridge @ (w * w)
    terms, feasible = conjugates(loss, y, seen.dual, C)
    z = full.T @ seen.dual
    if loss < losses.HINGE and constant:
        assert abs(z[-1]) <= 1e-9 * np.abs(seen.dual).sum()
        z[-1] = 0.0
    assert np.all(feasible)
    assert seen.value == pytest.approx(primal, rel=1e-12)
    assert seen.gap == pytest.approx(primal + terms.sum() + z @ z / 3.0, abs=1e-11 * abs(primal))
    assert seen.gap <= 1e-6 * abs(primal)


@pytest.mark.law
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("loss", [losses.SQUARED, losses.LOGISTIC])
def test_the_gap_of_an_l1_penalty(loss, l2):
    with Team(1) as team:
        problem = Problem(Columns(X, 1.0, team), LABELS, C, loss, l2=l2, l1=3.0)
        found = coordinates(problem, Stop(1e-9, 200), None)
    w, b = found.w, found.certificate.dual
    m = X @ w[:-1] + w[-1]
    primal = C @ f(loss, LABELS, m) + 3 * np.abs(w[:-1]).sum() + l2 / 2 * w[:-1] @ w[:-1]
    best = -np.inf
    for by in (1.0, min(1.0, 3.0 / np.abs(X.T @ b).max())):
        over = np.maximum(0, by * np.abs(X.T @ b) - 3.0)
        paid = over @ over / (2 * l2) if l2 else (0.0 if over.max() <= 1e-11 else np.inf)
        best = max(best, -conjugates(loss, LABELS, by * b, C)[0].sum() - paid)
    assert found.certificate.value == pytest.approx(primal, rel=1e-12)
    assert found.certificate.gap == pytest.approx(primal - best, abs=1e-11 * primal)
    assert found.certificate.gap <= 1e-9 * primal
    zero = w[:-1] == 0
    assert zero.any()
    assert np.all(np.abs(X.T @ b)[zero] <= 3.0 * (1 + 1e-4))


def test_exp_and_log1p_are_those_of_the_library():
    x = np.linspace(-700, 700, 20_001)
    assert np.allclose([exp(v) for v in x], np.exp(x), rtol=4e-15, atol=0)
    e = np.concatenate([np.linspace(0, 1, 5001), 10.0 ** np.arange(-300, 0)])
    assert np.allclose([log1p(v) for v in e], np.log1p(e), rtol=4e-15, atol=0)
