"""Dual descent with a working set in fast memory, chosen by each sample's share of the duality gap.

All samples stay where they are (a memory map, say); as many as `limit` bytes hold are copied to fast memory, and descent
visits those alone. Meanwhile a second thread reads the others in turn with the w of the round's beginning and brings their
gaps up to date,

    gap_i = c_i f(m_i) + c_i f*(-b_i / c_i) + b_i m_i >= 0,

whose sum is the duality gap. The largest gaps make the next working set, and only what is new is moved. Rounds are fixed
work, not fixed time: a result does not depend on the speed of either thread.

Source: Duenner, Parnell, Jaggi 2017, arXiv 1708.05357.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from partita.linear.dual import Descent, next_look
from partita.linear.losses import apart
from partita.linear.problem import Problem
from partita.linear.refusing import bad
from partita.linear.rows import Rows, Team, Vector
from partita.linear.stopping import Outcome, Stop

EPOCHS = 4  # over the working set, per round
SHARE = 4  # of all samples, one part in so many has its gap brought up to date per round
Chosen = NDArray[np.intp]


class FastMemory:
    """A byte-capped copy of some rows; counts what is moved into it."""

    def __init__(self, X: Any, limit: int) -> None:
        self.source: Any = X
        self.limit = limit
        self.chosen: Chosen = np.empty(0, np.intp)
        self.moved: list[int] = []
        if sparse.issparse(X):
            self.sizes = np.diff(X.indptr).astype(np.int64) * (X.data.itemsize + X.indices.itemsize) + X.indptr.itemsize
        else:
            self.sizes = np.full(X.shape[0], X.shape[1] * X.itemsize, np.int64)
        self.rows: Any = X[:0]
        if limit < self.sizes.max():
            raise bad(
                f"memory_limit = {limit} bytes does not hold one sample",
                have=f"the largest sample takes {self.sizes.max()} bytes, all of them {self.sizes.sum()}",
                cure=f"at least {self.sizes.max()}",
                at="memory_limit",
            )

    def best(self, worth: Vector) -> Chosen:
        """The samples of the greatest worth that fit, in order."""
        order = np.argsort(-worth, kind="stable")
        return np.sort(order[np.cumsum(self.sizes[order]) <= self.limit])

    def hold(self, chosen: Chosen) -> None:
        """Hold these rows: those here already stay, the others are copied in."""
        stays = np.isin(self.chosen, chosen)
        enter = np.setdiff1d(chosen, self.chosen)
        self.moved.append(int(self.sizes[enter].sum()))
        kept, fresh = self.rows[stays], self.source[enter]
        self.chosen = np.concatenate([self.chosen[stays], enter])
        self.rows = (
            sparse.vstack([kept, fresh], format="csr") if sparse.issparse(self.source) else np.concatenate([kept, fresh])
        )


def paged(problem: Problem, stop: Stop, limit: int, seed: np.random.Generator, select: str = "gap") -> Outcome:
    """Minimise by dual descent with at most `limit` bytes of rows in fast memory.

    Args:
        problem: With l2 > 0, no l1, and a loss that has dual steps.
        stop: Rounds and gap.
        limit: Bytes of rows in fast memory.
        seed: Of the order of visits.
        select: "gap"; "random" and "turn" are there to compare with.
    """
    state, memory = Descent(problem, None, seed), FastMemory(problem.rows.matrix, limit)
    n, turn, ask = problem.rows.samples, 0, np.inf
    step, gaps = -(-n // SHARE), np.full(n, np.inf)
    with ThreadPoolExecutor(1) as reader:
        for count in range(1, stop.most + 1):
            memory.hold(memory.best(_worth(select, gaps, seed, count)))
            part = state.part(_rows(memory, problem), memory.chosen)
            others = (np.arange(turn, turn + step)) % n
            turn = (turn + step) % n
            fresh = reader.submit(_gaps, problem, state.w.copy(), state.b, others)
            for _ in range(EPOCHS):
                part.epoch()
            gaps[others] = fresh.result()
            state.take(part, memory.chosen)
            gaps[memory.chosen] = _of(part.problem, part.b, part.problem.rows.margins(part.w))
            if gaps.sum() <= 2 * ask or count == stop.most or count % (2 * SHARE) == 0:
                found = state.certify()
                gaps = _of(problem, state.b, problem.rows.margins(state.w))
                if found.holds(stop.tol) or count == stop.most:
                    return replace(Outcome(state.answer, count, found), moved=tuple(memory.moved))
                ask = next_look(float(gaps.sum()), found, stop.tol)
    raise AssertionError("the last round returns")


def _worth(select: str, gaps: Vector, seed: np.random.Generator, count: int) -> Vector:
    if select == "gap":
        return np.where(np.isinf(gaps), 1e300 * (1 + seed.random(len(gaps))), gaps)
    return seed.random(len(gaps)) if select == "random" else np.roll(np.linspace(1, 0, len(gaps)), count * len(gaps) // SHARE)


def _rows(memory: FastMemory, problem: Problem) -> Rows:
    return Rows(memory.rows, problem.rows.constant, problem.rows.team)


def _gaps(problem: Problem, w: Vector, b: Vector, chosen: Chosen) -> Vector:
    """Gaps of some samples, read from where they are."""
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    pieces = [(first, last)] if first < last else [(first, problem.rows.samples), (0, last)]
    found = []
    for lo, hi in pieces:
        rows = Rows(problem.rows.matrix[lo:hi], problem.rows.constant, Team(1))
        few = replace(problem, rows=rows, y=problem.y[lo:hi], c=problem.c[lo:hi])
        found.append(_of(few, b[lo:hi].copy(), rows.margins(w)))
    return np.concatenate(found)


def _of(problem: Problem, b: Vector, m: Vector) -> Vector:
    out = np.empty(len(b))
    apart(problem.loss, problem.y, m, b, problem.c, problem.e, out)
    return out
