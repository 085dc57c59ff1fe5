"""Sums in block floating point: within the stated bound, never over the edge, the same in every order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.program.switched import BLOCK, packets_of, words_of
from partita.runtime.switch.blocks import (
    NotFinite,
    bits_of,
    blocks_of,
    exponents_of,
    from_words,
    to_words,
)


def summed(vectors, words):
    rows = [blocks_of(v) for v in vectors]
    exponents = np.maximum.reduce([exponents_of(r) for r in rows])
    whole = sum(to_words(r, exponents, len(rows), words).astype(np.int64) for r in rows)
    assert np.abs(whole).max() <= 1 << 30
    return from_words(whole.astype(np.int32), exponents, len(rows), words).reshape(-1)[: len(vectors[0])], exponents


@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 32), spread=st.integers(0, 60), words=st.sampled_from([1, 2]))
def test_the_error_stays_within_its_bound(seed, workers, spread, words):
    draw = np.random.default_rng(seed)
    vectors = [draw.normal(size=300) * 2.0 ** draw.integers(-spread, spread + 1, 300) for _ in range(workers)]
    got, exponents = summed(vectors, words)
    bound = workers / 2 * 2.0 ** (exponents - words * bits_of(workers))
    true = np.sum(np.array(vectors, np.longdouble), axis=0)
    assert (np.abs(got - true) <= np.repeat(bound, BLOCK)[:300] + np.spacing(np.abs(got))).all()


def test_zeros_and_the_smallest_and_largest_numbers():
    for x in (0.0, 5e-324, 1e-310, 1.7e308):
        got, _ = summed([np.full(3, x), np.zeros(3)], 2)
        np.testing.assert_allclose(got, x, rtol=1e-15)


def test_what_is_not_finite_is_named():
    with pytest.raises(NotFinite) as bad:
        blocks_of(np.array([1.0, 2.0, np.nan]))
    assert bad.value.at == 2


def test_packets_are_counted():
    assert [packets_of(n, 4) for n in (1, 256, 257, 65536, 65537)] == [2, 2, 3, 257, 259]
    assert packets_of(257, 8) == 5
    assert [words_of(w) for w in (2, 4, 8)] == [1, 1, 2]
