"""The lasso: sum_i s_i (y_i - <x_i, w> - w_0)^2 / 2 sum_i s_i + alpha |w|_1."""

from typing import Any, ClassVar, Self

import numpy as np
from scipy import sparse
from sklearn.base import MultiOutputMixin, RegressorMixin, _fit_context
from sklearn.linear_model._base import LinearModel

from partita.linear.elastic_net import CONSTRAINTS, fit_elastic


class Lasso(MultiOutputMixin, RegressorMixin, LinearModel):
    """Least squares with an L1 penalty; scikit-learn's objective and names.

    Args:
        alpha: Factor of the penalty.
        fit_intercept: With an intercept, without penalty.
        max_iter: Rounds of the solver at most.
        tol: Relative duality gap at which to stop.
        solver: "auto", "gram" or "working_set".
        positive: No negative weights.
        warm_start: Start from the last fit.
        random_state: Seed; no solver of an L1 penalty draws from it.
        n_jobs: Threads; None is one, -1 all cores.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = CONSTRAINTS

    def __init__(
        self,
        alpha: float = 1.0,
        *,
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
        fit_elastic(self, X, y, sample_weight, 1.0)
        return self

    @property
    def sparse_coef_(self) -> Any:
        """coef_ as a CSR matrix."""
        return sparse.csr_matrix(np.atleast_2d(self.coef_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
