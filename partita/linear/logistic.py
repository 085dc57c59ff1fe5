"""Logistic regression: C sum_i s_i log(1 + exp(-y_i m_i)) + (1 - l1_ratio) |w|^2 / 2 + l1_ratio |w|_1; softmax from three
classes on.
"""

from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.base import _fit_context
from sklearn.linear_model._base import LinearClassifierMixin, LinearModel
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import check_is_fitted

from partita.linear.fitting import Setting, checked, fit, start_of, weights
from partita.linear.losses import LOGISTIC
from partita.linear.softmax import fit_softmax
from partita.linear.svm import classes_of, keep_classes


class LogisticRegression(LinearClassifierMixin, LinearModel):
    """Logistic regression, binary and multinomial; scikit-learn's objective and names.

    Args:
        C: Factor of the loss; inf is no penalty.
        l1_ratio: Share of L1 in the penalty.
        tol: Relative duality gap at which to stop.
        fit_intercept: With an intercept, without penalty.
        class_weight: "balanced" or a weight per class.
        random_state: Seed of the order of dual coordinates.
        solver: "auto", "dual", "newton", "cg", "gram" or "working_set".
        max_iter: Rounds of the solver at most.
        verbose: Accepted, says nothing.
        warm_start: Start from the last fit.
        n_jobs: Threads; None is one, -1 all cores.
        memory_limit: Bytes of samples in fast memory: those with the largest gaps are copied there and visited; None is no
            limit.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "C": [Interval(Real, 0, None, closed="right")],
        "l1_ratio": [Interval(Real, 0, 1, closed="both")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "class_weight": [None, dict, StrOptions({"balanced"})],
        "random_state": ["random_state"],
        "solver": [str],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "verbose": ["verbose"],
        "warm_start": ["boolean"],
        "n_jobs": [Integral, None],
        "memory_limit": [Interval(Integral, 1, None, closed="left"), None],
    }

    def __init__(
        self,
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: Any = None,
        random_state: Any = None,
        solver: str = "auto",
        max_iter: int = 100,
        verbose: int = 0,
        warm_start: bool = False,
        n_jobs: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.C = C
        self.l1_ratio = l1_ratio
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.random_state = random_state
        self.solver = solver
        self.max_iter = max_iter
        self.verbose = verbose
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.memory_limit = memory_limit

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets classes_, coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        X, y = checked(self, X, y)
        c = weights(sample_weight, X)
        signs = classes_of(self, y)
        if self.class_weight is not None:
            c = c * compute_sample_weight(self.class_weight, y)
        unbounded = np.isinf(self.C)
        c, penalty = (c, 0.0) if unbounded else (self.C * c, 1.0)
        constant = float(self.fit_intercept)
        setting = Setting(LOGISTIC, penalty * (1 - self.l1_ratio), penalty * self.l1_ratio, constant=constant)
        if len(signs) == 1:
            outcome, self.solver_ = fit(self, X, signs[0], c, setting, start_of(self, constant))
            outcomes, rounds = [outcome], outcome.rounds
        else:
            outcomes, self.solver_ = fit_softmax(self, X, np.unique(y, return_inverse=True)[1].ravel(), c, setting)
            rounds = outcomes[0].rounds
        keep_classes(self, X, outcomes, constant)
        self.n_iter_ = np.array([max(1, rounds)], dtype=np.int32)
        return self

    def predict_proba(self, X: Any) -> Any:
        """Probability of each class, in the order of classes_."""
        return softmax(self._logits(X), axis=1)

    def predict_log_proba(self, X: Any) -> Any:
        """Logarithm of the probability of each class."""
        return log_softmax(self._logits(X), axis=1)

    def _logits(self, X: Any) -> Any:
        check_is_fitted(self)
        margins = self.decision_function(X)
        return np.stack([np.zeros_like(margins), margins], axis=1) if margins.ndim == 1 else margins

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
