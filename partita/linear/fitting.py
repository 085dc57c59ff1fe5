"""From checked arrays to weights: builds the problem, chooses the solver, runs it, warns where it did not get there."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from numpy.typing import NDArray
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data
from threadpoolctl import ThreadpoolController

from partita.linear.choosing import SOLVERS, Shape, choose, possible
from partita.linear.coordinate import coordinates
from partita.linear.dual import descend
from partita.linear.fast_memory import paged
from partita.linear.newton import conjugate, factorised, newton, sparse_step
from partita.linear.problem import Problem
from partita.linear.refusing import bad, not_finite
from partita.linear.rows import Columns, Rows, Team, Vector
from partita.linear.stopping import Outcome, Stop

Solve = Callable[[Any, Any, Vector, Team, Stop], tuple[Any, str]]
SMALL = 1 << 22  # entries that are checked for NaN before the fit; in larger data the first pass of the solver finds them
NARROW = 1 << 26  # bytes of int64 indices that are narrowed to int32; more are read as they are


@dataclass(frozen=True)
class Setting:
    """The loss, the penalty and the switches of one fit."""

    loss: int
    l2: float = 0.0
    l1: float = 0.0
    e: float = 0.0
    constant: float = 1.0  # of the constant column; 0 is no intercept
    penalised: bool = False
    positive: bool = False


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def checked(estimator: Any, X: Any, y: Any, **more: Any) -> tuple[Any, NDArray[Any]]:
    """X as a float matrix (dense, or canonical CSR or CSC) and y, as scikit-learn checks them."""
    X, y = validate_data(
        estimator, X, y, accept_sparse=("csr", "csc"), dtype=[np.float64, np.float32], ensure_all_finite=False, **more
    )  # fmt: skip
    if sparse.issparse(X):
        X = _canonical(X)
    if (X.nnz if sparse.issparse(X) else X.size) <= SMALL:
        _refuse_infinite(estimator, X)
    if np.issubdtype(np.asarray(y).dtype, np.floating) and not np.isfinite(y).all():
        raise bad("Input y contains NaN or infinity", have=f"{int((~np.isfinite(y)).sum())} of {y.size}", at="y")
    return X, y


def _refuse_infinite(estimator: Any, X: Any) -> None:
    refusal = not_finite(X, getattr(estimator, "feature_names_in_", None))
    if refusal:
        raise refusal


def _canonical(X: Any) -> Any:
    """Indices sorted and once each, in 4 bytes where that costs little; the caller's matrix is not touched."""
    if not X.has_canonical_format:
        X = X.copy()
        X.sum_duplicates()
    kind = X.indices.dtype
    if kind == np.int64 and X.nnz < 2**31 and X.indices.nbytes <= NARROW:
        kind = np.dtype(np.int32)
    if X.indices.dtype != kind or X.indptr.dtype != kind:
        fresh = type(X)(X.shape, dtype=X.dtype)
        fresh.data, fresh.indices, fresh.indptr = X.data, X.indices.astype(kind, copy=False), X.indptr.astype(kind, copy=False)
        return fresh
    return X


def weights(sample_weight: Any, X: Any) -> Vector:
    """One weight per sample, in float64."""
    found = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if found.min() < 0:
        raise bad(
            "sample_weight has negative entries",
            have=f"the least is {found.min():g}",
            law="a negative weight makes the objective unbounded",
            at="sample_weight",
        )
    if not found.max() > 0:
        raise bad("sample_weight is zero for every sample", at="sample_weight")
    return found


def fit(estimator: Any, X: Any, y: Vector, c: Vector, setting: Setting, start: Vector | None = None) -> tuple[Outcome, str]:
    """Fit one vector of weights.

    Returns:
        The outcome, and what was chosen and why.
    """
    limit = getattr(estimator, "memory_limit", None)
    name, why = _chosen(estimator, _shape(X, c, setting), limited=limit is not None)

    def solve(X: Any, y: Vector, c: Vector, team: Team, stop: Stop) -> tuple[Outcome, str]:
        rows = (Columns if name == "working_set" else Rows)(X, setting.constant, team)
        problem = Problem(rows, y, c, setting.loss, setting.l2, setting.l1, setting.e, setting.penalised, setting.positive)
        if limit is not None:
            return paged(problem, stop, int(limit), _random(estimator)), f"{name}: {why}"
        if name == "dual":
            return descend(problem, stop, start, _random(estimator)), f"{name}: {why}"
        if name == "working_set":
            return coordinates(problem, stop, start), f"{name}: {why}"
        return newton(
            problem, stop, start, {"newton": factorised, "cg": conjugate, "gram": sparse_step}[name]
        ), f"{name}: {why}"

    return fitted(estimator, X, y, c, solve, by_columns=name == "working_set")


def fitted(estimator: Any, X: Any, y: Any, c: Vector, solve: Solve, *, by_columns: bool) -> tuple[Any, str]:
    """Call `solve` with the samples that count, laid out as it reads them, and a team of threads."""
    if c.min() == 0:
        X, y, c = X[c > 0], y[c > 0], c[c > 0]
    y, c = np.ascontiguousarray(y, dtype=np.float64), np.ascontiguousarray(c, dtype=np.float64)
    if sparse.issparse(X):
        X = X.tocsc() if by_columns else X.tocsr()
    else:
        X = np.asfortranarray(X) if by_columns else np.ascontiguousarray(X)
    jobs = min(effective_n_jobs(estimator.n_jobs), max(1, X.shape[0] // 64))
    stop = Stop(float(estimator.tol), int(estimator.max_iter or 1000))
    with Team(jobs) as team, _libraries().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        try:
            return solve(X, y, c, team, stop)
        except FloatingPointError:
            _refuse_infinite(estimator, X)
            raise bad(
                "the fit left the range of floating point",
                have=f"largest entry of X {abs(X).max():g}",
                cure="scale the features, e.g. sklearn.preprocessing.StandardScaler",
                at="X",
            ) from None


def _random(estimator: Any) -> np.random.Generator:
    """The order of visits; without a seed it is the same each time."""
    seed = 0 if estimator.random_state is None else estimator.random_state
    return np.random.default_rng(check_random_state(seed).randint(2**31))


def _chosen(estimator: Any, shape: Shape, *, limited: bool) -> tuple[str, str]:
    """The solver's name and the reason, or a refusal."""
    name, excluded = estimator.solver, possible(shape)
    if limited:
        if name not in ("auto", "dual") or excluded["dual"]:
            raise bad(
                "memory_limit does not fit this problem",
                law=excluded["dual"]
                or "the working set in fast memory is one of samples, which only dual coordinates visit one by one",
                cure='memory_limit=None, or solver="dual" on a problem it fits',
                at="memory_limit",
            )
        return "dual", f"{shape.size}: memory_limit, with the samples of the largest gaps in fast memory"
    if name not in SOLVERS:
        raise bad(f"solver = {name!r} is not known", cure=", ".join(SOLVERS), at="solver")
    if name == "auto":
        return choose(shape)
    if excluded[name]:
        usable = ", ".join(["auto", *(k for k, v in excluded.items() if not v)])
        raise bad(f"solver = {name!r} does not fit this problem", law=excluded[name], cure=usable, at="solver")
    return name, "as asked"


def _shape(X: Any, c: Vector, setting: Setting) -> Shape:
    """The shape; how steep it is, from a thousand samples."""
    few = X[:: max(1, X.shape[0] // 1000)]
    square = few.multiply(few).sum() if sparse.issparse(few) else float(np.square(few, dtype=np.float64).sum())
    steep = float(square) / few.shape[0] * float(c.mean()) / setting.l2 if setting.l2 else np.inf
    return Shape(
        X.shape[0], X.shape[1], bool(sparse.issparse(X)), setting.loss, setting.l1 > 0, setting.positive, setting.l2, steep
    )


def warn(estimator: Any, outcomes: list[Outcome]) -> None:
    """Say so if a fit ended before its tolerance."""
    worst = max(o.certificate.relative for o in outcomes)
    if worst > estimator.tol:
        warnings.warn(
            f"{type(estimator).__name__} stopped at a relative duality gap of {worst:.1e}, above tol = {estimator.tol:g}: "
            "raise max_iter or tol, or scale the features.",
            ConvergenceWarning,
            stacklevel=3,
        )


def start_of(estimator: Any, constant: float, row: int = 0) -> Vector | None:
    """The weights of the last fit, if the estimator starts warm and they are of the same size."""
    if not getattr(estimator, "warm_start", False) or getattr(estimator, "coef_", None) is None:
        return None
    coef = np.atleast_2d(estimator.coef_)
    if coef.shape[1] != estimator.n_features_in_ or row >= len(coef):
        return None
    intercept = float(np.ravel(estimator.intercept_)[row]) if constant else 0.0
    return np.append(coef[row].astype(np.float64), intercept / constant if constant else 0.0)
