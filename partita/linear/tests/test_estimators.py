"""The estimators are scikit-learn's to the letter: its own checks, none excused, and the tools that take an estimator apart."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from partita import linear
from partita.linear import ElasticNet, Lasso, LinearSVC, LinearSVR, LogisticRegression, PoissonRegressor, Ridge

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(200, 10))
Y = X @ RANDOM.normal(size=10) + RANDOM.normal(size=200)
ESTIMATORS = [LogisticRegression(), Ridge(), Lasso(0.1), ElasticNet(0.1), LinearSVC(), LinearSVR(), PoissonRegressor()]
NAMES = [type(e).__name__ for e in ESTIMATORS]


def target(estimator):
    return (Y > 0).astype(int) if NAMES.index(type(estimator).__name__) in (0, 4) else np.exp(Y / 4)


@pytest.mark.filterwarnings("ignore", "default::ResourceWarning")  # the checks fit on purpose what does not converge
@pytest.mark.parametrize("estimator", [*ESTIMATORS, LinearSVC(loss="hinge")], ids=repr)
def test_scikit_learns_own_checks_pass(estimator):
    done = check_estimator(estimator, on_skip=None)
    assert {r["status"] for r in done} <= {"passed", "skipped"}
    assert sum(r["status"] == "skipped" for r in done) <= 4  # what needs pandas, or a switch for other array libraries


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_grid_search_over_a_clone_in_a_pipeline(estimator):
    pipe = make_pipeline(StandardScaler(), clone(estimator))
    name = type(estimator).__name__.lower()
    grid = {f"{name}__tol": [1e-3, 1e-6]}
    found = GridSearchCV(pipe, grid, cv=2, n_jobs=None).fit(X, target(estimator))
    assert np.isfinite(found.best_score_)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_precision_follows_the_data(estimator):
    for kind in (np.float32, np.float64):
        fitted = clone(estimator).fit(X.astype(kind), target(estimator))
        assert fitted.coef_.dtype == kind


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_a_second_fit_started_warm_has_nothing_to_do(estimator):
    fitted = clone(estimator).set_params(warm_start=True, tol=1e-5).fit(X, target(estimator))
    first = np.max(fitted.n_iter_)
    fitted.fit(X, target(estimator))
    assert np.max(fitted.n_iter_) <= max(1, first)


def test_too_few_rounds_are_told():
    with pytest.warns(ConvergenceWarning, match="relative duality gap"):
        LogisticRegression(max_iter=1, tol=1e-12).fit(X, target(ESTIMATORS[0]))


@pytest.mark.parametrize(
    ("estimator", "chosen"),
    [
        (LogisticRegression(), "newton: 200 samples x 10 features, dense"),
        (Lasso(0.1), "gram"),
        (Ridge(), "newton"),
        (LogisticRegression(solver="dual"), "dual: as asked"),
    ],
)
def test_the_choice_says_why(estimator, chosen):
    assert estimator.fit(X, target(estimator)).solver_.startswith(chosen)


def test_a_choice_by_shape():
    wide = sparse.random_array((500, 3000), density=0.01, rng=np.random.default_rng(0), format="csr")
    y = np.where(np.arange(500) % 3 == 0, 1, -1)
    assert LogisticRegression().fit(wide, y).solver_.startswith("dual")
    assert LogisticRegression(C=1e6).fit(wide, y).solver_.startswith("cg")
    assert LinearSVC(loss="hinge").fit(wide, y).solver_.startswith("dual")
    assert Lasso(1e-3).fit(wide, y).solver_.startswith("working_set")
    assert PoissonRegressor().fit(wide, np.abs(y)).solver_.startswith("cg")


@pytest.mark.law
@pytest.mark.parametrize("jobs", [1, 2])
def test_threads_change_no_optimum_and_each_result_repeats(jobs):
    wide = sparse.random_array((2000, 3000), density=0.01, rng=np.random.default_rng(0), format="csr")
    y = np.where(wide @ np.random.default_rng(1).normal(size=3000) > 0, 1, -1)
    fits = [LogisticRegression(tol=1e-8, solver="dual", n_jobs=jobs).fit(wide, y) for _ in range(2)]
    assert np.array_equal(fits[0].coef_, fits[1].coef_)
    assert np.allclose(fits[0].coef_, LogisticRegression(tol=1e-10, solver="cg").fit(wide, y).coef_, atol=1e-3)


def test_public_names():
    assert sorted(linear.__all__) == linear.__all__
