"""Data in every form give one model; what cannot be fitted is refused with its culprit; the caller's arrays stay."""

import numpy as np
import pytest
from scipy import sparse

from partita.errors import Refused
from partita.linear import Lasso, LinearSVC, LogisticRegression, PoissonRegressor, Ridge, read_svmlight, svmlight

RANDOM = np.random.default_rng(12)
D = sparse.random(300, 40, density=0.1, random_state=RANDOM).toarray()
D[:, [3, 39]] = 0
D[7] = 0
X = sparse.csr_matrix(D)
X64 = X.copy()
X64.indices, X64.indptr = X64.indices.astype(np.int64), X64.indptr.astype(np.int64)
Y = np.where(np.asarray(X @ RANDOM.normal(size=40)) > 0, 7, -3)
FORMS = [X64, X.tocsc(), X.tocoo(), sparse.csr_array(X), D, np.asfortranarray(D), X.astype(np.float32)]
BOTH = pytest.mark.parametrize("estimator", [LogisticRegression(tol=1e-9), LinearSVC(tol=1e-9)], ids=["logistic", "svc"])


@BOTH
@pytest.mark.parametrize("form", FORMS, ids=["int64", "csc", "coo", "array", "dense", "fortran", "float32"])
def test_every_form_of_the_data_gives_the_same_model(estimator, form):
    expected = estimator.fit(X, Y).coef_.copy()
    found = estimator.fit(form, Y).coef_
    assert np.allclose(found, expected, atol=2e-6 if form.dtype == np.float32 else 1e-9)
    assert np.abs(found[0, [3, 39]]).max() < 1e-12


@BOTH
@pytest.mark.parametrize("labels", [Y == 7, np.where(Y == 7, "b", "a"), Y.astype(float)], ids=["bool", "text", "float"])
def test_labels_of_any_kind(estimator, labels):
    expected = estimator.fit(X, Y).coef_.copy()
    assert np.array_equal(estimator.fit(X, labels).coef_, expected)
    assert set(estimator.predict(X)) <= set(labels)


@BOTH
@pytest.mark.parametrize(
    ("data", "labels", "said"),
    [
        (X, np.full(300, 7), "one class"),
        (X, np.r_[Y[:-1], 99.5], "Unknown label type"),
        (X[:0], Y[:0], "0 sample"),
        (X, Y[:5], "inconsistent"),
    ],
    ids=["one class", "real labels", "empty", "lengths"],
)
def test_what_cannot_be_fitted_is_refused(estimator, data, labels, said):
    with pytest.raises(ValueError, match=said):
        estimator.fit(data, labels)


def test_no_features():
    with pytest.raises(ValueError, match=r"0 feature\(s\)"):
        Ridge().fit(np.zeros((5, 0)), np.zeros(5))


@pytest.mark.parametrize("small", [True, False], ids=["before", "during"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), Lasso(0.01), LinearSVC(loss="hinge"), LogisticRegression(solver="dual"), Ridge(solver="cg")],
)
def test_the_column_that_is_not_finite_is_named(estimator, form, value, small, monkeypatch):
    if not small:
        monkeypatch.setattr("partita.linear.fitting.SMALL", 0)
    bad = D.copy()
    bad[11, 5] = value
    with pytest.raises(Refused, match="column 5") as caught:
        estimator.fit(form(bad), Y)
    assert isinstance(caught.value, ValueError)
    assert ("NaN" if np.isnan(value) else "infinity") in str(caught.value)
    assert "row 11" in str(caught.value)


def test_unsorted_and_repeated_entries_count_once_each_and_are_left_alone():
    order = np.concatenate([np.arange(a, b)[::-1] for a, b in zip(X.indptr[:-1], X.indptr[1:], strict=True)])
    halves = np.repeat(X.data[order] / 2, 2)
    messy = sparse.csr_matrix((halves, np.repeat(X.indices[order], 2), 2 * X.indptr), shape=X.shape)
    before = messy.indices.copy()
    model = LogisticRegression(tol=1e-10, solver="dual").fit(messy, Y)
    assert np.allclose(model.coef_, LogisticRegression(tol=1e-10, solver="dual").fit(X, Y).coef_)
    assert np.array_equal(messy.indices, before)
    assert messy.nnz == 2 * X.nnz


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (LogisticRegression(solver="lbfgs"), "auto, cg, dual"),
        (Lasso(solver="newton"), "working_set"),
        (Lasso(solver="dual"), "no L1 penalty"),
        (LinearSVC(penalty="l1", loss="hinge"), "squared_hinge"),
        (LogisticRegression(memory_limit=1), "does not hold one sample"),
        (LogisticRegression(memory_limit=10_000, l1_ratio=1.0), "memory_limit"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_those_that_do(estimator, said):
    with pytest.raises(Refused, match=said):
        estimator.fit(X, Y)


def test_negative_counts_and_weights():
    with pytest.raises(Refused, match="not negative"):
        PoissonRegressor().fit(X, Y)
    with pytest.raises(Refused, match="negative"):
        Ridge().fit(X, Y, sample_weight=np.r_[-1.0, np.ones(299)])


def test_memory_maps_of_dense_data(tmp_path):
    np.save(tmp_path / "x.npy", D)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    expected = Ridge(tol=1e-10).fit(D, Y.astype(float)).coef_
    assert np.array_equal(Ridge(tol=1e-10).fit(mapped, Y.astype(float)).coef_, expected)


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_svmlight_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(svmlight, "PIECE", piece)
    lines = [f"{y} " + " ".join(f"{j + 1}:{np.float32(D[i, j]):.9g}" for j in np.flatnonzero(D[i])) for i, y in enumerate(Y)]
    (tmp_path / "data.svm").write_text("\n".join(lines) + "\n")
    mapped, labels = read_svmlight(tmp_path / "data.svm", tmp_path / "arrays", features=40)
    assert np.array_equal(labels, Y)
    assert np.array_equal(mapped.toarray(), D.astype(np.float32))
    assert isinstance(mapped.data, np.memmap)
    again, _ = read_svmlight(tmp_path / "data.svm", tmp_path / "arrays")
    model = LogisticRegression(tol=1e-9).fit(again, labels)
    assert np.allclose(model.coef_, LogisticRegression(tol=1e-9).fit(X, Y).coef_, atol=1e-5)
