"""Buckets: every parameter once, in reverse order, periodic over blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.program.buckets import FLOOR, LIMIT, block_of, cut_buckets

parameters = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 1 << 24), st.sampled_from(["float32", "bfloat16"])), max_size=30
)


@pytest.mark.law
@given(parameters)
def test_every_parameter_is_in_one_bucket_of_one_dtype(found):
    entries = [
        (f"blocks.{block}.w{i}", size, dtype) for i, (block, size, dtype) in enumerate(sorted(found, key=lambda f: f[0]))
    ]
    kinds = {name: dtype for name, _, dtype in entries}
    buckets = cut_buckets(entries)
    assert [n for b in buckets for n in b] == [n for n, _, _ in reversed(entries)]
    assert all(b and len({kinds[n] for n in b}) == 1 for b in buckets)


@pytest.mark.law
def test_blocks_above_the_floor_give_the_same_buckets_each():
    block = [("up", FLOOR), ("down", LIMIT), ("bias", 8)]
    entries = [("embed", 10, "f"), *((f"blocks.{i}.{n}", s, "f") for i in range(5) for n, s in block), ("head", 10, "f")]
    shapes = [[n.split(".")[-1] for n in b] for b in cut_buckets(entries) if block_of(b[0])]
    assert shapes == [["up"], *[["bias", "down"], ["up"]] * 4]  # the head shares the last block's first bucket


@pytest.mark.case
def test_small_blocks_share_a_bucket():
    entries = [(f"blocks.{i}.w", FLOOR // 4, "f") for i in range(8)]
    assert [len(b) for b in cut_buckets(entries)] == [4, 4]
