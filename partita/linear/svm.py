"""Linear support vector machines: |w|^2 / 2 + C sum_i s_i loss_i, as liblinear states them.

The intercept is the weight of a constant feature `intercept_scaling` and is penalised with the others: scikit-learn's
convention for these two, too.
"""

from dataclasses import replace
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from scipy import sparse
from sklearn.base import RegressorMixin, _fit_context
from sklearn.linear_model._base import LinearClassifierMixin, LinearModel
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from partita.linear.fitting import Setting, checked, fit, start_of, warn, weights
from partita.linear.losses import EPSILON, HINGE, SQUARED_EPSILON, SQUARED_HINGE
from partita.linear.refusing import bad

COMMON: dict[str, Any] = {
    "tol": [Interval(Real, 0, None, closed="neither")],
    "C": [Interval(Real, 0, None, closed="neither")],
    "fit_intercept": ["boolean"],
    "intercept_scaling": [Interval(Real, 0, None, closed="neither")],
    "verbose": ["verbose"],
    "random_state": ["random_state"],
    "max_iter": [Interval(Integral, 1, None, closed="left")],
    "solver": [str],
    "warm_start": ["boolean"],
    "n_jobs": [Integral, None],
    "memory_limit": [Interval(Integral, 1, None, closed="left"), None],
}


class LinearSVC(LinearClassifierMixin, LinearModel):
    """Linear support vector classification, one against the rest; scikit-learn's objective and names.

    Args:
        penalty: "l2" or "l1".
        loss: "hinge" (not with "l1") or "squared_hinge".
        tol: Relative duality gap at which to stop.
        C: Factor of the loss.
        fit_intercept: With an intercept, penalised like a weight.
        intercept_scaling: Value of the constant feature.
        class_weight: "balanced" or a weight per class.
        random_state: Seed of the order of dual coordinates.
        max_iter: Rounds of the solver at most.
        solver: "auto", "dual", "newton", "cg", "gram" or "working_set".
        warm_start: Start from the last fit.
        n_jobs: Threads; None is one, -1 all cores.
        memory_limit: Bytes of samples in fast memory: those with the largest gaps are copied there and visited; None is no
            limit.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **COMMON,
        "penalty": [StrOptions({"l1", "l2"})],
        "loss": [StrOptions({"hinge", "squared_hinge"})],
        "class_weight": [None, dict, StrOptions({"balanced"})],
    }

    def __init__(
        self,
        penalty: str = "l2",
        loss: str = "squared_hinge",
        *,
        tol: float = 1e-4,
        C: float = 1.0,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        class_weight: Any = None,
        verbose: int = 0,
        random_state: Any = None,
        max_iter: int = 1000,
        solver: str = "auto",
        warm_start: bool = False,
        n_jobs: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.penalty = penalty
        self.loss = loss
        self.tol = tol
        self.C = C
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.class_weight = class_weight
        self.verbose = verbose
        self.random_state = random_state
        self.max_iter = max_iter
        self.solver = solver
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.memory_limit = memory_limit

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets classes_, coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        if self.penalty == "l1" and self.loss == "hinge":
            raise bad(
                "penalty='l1' with loss='hinge' is not supported", law="both have kinks", cure="loss='squared_hinge'", at="loss"
            )
        X, y = checked(self, X, y)
        c = self.C * weights(sample_weight, X)
        signs = classes_of(self, y)
        if self.class_weight is not None:
            c = c * compute_sample_weight(self.class_weight, y)
        outcomes, self.solver_ = _fit_svm(
            self, X, signs, c, HINGE if self.loss == "hinge" else SQUARED_HINGE, l1=self.penalty == "l1"
        )
        keep_classes(self, X, outcomes, self.intercept_scaling if self.fit_intercept else 0.0)
        self.n_iter_ = max(max(1, o.rounds) for o in outcomes)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class LinearSVR(RegressorMixin, LinearModel):
    """Linear support vector regression; scikit-learn's objective and names.

    Args:
        epsilon: Half the width of the tube in which an error costs nothing.
        tol: Relative duality gap at which to stop.
        C: Factor of the loss.
        loss: "epsilon_insensitive" or "squared_epsilon_insensitive".
        fit_intercept: With an intercept, penalised like a weight.
        intercept_scaling: Value of the constant feature.
        random_state: Seed of the order of dual coordinates.
        max_iter: Rounds of the solver at most.
        solver: "auto", "dual", "newton" or "cg".
        warm_start: Start from the last fit.
        n_jobs: Threads; None is one, -1 all cores.
        memory_limit: Bytes of samples in fast memory: those with the largest gaps are copied there and visited; None is no
            limit.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **COMMON,
        "epsilon": [Interval(Real, 0, None, closed="left")],
        "loss": [StrOptions({"epsilon_insensitive", "squared_epsilon_insensitive"})],
    }

    def __init__(
        self,
        *,
        epsilon: float = 0.0,
        tol: float = 1e-4,
        C: float = 1.0,
        loss: str = "epsilon_insensitive",
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        verbose: int = 0,
        random_state: Any = None,
        max_iter: int = 1000,
        solver: str = "auto",
        warm_start: bool = False,
        n_jobs: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.tol = tol
        self.C = C
        self.loss = loss
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.verbose = verbose
        self.random_state = random_state
        self.max_iter = max_iter
        self.solver = solver
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.memory_limit = memory_limit

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fit; sets coef_, intercept_, n_iter_, dual_gap_ and solver_."""
        X, y = checked(self, X, y, y_numeric=True)
        c = self.C * weights(sample_weight, X)
        loss = EPSILON if self.loss == "epsilon_insensitive" else SQUARED_EPSILON
        (outcome,), self.solver_ = _fit_svm(self, X, [y], c, loss, l1=False)
        warn(self, [outcome])
        scaling = self.intercept_scaling if self.fit_intercept else 0.0
        self.coef_ = outcome.w[:-1].astype(X.dtype)
        self.intercept_ = np.array([outcome.w[-1] * scaling]).astype(X.dtype) if scaling else 0.0
        self.n_iter_, self.dual_gap_ = max(1, outcome.rounds), outcome.certificate.gap
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _fit_svm(estimator: Any, X: Any, targets: Any, c: Any, loss: int, *, l1: bool) -> tuple[list[Any], str]:
    """Fit every target (labels of -1 and 1, or numbers)."""
    scaling = float(estimator.intercept_scaling) if estimator.fit_intercept else 0.0
    if l1:  # |w_0| counts like any |w_j|: the constant feature becomes a column
        constant = np.full((X.shape[0], 1), scaling, X.dtype)
        X = type(X)(sparse.hstack([X, constant])) if sparse.issparse(X) else np.hstack([X, constant])
        found = [fit(estimator, X, t, c, Setting(loss, l1=1.0, constant=0.0)) for t in targets]
        return [replace(o, w=o.w[:-1]) for o, _ in found], found[0][1]
    setting = Setting(loss, 1.0, e=float(getattr(estimator, "epsilon", 0.0)), constant=scaling, penalised=True)
    found = [fit(estimator, X, t, c, setting, start_of(estimator, scaling, k)) for k, t in enumerate(targets)]
    return [o for o, _ in found], found[0][1]


def classes_of(estimator: Any, y: Any) -> list[Any]:
    """Set classes_; labels of -1 and 1: one vector for two classes, else one for each class against the rest."""
    check_classification_targets(y)
    estimator.classes_ = np.unique(y)
    if len(estimator.classes_) < 2:
        raise bad(
            f"y holds one class: {estimator.classes_[0]!r}",
            have=f"{len(y)} samples",
            law="a classifier separates at least 2 classes",
            at="y",
        )
    chosen = estimator.classes_[1:] if len(estimator.classes_) == 2 else estimator.classes_
    return [np.where(y == k, 1.0, -1.0) for k in chosen]


def keep_classes(estimator: Any, X: Any, outcomes: list[Any], constant: float) -> None:
    """Set coef_, intercept_ and dual_gap_ of a classifier, in the precision of the data; warn if a class did not get there."""
    warn(estimator, outcomes)
    estimator.coef_ = np.array([o.w[:-1] for o in outcomes]).astype(X.dtype)
    estimator.intercept_ = np.array([o.w[-1] * constant for o in outcomes]).astype(X.dtype)
    estimator.dual_gap_ = max(o.certificate.gap for o in outcomes)
