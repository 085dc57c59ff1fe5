"""Who races on which problem: a contestant makes a call per setting, and a call returns its weights after one whole `fit`.

A contestant's data are converted to the form it likes best beforehand, and that is not timed. Nobody fits an intercept.
Objectives, up to a factor:

    logistic  sum log(1 + exp(-y m)) + |w|^2 / 2        ridge  sum (y - m)^2 / 2 + |w|^2 / 2
    svm       sum max(0, 1 - y m) + |w|^2 / 2           lasso  sum (y - m)^2 / 2n + alpha |w|_1
"""

import importlib.util
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.svm import LinearSVC

import partita.linear as partita

TOLS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7, 1e-8, 1e-9, 1e-10)
ROUNDS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 500, 1000)


@dataclass
class Contestant:
    """One solver on one problem; `fit(setting)` gives weights."""

    name: str
    settings: tuple
    fit: object
    warm: list = field(default_factory=list)


@dataclass
class Data:
    """The data of one shape, in every form a contestant may want."""

    X: object
    labels: object
    targets: object
    alpha: float

    def __post_init__(self):
        self.sparse = sparse.issparse(self.X)
        self.zero_one = (self.labels > 0).astype(np.float32)
        self.small = self.X.shape[1] < 256
        self.forms = {}

    def form(self, kind):
        """ "rows", "columns", in 4 or in 8 bytes."""
        if kind not in self.forms:
            X = self.X.astype(np.float64) if kind.endswith("64") else self.X
            if kind.startswith("columns"):
                X = X.tocsc() if self.sparse else np.asfortranarray(X)
            self.forms[kind] = X
        return self.forms[kind]


def has(name):
    return importlib.util.find_spec(name) is not None


def by(make, X, y, name, values, pick=lambda m: np.ravel(m.coef_), **fixed):
    """A contestant of scikit-learn's interface with one setting that varies."""
    return lambda value: pick(make(**fixed, **{name: value}).fit(X, y))


def ours(problem, data, jobs=1):
    made = {
        "logistic": lambda tol: partita.LogisticRegression(tol=tol, fit_intercept=False, max_iter=1000, n_jobs=jobs),
        "ridge": lambda tol: partita.Ridge(tol=tol, fit_intercept=False, n_jobs=jobs),
        "svm": lambda tol: partita.LinearSVC(loss="hinge", tol=tol, fit_intercept=False, max_iter=5000, n_jobs=jobs),
        "lasso": lambda tol: partita.Lasso(data.alpha, tol=tol, fit_intercept=False, n_jobs=jobs),
    }[problem]
    X = data.form("columns" if problem == "lasso" and not data.small else "rows")
    y = data.targets if problem in ("ridge", "lasso") else data.labels
    return Contestant(f"partita{f' x{jobs}' if jobs > 1 else ''}", TOLS, lambda tol: np.ravel(made(tol).fit(X, y).coef_))


def peers(problem, data):
    """The peers' contestants, and (name, reason) of those that cannot race."""
    found = list({"logistic": _logistic, "ridge": _ridge, "svm": _svm, "lasso": _lasso}[problem](data))
    absent = [(n, "not installed") for n in ("snapml", "liblinear", "skglm", "celer", "glum", "xgboost", "torch") if not has(n)]
    return found, [*absent, ("vowpalwabbit", "reads its own text format only, one pass at a time: parsing dominates")]


def _logistic(data):
    X, X64, y = data.form("rows"), data.form("rows64"), data.labels
    sk = lambda solver, X=X, **more: by(
        LogisticRegression, X, y, "tol", TOLS, solver=solver, fit_intercept=False, max_iter=1000, **more
    )
    yield Contestant("scikit-learn lbfgs", TOLS, sk("lbfgs", X64 if data.sparse else X))
    if data.small:
        yield Contestant("scikit-learn newton-cholesky", TOLS, sk("newton-cholesky"))
    else:
        yield Contestant("scikit-learn newton-cg", TOLS, sk("newton-cg", X64 if data.sparse else X))
        yield Contestant("scikit-learn liblinear", TOLS, sk("liblinear", X64, dual=True))
    if has("snapml"):
        import snapml

        for dual in (True, False):
            more = {"n_jobs": 1, "fit_intercept": False, "dual": dual, "regularizer": 1.0, "max_iter": 1000}
            yield Contestant(
                f"snapml {'dual' if dual else 'primal'}",
                TOLS,
                by(snapml.LogisticRegression, X, data.zero_one, "tol", TOLS, **more),
            )
    if has("torch"):
        yield Contestant("torch lbfgs", ROUNDS, _torch(data, "logistic"))
    if has("liblinear"):
        yield Contestant("liblinear -s 0", TOLS, _liblinear(data, 0))
    if has("xgboost"):
        yield Contestant("xgboost gblinear", ROUNDS[:14], _xgboost(data))
    if has("glum") and data.small:
        import glum

        fixed = {"family": "binomial", "alpha": 1 / len(y), "l1_ratio": 0, "fit_intercept": False}
        yield Contestant("glum", TOLS, by(glum.GeneralizedLinearRegressor, X, data.zero_one, "gradient_tol", TOLS, **fixed))


def _ridge(data):
    X, y = data.form("rows"), data.targets
    sk = lambda solver: by(Ridge, X, y, "tol", TOLS, alpha=1.0, solver=solver, fit_intercept=False, max_iter=1000)
    for solver in ("cholesky",) if data.small else ("sparse_cg", "lsqr"):
        yield Contestant(f"scikit-learn {solver}", TOLS, sk(solver))
    if has("snapml"):
        import snapml

        for dual in (True, False):
            more = {"n_jobs": 1, "fit_intercept": False, "dual": dual, "regularizer": 1.0, "max_iter": 1000}
            yield Contestant(
                f"snapml {'dual' if dual else 'primal'}", TOLS, by(snapml.LinearRegression, X, y, "tol", TOLS, **more)
            )
    if has("torch"):
        yield Contestant("torch lbfgs", ROUNDS, _torch(data, "ridge"))


def _svm(data):
    X, X64, y = data.form("rows"), data.form("rows64"), data.labels
    more = {"loss": "hinge", "fit_intercept": False, "max_iter": 20_000}
    yield Contestant("scikit-learn LinearSVC", TOLS, by(LinearSVC, X64, y, "tol", TOLS, **more))
    if has("snapml"):
        import snapml

        more = {"n_jobs": 1, "fit_intercept": False, "regularizer": 1.0, "max_iter": 5000}
        yield Contestant("snapml", TOLS, by(snapml.SupportVectorMachine, X, data.zero_one, "tol", TOLS, **more))
    if has("liblinear"):
        yield Contestant("liblinear -s 3", TOLS, _liblinear(data, 3))


def _lasso(data):
    X, X64, y = data.form("columns"), data.form("columns64"), data.targets
    more = {"fit_intercept": False, "alpha": data.alpha}
    sk = {"max_iter": 10_000, "precompute": data.small}
    yield Contestant("scikit-learn Lasso", TOLS, by(Lasso, X, y.astype(X.dtype), "tol", TOLS, **more, **sk))
    for name in ("skglm", "celer"):
        if has(name):
            make = __import__(name).Lasso
            yield Contestant(
                name,
                TOLS,
                by(make, X64 if name == "celer" else X, y if name == "celer" else y.astype(X.dtype), "tol", TOLS, **more),
            )
    if has("snapml"):
        import snapml

        more = {
            "n_jobs": 1,
            "fit_intercept": False,
            "dual": False,
            "penalty": "l1",
            "regularizer": data.alpha * len(y),
            "max_iter": 1000,
        }
        yield Contestant("snapml l1", TOLS, by(snapml.LinearRegression, data.form("rows"), y, "tol", TOLS, **more))


def _torch(data, problem):
    import torch

    X = data.form("rows")
    if data.sparse:
        t = torch.sparse_csr_tensor(torch.from_numpy(X.indptr), torch.from_numpy(X.indices), torch.from_numpy(X.data), X.shape)
    else:
        t = torch.from_numpy(X)
    y = torch.from_numpy((data.labels if problem == "logistic" else data.targets).astype(np.float32))

    def fit(rounds):
        w = torch.zeros(X.shape[1], requires_grad=True)
        best = torch.optim.LBFGS(
            [w], max_iter=rounds, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
        )

        def closure():
            best.zero_grad()
            m = t @ w
            loss = torch.nn.functional.softplus(-y * m).sum() if problem == "logistic" else 0.5 * ((y - m) ** 2).sum()
            loss = (loss + 0.5 * (w @ w)) / len(y)
            loss.backward()
            return loss

        best.step(closure)
        return w.detach().numpy().astype(np.float64)

    return fit


def _liblinear(data, kind):
    from liblinear.liblinearutil import parameter, problem, train

    X = data.form("rows64")
    given = problem(data.labels, X if data.sparse else sparse.csr_matrix(X))

    def fit(tol):
        model = train(given, parameter(f"-s {kind} -c 1 -e {tol} -q"))
        return np.array(model.w[: X.shape[1]]) * model.get_labels()[0]

    return fit


def _xgboost(data):
    import xgboost

    given = xgboost.DMatrix(data.form("rows"), data.zero_one)
    options = {
        "booster": "gblinear",
        "objective": "binary:logistic",
        "lambda": 1 / len(data.labels),
        "nthread": 1,
        "eta": 1.0,
        "base_score": 0.5,
    }

    def fit(rounds):
        model = xgboost.train({**options, "feature_selector": "cyclic", "updater": "coord_descent"}, given, rounds)
        weights = model.get_dump(dump_format="json")[0]
        return np.array(__import__("json").loads(weights)["weight"])

    return fit
