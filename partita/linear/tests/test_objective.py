"""The objective reached is never above scikit-learn's, for every estimator, penalty, weighting and layout."""

import numpy as np
import pytest
import sklearn.linear_model as theirs
import sklearn.svm as machines
from scipy import sparse
from scipy.special import logsumexp, xlogy

from partita.linear import ElasticNet, Lasso, LinearSVC, LinearSVR, LogisticRegression, PoissonRegressor, Ridge

RANDOM = np.random.default_rng(0)
SMALL = RANDOM.normal(size=(120, 12)) + 0.5
WIDE = RANDOM.normal(size=(60, 150)) * (RANDOM.random((60, 150)) < 0.3)
SHAPES = {"small": SMALL, "wide": WIDE}
LAYOUTS = {"dense": np.ascontiguousarray, "csr": sparse.csr_array}


def targets(X, kind):
    m = X[:, :8] @ np.array([1.0, -2, 0.5, 0, 1, 0, -1, 0.3]) + np.random.default_rng(1).normal(size=len(X))
    if kind == "binary":
        return (m > m.mean()).astype(int)
    if kind == "classes":
        return np.digitize(m, np.quantile(m, [0.3, 0.7]))
    return np.random.default_rng(2).poisson(np.exp(0.3 * np.clip(m, -3, 3))) if kind == "counts" else 3 + m


def weights_of(X, weighted):
    return np.random.default_rng(3).integers(0, 4, len(X)).astype(float) if weighted else np.ones(len(X))


def logistic(model, X, y, s):
    coef, m = model.coef_, X @ model.coef_.T + model.intercept_
    m = np.hstack([np.zeros((len(y), 1)), m]) if m.shape[1] == 1 else m
    fit = s @ (logsumexp(m, axis=1) - m[np.arange(len(y)), y])
    r = model.l1_ratio or 0.0
    return model.C * fit + (1 - r) / 2 * (coef**2).sum() + r * np.abs(coef).sum()


def elastic(ratio):
    def value(model, X, y, s):
        r, w = y - X @ model.coef_ - model.intercept_, model.coef_
        return s @ r**2 / (2 * s.sum()) + model.alpha * (ratio * np.abs(w).sum() + (1 - ratio) / 2 * (w**2).sum())

    return value


def ridge(model, X, y, s):
    return s @ (y - X @ model.coef_ - model.intercept_) ** 2 + model.alpha * (model.coef_**2).sum()


def poisson(model, X, y, s):
    m = X @ model.coef_ + model.intercept_
    return s @ (np.exp(m) - y * m + xlogy(y, y) - y) / s.sum() + model.alpha / 2 * (model.coef_**2).sum()


def svc(model, X, y, s):
    total = 0.0
    for w, b, sign in zip(
        model.coef_, model.intercept_, model.classes_[1:] if len(model.classes_) == 2 else model.classes_, strict=True
    ):
        out = np.maximum(0, 1 - np.where(y == sign, 1, -1) * (X @ w + b))
        size = np.abs(w).sum() + abs(b) if model.penalty == "l1" else (w @ w + b * b) / 2
        total += size + model.C * s @ (out**2 if model.loss == "squared_hinge" else out)
    return total


def svr(model, X, y, s):
    out = np.maximum(0, np.abs(y - X @ model.coef_ - model.intercept_) - model.epsilon)
    squared = model.loss == "squared_epsilon_insensitive"
    return (model.coef_ @ model.coef_ + np.sum(model.intercept_) ** 2) / 2 + model.C * s @ (out**2 if squared else out)


LR, SK = LogisticRegression, theirs.LogisticRegression
TIGHT = {"tol": 1e-10, "max_iter": 20_000}
SAGA = {"solver": "saga", **TIGHT}
CASES = {
    "logistic": (logistic, "binary", LR(C=0.7, tol=1e-11), SK(C=0.7, **TIGHT)),
    "logistic, no intercept": (logistic, "binary", LR(C=3, tol=1e-11, fit_intercept=False), SK(C=3, fit_intercept=False, **TIGHT)),  # noqa: E501
    "logistic, l1": (logistic, "binary", LR(l1_ratio=1, tol=1e-11), SK(l1_ratio=1, **SAGA)),
    "logistic, elastic": (logistic, "binary", LR(l1_ratio=0.4, tol=1e-11), SK(l1_ratio=0.4, **SAGA)),
    "softmax": (logistic, "classes", LR(C=0.7, tol=1e-11), SK(C=0.7, **TIGHT)),
    "softmax, l1": (logistic, "classes", LR(l1_ratio=1, C=0.5, tol=1e-10, max_iter=2000), SK(l1_ratio=1, C=0.5, **SAGA)),
    "ridge": (ridge, "numbers", Ridge(2.0, tol=1e-12), theirs.Ridge(2.0, tol=1e-12)),
    "ridge, signs": (ridge, "numbers", Ridge(2.0, positive=True, tol=1e-12), theirs.Ridge(2.0, positive=True, tol=1e-12)),
    "lasso": (elastic(1.0), "numbers", Lasso(0.05, tol=1e-11), theirs.Lasso(0.05, **TIGHT)),
    "lasso, positive": (elastic(1.0), "numbers", Lasso(0.05, positive=True, tol=1e-11), theirs.Lasso(0.05, positive=True, **TIGHT)),  # noqa: E501
    "elastic": (elastic(0.5), "numbers", ElasticNet(0.1, tol=1e-11), theirs.ElasticNet(0.1, **TIGHT)),
    "svc": (svc, "binary", LinearSVC(C=0.5, tol=1e-11), machines.LinearSVC(C=0.5, dual=False, **TIGHT)),
    "svc, hinge": (svc, "binary", LinearSVC(loss="hinge", tol=1e-9), machines.LinearSVC(loss="hinge", **TIGHT)),
    "svc, l1": (svc, "binary", LinearSVC(penalty="l1", tol=1e-11), machines.LinearSVC(penalty="l1", dual=False, **TIGHT)),
    "svc, rest": (svc, "classes", LinearSVC(tol=1e-11), machines.LinearSVC(dual=False, **TIGHT)),
    "svr": (svr, "numbers", LinearSVR(epsilon=0.1, tol=1e-9), machines.LinearSVR(epsilon=0.1, tol=1e-10, max_iter=200_000)),
    "svr, squared": (
        svr,
        "numbers",
        LinearSVR(epsilon=0.1, loss="squared_epsilon_insensitive", tol=1e-11),
        machines.LinearSVR(epsilon=0.1, loss="squared_epsilon_insensitive", dual=False, **TIGHT),
    ),
    "poisson": (poisson, "counts", PoissonRegressor(alpha=0.3, tol=1e-11), theirs.PoissonRegressor(alpha=0.3, **TIGHT)),
}  # fmt: skip


@pytest.mark.law
@pytest.mark.filterwarnings("ignore:.*:sklearn.exceptions.ConvergenceWarning")  # of theirs; ours are told below
@pytest.mark.parametrize(("layout", "weighted"), [("dense", False), ("csr", True)], ids=["dense", "csr, weighted"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_objective_is_not_above_theirs(case, shape, layout, weighted):
    value, kind, ours, peer = CASES[case]
    X = SHAPES[shape]
    y, s = targets(X, kind), weights_of(X, weighted)
    given = LAYOUTS[layout](X)
    mine = value(ours.fit(given, y, sample_weight=s), X, y, s)
    best = value(peer.fit(X, y, sample_weight=s), X, y, s)
    assert mine <= best + 1e-9 * abs(best), ours.solver_
