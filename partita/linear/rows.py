"""The sample matrix as rows, dense or CSR, with a constant column behind its last one; every pass over it is compiled once
for both.

A vector of weights w has features + 1 entries: the last belongs to the constant column, whose value is `constant` (0: no
intercept). Passes cut the rows into as many parts as there are threads, with about the same number of stored entries each.
Sums are in float64 whatever the data.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload
from numpy.typing import NDArray
from scipy import sparse

from partita.linear.losses import OPTIONS

Vector = NDArray[np.float64]
FAST: Any = {"fastmath": True}
PANEL = 1 << 19  # bytes of a panel of rows for matrix products: stays in a second-level cache


def dot(rows: Any, i: int, w: Any) -> Any:
    """<x_i, w>, without the constant column (compiled code only)."""


def add(rows: Any, i: int, by: float, w: Any) -> None:
    """W += by x_i, without the constant column (compiled code only)."""


def square(rows: Any, i: int) -> Any:
    """|x_i|^2, without the constant column (compiled code only)."""


def weigh(rows: Any, i: int, h: Any) -> Any:
    """The sums of h x_i^2 and of h x_i (compiled code only)."""


def spread(rows: Any, i: int, by: float, h: Any, w: Any) -> None:
    """W += by h x_i, entry by entry (compiled code only)."""


@overload(dot, jit_options=FAST)
def _dot(rows: Any, i: Any, w: Any) -> Any:
    if len(rows) == 1:

        def dense(rows: Any, i: Any, w: Any) -> Any:
            x, total = rows[0][i], 0.0
            for k in range(x.shape[0]):
                total += x[k] * w[k]
            return total

        return dense

    def csr(rows: Any, i: Any, w: Any) -> Any:
        starts, columns, values = rows
        total = 0.0
        for k in range(starts[i], starts[i + 1]):
            total += values[k] * w[columns[k]]
        return total

    return csr


@overload(add, jit_options=FAST)
def _add(rows: Any, i: Any, by: Any, w: Any) -> Any:
    if len(rows) == 1:

        def dense(rows: Any, i: Any, by: Any, w: Any) -> None:
            x = rows[0][i]
            for k in range(x.shape[0]):
                w[k] += by * x[k]

        return dense

    def csr(rows: Any, i: Any, by: Any, w: Any) -> None:
        starts, columns, values = rows
        for k in range(starts[i], starts[i + 1]):
            w[columns[k]] += by * values[k]

    return csr


@overload(square, jit_options=FAST)
def _square(rows: Any, i: Any) -> Any:
    if len(rows) == 1:

        def dense(rows: Any, i: Any) -> Any:
            x, total = rows[0][i], 0.0
            for k in range(x.shape[0]):
                total += float(x[k]) * float(x[k])
            return total

        return dense

    def csr(rows: Any, i: Any) -> Any:
        starts, _, values = rows
        total = 0.0
        for k in range(starts[i], starts[i + 1]):
            total += float(values[k]) * float(values[k])
        return total

    return csr


@overload(weigh, jit_options=FAST)
def _weigh(rows: Any, i: Any, h: Any) -> Any:
    if len(rows) == 1:

        def dense(rows: Any, i: Any, h: Any) -> Any:
            x, square, mean = rows[0][i], 0.0, 0.0
            for k in range(x.shape[0]):
                by = h[k] * x[k]
                mean += by
                square += by * x[k]
            return square, mean

        return dense

    def csr(rows: Any, i: Any, h: Any) -> Any:
        starts, columns, values = rows
        square, mean = 0.0, 0.0
        for k in range(starts[i], starts[i + 1]):
            by = h[columns[k]] * values[k]
            mean += by
            square += by * values[k]
        return square, mean

    return csr


@overload(spread, jit_options=FAST)
def _spread(rows: Any, i: Any, by: Any, h: Any, w: Any) -> Any:
    if len(rows) == 1:

        def dense(rows: Any, i: Any, by: Any, h: Any, w: Any) -> None:
            x = rows[0][i]
            for k in range(x.shape[0]):
                w[k] += by * h[k] * x[k]

        return dense

    def csr(rows: Any, i: Any, by: Any, h: Any, w: Any) -> None:
        starts, columns, values = rows
        for k in range(starts[i], starts[i + 1]):
            w[columns[k]] += by * h[columns[k]] * values[k]

    return csr


@njit(**OPTIONS)
def _margins(rows: Any, constant: float, w: Any, out: Any, lo: int, hi: int) -> None:
    shift = constant * w[-1]
    for i in range(lo, hi):
        out[i] = dot(rows, i, w) + shift


@njit(**OPTIONS)
def _pull(rows: Any, constant: float, r: Any, out: Any, lo: int, hi: int) -> None:
    total = 0.0
    for i in range(lo, hi):
        if r[i] != 0:
            add(rows, i, r[i], out)
            total += r[i]
    out[-1] += constant * total


@njit(**OPTIONS)
def _product(rows: Any, constant: float, p: Any, h: Any, t: Any, out: Any, lo: int, hi: int) -> None:
    shift, total = constant * p[-1], 0.0
    for i in range(lo, hi):
        t[i] = dot(rows, i, p) + shift
        by = h[i] * t[i]
        if by != 0:
            add(rows, i, by, out)
            total += by
    out[-1] += constant * total


@njit(**OPTIONS)
def _measure(rows: Any, constant: float, r: Any, squares: Any, out: Any, lo: int, hi: int) -> None:
    total = 0.0
    for i in range(lo, hi):
        squares[i] = square(rows, i)
        if r[i] != 0:
            add(rows, i, r[i], out)
            total += r[i]
    out[-1] += constant * total


@njit(**OPTIONS)
def _outer(rows: Any, constant: float, h: Any, out: Any, lo: int, hi: int) -> None:
    """Upper and lower triangle of the sum of h_i x_i x_i^T over sparse rows."""
    starts, columns, values = rows
    last = out.shape[0] - 1
    for i in range(lo, hi):
        if h[i] != 0:
            for k in range(starts[i], starts[i + 1]):
                by = h[i] * values[k]
                for l in range(starts[i], starts[i + 1]):
                    out[columns[k], columns[l]] += by * values[l]
                out[columns[k], last] += by * constant
                out[last, columns[k]] += by * constant
            out[last, last] += h[i] * constant * constant


class Team:
    """Threads that sleep when there is nothing to do; a team of one is the caller itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size - 1) if size > 1 else None

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown()

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """call(0), ..., call(size - 1), side by side."""
        if self._pool is None:
            return [call(0)]
        others = [self._pool.submit(call, k) for k in range(1, self.size)]
        return [call(0), *(other.result() for other in others)]


class Rows:
    """The rows of a dense (C order) or CSR matrix with a constant column, and the passes over them."""

    def __init__(self, X: Any, constant: float, team: Team) -> None:
        self.matrix = X
        self.samples, self.features = X.shape
        self.sparse = sparse.issparse(X)
        self.parts = (X.indptr, X.indices, X.data) if self.sparse else (X,)
        self.dtype = X.dtype
        self.constant, self.team = float(constant), team
        self.size = self.features + 1
        ends = np.linspace(0, self.samples, team.size + 1).astype(int)
        if self.sparse:
            ends = np.searchsorted(X.indptr, np.linspace(0, X.indptr[-1], team.size + 1))
            ends[0], ends[-1] = 0, self.samples
        self.cuts = [(int(a), int(b)) for a, b in pairwise(ends)]

    @property
    def stored(self) -> int:
        """Stored entries."""
        return int(self.parts[0][-1]) if self.sparse else self.samples * self.features

    def margins(self, w: Vector) -> Vector:
        """X w."""
        out = np.empty(self.samples)
        self.team.each(lambda k: _margins(self.parts, self.constant, w, out, *self.cuts[k]))
        return out

    def pull(self, r: Vector) -> Vector:
        """X^T r."""
        out = np.zeros((self.team.size, self.size))
        self.team.each(lambda k: _pull(self.parts, self.constant, r, out[k], *self.cuts[k]))
        return out.sum(0) if self.team.size > 1 else out[0]

    def product(self, p: Vector, h: Vector) -> tuple[Vector, Vector]:
        """X p and X^T (h X p), in one pass."""
        out, t = np.zeros((self.team.size, self.size)), np.empty(self.samples)
        self.team.each(lambda k: _product(self.parts, self.constant, p, h, t, out[k], *self.cuts[k]))
        return t, out.sum(0) if self.team.size > 1 else out[0]

    def measure(self, r: Vector) -> tuple[Vector, Vector]:
        """|x_i|^2, without the constant column, and X^T r, in one pass."""
        out, squares = np.zeros((self.team.size, self.size)), np.empty(self.samples)
        self.team.each(lambda k: _measure(self.parts, self.constant, r, squares, out[k], *self.cuts[k]))
        return squares, out.sum(0) if self.team.size > 1 else out[0]

    def gram(self, h: Vector) -> NDArray[np.float64]:
        """X^T diag(h) X."""
        each = self._outer if self.sparse else self._panels
        return np.sum(self.team.each(lambda k: each(h, *self.cuts[k])), axis=0)

    def _outer(self, h: Vector, lo: int, hi: int) -> NDArray[np.float64]:
        out = np.zeros((self.size, self.size))
        _outer(self.parts, self.constant, h, out, lo, hi)
        return out

    def _panels(self, h: Vector, lo: int, hi: int) -> NDArray[np.float64]:
        """A panel of rows stays in cache for its products; rows that count for nothing are left out."""
        d, X = self.features, self.parts[0]
        out, step = np.zeros((self.size, self.size)), max(PANEL // (self.size * X.itemsize), 64)
        for a in range(lo, hi, step):
            x, by = X[a : min(a + step, hi)], h[a : min(a + step, hi)]
            kept = np.flatnonzero(by)
            if 2 * len(kept) < len(by):
                x, by = x[kept], by[kept]
            scaled = x * by.astype(X.dtype)[:, None]
            out[:d, :d] += x.T @ scaled
            out[:d, d] += scaled.sum(0)
            out[d, d] += by.sum()
        out[:d, d] *= self.constant
        out[d, :d] = out[:d, d]
        out[d, d] *= self.constant**2
        return out


class Columns:
    """The same matrix by columns (the rows of its transpose), with the constant column; for solvers that visit features."""

    def __init__(self, X: Any, constant: float, team: Team) -> None:
        self.samples, self.features = X.shape
        self.transposed = Rows(X.T, 0.0, team)
        self.dtype, self.sparse, self.parts = X.dtype, self.transposed.sparse, self.transposed.parts
        self.constant, self.team, self.size = float(constant), team, X.shape[1] + 1

    def margins(self, w: Vector) -> Vector:
        """X w; columns without weight are not read."""
        return self.transposed.pull(w[:-1])[:-1] + self.constant * w[-1]

    def pull(self, r: Vector) -> Vector:
        """X^T r."""
        return np.append(self.transposed.margins(np.append(r, 0.0)), self.constant * r.sum())
