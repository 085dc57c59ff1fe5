"""Poisson regression: sum_i s_i (exp(m_i) - y_i m_i) / sum_i s_i + alpha |w|^2 / 2, up to a constant half the mean deviance."""

from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import xlogy
from sklearn.base import RegressorMixin, _fit_context
from sklearn.linear_model._base import LinearModel
from sklearn.utils._param_validation import Interval

from partita.linear.fitting import Setting, checked, fit, start_of, weights
from partita.linear.losses import POISSON
from partita.linear.refusing import bad
from partita.linear.ridge import keep_regression


class PoissonRegressor(RegressorMixin, LinearModel):
    """A generalised linear model of counts with the log link; scikit-learn's objective and names.

    Args:
        alpha: Factor of the L2 penalty.
        fit_intercept: With an intercept, without penalty.
        max_iter: Rounds of the solver at most.
        tol: Relative duality gap at which to stop.
        solver: "auto", "newton" or "cg".
        warm_start: Start from the last fit.
        n_jobs: Threads; None is one, -1 all cores.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "alpha": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "solver": [str],
        "warm_start": ["boolean"],
        "n_jobs": [Integral, None],
    }

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        fit_intercept: bool = True,
        max_iter: int = 100,
        tol: float = 1e-4,
        solver: str = "auto",
        warm_start: bool = False,
        n_jobs: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.solver = solver
        self.warm_start = warm_start
        self.n_jobs = n_jobs

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        X, y = checked(self, X, y, y_numeric=True)
        if y.min() < 0:
            raise bad(
                "Some value(s) of y are out of the valid range of the loss 'HalfPoissonLoss': counts are not negative",
                have=f"the least is {y.min():g}",
                at="y",
            )
        s, constant = weights(sample_weight, X), float(self.fit_intercept)
        outcome, self.solver_ = fit(
            self, X, y, s / s.sum(), Setting(POISSON, float(self.alpha), constant=constant), start_of(self, constant)
        )
        keep_regression(self, X, [outcome], one=True)
        return self

    def predict(self, X: Any) -> Any:
        """Expected counts."""
        return np.exp(self._decision_function(X))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2, the share of the deviance that is explained."""
        y = np.asarray(y, dtype=np.float64)
        mean = np.average(y, weights=sample_weight)
        deviance = lambda mu: np.average(xlogy(y, y / mu) - y + mu, weights=sample_weight)
        return float(1 - deviance(self.predict(X)) / deviance(np.full(len(y), mean)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.positive_only = True
        return tags
