"""Refusals of the estimators: five slots, and a ValueError too, as scikit-learn's callers expect."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from partita.errors import Fault, Refused


class BadInput(Refused, ValueError):
    """An argument of an estimator was refused."""


def bad(what: str, *, have: str = "", law: str = "", cure: str = "", at: str) -> BadInput:
    return BadInput(Fault("P112", what, have, law, cure, at))


def not_finite(X: Any, names: NDArray[Any] | None) -> BadInput | None:
    """The refusal that names the first column with NaN or infinity, or None."""
    values = X.data if sparse.issparse(X) else X
    if np.isfinite(values).all():
        return None
    if sparse.issparse(X):
        entries = X.tocoo()
        rows, columns = entries.row[~np.isfinite(entries.data)], entries.col[~np.isfinite(entries.data)]
    else:
        rows, columns = np.nonzero(~np.isfinite(X))
    first = int(columns.min())
    row = int(rows[columns == first].min())
    found = "NaN" if np.isnan(X[row, first]) else "infinity"
    name = f"column {first}" if names is None else f"column {str(names[first])!r}"
    return bad(
        f"Input X contains {found} in {name}",
        have=f"{len(rows)} such entries in {len(np.unique(columns))} of {X.shape[1]} columns; its first is in row {row}",
        law="a margin is a sum over all features of a sample",
        cure="drop or impute them, e.g. sklearn.impute.SimpleImputer",
        at="X",
    )
