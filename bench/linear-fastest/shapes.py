"""Synthetic data in the shapes of the classic sets, with a fixed seed: none of them ships in a package.

Each gives (X, labels of -1 and 1, real targets), X in float32: CSR where sparse, C order where dense.
"""

import numpy as np
from scipy import sparse


def labelled(rng, X, m):
    """Labels drawn with the logistic of the margin, and targets with half its spread as noise."""
    labels = np.where(rng.random(len(m)) < 1 / (1 + np.exp(-m)), 1.0, -1.0)
    return X, labels, m + rng.normal(size=len(m)) * m.std() * 0.5


def rcv1_like(n=20_000, d=47_000, filled=75):
    """Text: a power law over columns, about 75 words a document, documents normalised."""
    rng = np.random.default_rng(0)
    p = 1 / np.arange(1, d + 1) ** 0.75
    columns = np.searchsorted((p / p.sum()).cumsum(), rng.random(n * filled)).clip(0, d - 1)
    X = sparse.csr_matrix((rng.lognormal(0, 0.6, n * filled), (np.repeat(np.arange(n), filled), columns)), shape=(n, d))
    X.sum_duplicates()
    X = (sparse.diags(1 / np.sqrt(np.asarray(X.multiply(X).sum(1)).ravel())) @ X).tocsr()
    m = X @ (rng.normal(size=d) * (rng.random(d) < 0.3) * 4)
    X = X.astype(np.float32)
    X.indices, X.indptr = X.indices.astype(np.int32), X.indptr.astype(np.int32)
    return labelled(rng, X, m)


def gisette_like(n=6_000, d=5_000):
    """Pixels and products of them: 30 % filled, between 0 and 1, rows scaled to norm 1; stored dense."""
    rng = np.random.default_rng(1)
    X = rng.random((n, d), dtype=np.float32) * (rng.random((n, d), dtype=np.float32) < 0.3)
    X /= np.linalg.norm(X, axis=1)[:, None]
    w = rng.normal(size=d) * (rng.random(d) < 0.2) * 20
    return labelled(rng, X, X @ w)


def epsilon_like(n=40_000, d=2_000):
    """Dense, rows normalised."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(n, d)).astype(np.float32)
    X /= np.linalg.norm(X, axis=1)[:, None]
    return labelled(rng, X, X @ (rng.normal(size=d) * 3))


def higgs_like(n=1_000_000, d=28):
    """Many samples of a few correlated measurements."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(n, d)).astype(np.float32)
    X[:, 1:] += np.float32(0.4) * X[:, :-1]
    return labelled(rng, X, X @ (rng.normal(size=d) * 0.15))


SHAPES = {f.__name__: f for f in (rcv1_like, gisette_like, epsilon_like, higgs_like)}
