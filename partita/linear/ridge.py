"""Ridge regression: sum_i s_i (y_i - <x_i, w> - w_0)^2 + alpha |w|^2."""

from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin, _fit_context
from sklearn.linear_model._base import LinearModel
from sklearn.utils._param_validation import Interval

from partita.linear.fitting import Setting, checked, fit, start_of, warn, weights
from partita.linear.losses import SQUARED
from partita.linear.refusing import bad


class Ridge(MultiOutputMixin, RegressorMixin, LinearModel):
    """Linear least squares with an L2 penalty; scikit-learn's objective and names.

    Args:
        alpha: Factor of the penalty; one number, or one per target.
        fit_intercept: With an intercept, without penalty.
        max_iter: Rounds of the solver at most; None is 1000.
        tol: Relative duality gap at which to stop; a direct solver is exact whatever it is.
        solver: "auto", "newton" (direct), "cg", "dual", "gram" or "working_set".
        positive: No negative weights.
        warm_start: Start from the last fit.
        random_state: Seed of the order of dual coordinates.
        n_jobs: Threads; None is one, -1 all cores.
        memory_limit: Bytes of samples in fast memory: those with the largest gaps are copied there and visited; None is no
            limit.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "alpha": [Interval(Real, 0, None, closed="left"), np.ndarray],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "tol": [Interval(Real, 0, None, closed="left")],
        "solver": [str],
        "positive": ["boolean"],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
        "n_jobs": [Integral, None],
        "memory_limit": [Interval(Integral, 1, None, closed="left"), None],
    }

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        max_iter: int | None = None,
        tol: float = 1e-4,
        solver: str = "auto",
        positive: bool = False,
        warm_start: bool = False,
        random_state: Any = None,
        n_jobs: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.solver = solver
        self.positive = positive
        self.warm_start = warm_start
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.memory_limit = memory_limit

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        X, y = checked(self, X, y, multi_output=True, y_numeric=True)
        s = weights(sample_weight, X)
        targets = y.reshape(len(y), -1)
        alphas = np.ravel(np.asarray(self.alpha, dtype=np.float64))
        if len(alphas) not in (1, targets.shape[1]):
            raise bad(
                f"alpha has {len(alphas)} entries",
                have=f"{targets.shape[1]} targets",
                law="one for all, or one each",
                at="alpha",
            )
        alphas = np.broadcast_to(alphas, targets.shape[1])
        constant = float(self.fit_intercept)
        found = [
            fit(
                self,
                X,
                t,
                s,
                Setting(SQUARED, float(a), constant=constant, positive=self.positive),
                start_of(self, constant, k),
            )
            for k, (t, a) in enumerate(zip(targets.T, alphas, strict=True))
        ]
        keep_regression(self, X, [o for o, _ in found], one=y.ndim == 1)
        self.solver_ = found[0][1]
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def keep_regression(estimator: Any, X: Any, outcomes: list[Any], *, one: bool) -> None:
    """Set the fitted attributes of a regressor, in the precision of the data; warn if a target did not get there."""
    warn(estimator, outcomes)
    coef = np.array([o.w[:-1] for o in outcomes]).astype(X.dtype)
    intercepts = (
        np.array([o.w[-1] for o in outcomes]).astype(X.dtype) if estimator.fit_intercept else np.zeros(len(outcomes), X.dtype)
    )
    rounds = np.array([max(1, o.rounds) for o in outcomes])
    gaps = np.array([o.certificate.gap for o in outcomes])
    estimator.coef_ = coef[0] if one else coef
    estimator.intercept_ = (intercepts[0] if one else intercepts) if estimator.fit_intercept else 0.0
    estimator.n_iter_ = int(rounds[0]) if one else rounds
    estimator.dual_gap_ = float(gaps[0]) if one else gaps
