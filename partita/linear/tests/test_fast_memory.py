"""A working set chosen by gap in fast memory: the optimum stays, the limit holds, chance and turn are beaten."""

import numpy as np
import pytest
from scipy import sparse

from partita.linear import LinearSVC, LogisticRegression
from partita.linear.fast_memory import FastMemory, paged
from partita.linear.losses import HINGE
from partita.linear.problem import Problem
from partita.linear.rows import Rows, Team
from partita.linear.stopping import Stop

RANDOM = np.random.default_rng(0)
WORDS = np.minimum(1500 * RANDOM.random(60_000) ** 3, 1499).astype(int)  # a text's: few are common
X = sparse.csr_array((RANDOM.lognormal(0, 0.6, 60_000), (np.repeat(np.arange(2000), 30), WORDS)), shape=(2000, 1500))
X.sum_duplicates()
X = sparse.csr_array(sparse.diags_array(1 / np.sqrt(X.multiply(X).sum(1))) @ X)
Y = np.where(4 * X @ RANDOM.normal(size=1500) + RANDOM.normal(size=2000) > 0, 1.0, -1.0)
BYTES = X.nnz * 12


def fit(select, limit):
    with Team(1) as team:
        problem = Problem(Rows(X, 1.0, team), Y, np.ones(2000), HINGE, l2=1.0, penalised=True)
        return paged(problem, Stop(1e-4, 150), limit, np.random.default_rng(0), select)


@pytest.mark.law
def test_rounds_and_bytes_by_selection():
    found = {select: fit(select, BYTES // 4) for select in ("gap", "random", "turn")}
    gap = found["gap"]
    assert gap.certificate.relative <= 1e-4
    assert all(gap.rounds < found[other].rounds for other in ("random", "turn"))
    assert all(sum(gap.moved) < sum(found[other].moved) / 2 for other in ("random", "turn"))
    assert gap.moved[-1] < gap.moved[0] / 2  # what is moved falls
    assert max(gap.moved) <= BYTES // 4


@pytest.mark.law
@pytest.mark.parametrize("form", ["csr", "dense"])
@pytest.mark.parametrize("make", [LogisticRegression, LinearSVC])
def test_the_optimum_is_the_same(make, form):
    data = X if form == "csr" else X.toarray()
    limit = (BYTES if form == "csr" else data.nbytes) // 3
    limited = make(tol=1e-7, memory_limit=limit, max_iter=1000).fit(data, Y)
    assert np.allclose(limited.coef_, make(tol=1e-9).fit(data, Y).coef_, atol=2e-3)
    assert limited.solver_.startswith("dual")


def test_only_what_is_new_is_moved():
    memory = FastMemory(X, BYTES)
    memory.hold(np.arange(0, 100))
    memory.hold(np.arange(50, 150))
    sizes = memory.sizes
    assert memory.moved == [sizes[:100].sum(), sizes[100:150].sum()]
    assert np.array_equal(memory.rows.toarray(), X[memory.chosen].toarray())
