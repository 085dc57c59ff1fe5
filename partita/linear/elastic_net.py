"""The elastic net: sum_i s_i (y_i - <x_i, w> - w_0)^2 / 2 sum_i s_i + alpha (l1_ratio |w|_1 + (1 - l1_ratio) |w|^2 / 2)."""

from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from scipy import sparse
from sklearn.base import MultiOutputMixin, RegressorMixin, _fit_context
from sklearn.linear_model._base import LinearModel
from sklearn.utils._param_validation import Interval

from partita.linear.fitting import Setting, checked, fit, start_of, weights
from partita.linear.losses import SQUARED
from partita.linear.ridge import keep_regression

CONSTRAINTS = {
    "alpha": [Interval(Real, 0, None, closed="left")],
    "fit_intercept": ["boolean"],
    "max_iter": [Interval(Integral, 1, None, closed="left"), None],
    "tol": [Interval(Real, 0, None, closed="left")],
    "solver": [str],
    "positive": ["boolean"],
    "warm_start": ["boolean"],
    "random_state": ["random_state"],
    "n_jobs": [Integral, None],
}


def fit_elastic(estimator: Any, X: Any, y: Any, sample_weight: Any, l1_ratio: float) -> None:
    """Fit an estimator with `alpha` and the given share of L1, every target on its own."""
    X, y = checked(estimator, X, y, multi_output=True, y_numeric=True)
    s = weights(sample_weight, X)
    c, constant = s / s.sum(), float(estimator.fit_intercept)
    l1, l2 = estimator.alpha * l1_ratio, estimator.alpha * (1 - l1_ratio)
    setting = Setting(SQUARED, float(l2), float(l1), constant=constant, positive=estimator.positive)
    targets = y.reshape(len(y), -1).T
    found = [fit(estimator, X, t, c, setting, start_of(estimator, constant, k)) for k, t in enumerate(targets)]
    keep_regression(estimator, X, [o for o, _ in found], one=y.ndim == 1 or y.shape[1] == 1)
    estimator.solver_ = found[0][1]


class ElasticNet(MultiOutputMixin, RegressorMixin, LinearModel):
    """Least squares with an L1 and an L2 penalty; scikit-learn's objective and names.

    Args:
        alpha: Factor of the penalty.
        l1_ratio: Share of L1.
        fit_intercept: With an intercept, without penalty.
        max_iter: Rounds of the solver at most.
        tol: Relative duality gap at which to stop.
        solver: "auto", "gram" or "working_set" ("newton", "cg" or "dual" where l1_ratio is 0).
        positive: No negative weights.
        warm_start: Start from the last fit.
        random_state: Seed of the order of dual coordinates.
        n_jobs: Threads; None is one, -1 all cores.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {**CONSTRAINTS, "l1_ratio": [Interval(Real, 0, 1, closed="both")]}

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-4,
        solver: str = "auto",
        positive: bool = False,
        warm_start: bool = False,
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.solver = solver
        self.positive = positive
        self.warm_start = warm_start
        self.random_state = random_state
        self.n_jobs = n_jobs

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        fit_elastic(self, X, y, sample_weight, self.l1_ratio)
        return self

    @property
    def sparse_coef_(self) -> Any:
        """coef_ as a CSR matrix."""
        return sparse.csr_matrix(np.atleast_2d(self.coef_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
