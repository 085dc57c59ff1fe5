"""Floats as whole numbers that a switch can add: block floating point, with a scale that the workers agree on for each block.

    x in a block of 256, of N workers     e = the largest exponent in any worker's block: |x| < 2^e
    q = round(x 2^(b - e)), b = 30 - log2 N rounded up: |sum of q| <= 2^30, so no sum can overflow
    float64 takes a second word for what the first one rounded away

    |sum - true sum| <= N/2 2^(e - b)      of one word; of two, N/2 2^(e - 2b)

A sum of whole numbers is the same in whatever order it is made.

Source: Sapio et al. 2021, SwitchML, NSDI, section 3.7 (quantised sums with a block's exponent).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from partita.program.switched import BLOCK, blocks_in, words_of
from partita.runtime.switch.protocol import Lanes

ZERO = -(1 << 20)  # exponent of a block of zeros: below every float's


class NotFinite(ValueError):
    """A value to be summed is NaN or infinite; `at` is where."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__(f"value {at} is {value}")
        self.at, self.value = at, value


def bits_of(workers: int) -> int:
    """Bits of a word that one worker may use."""
    return 30 - (workers - 1).bit_length()


def blocks_of(values: NDArray) -> NDArray:
    """As rows of whole blocks, in float64, with zeros at the end.

    Raises:
        NotFinite: If a value is none.
    """
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NotFinite(at, float(values[at]))
    rows = np.zeros((blocks_in(len(values)), BLOCK))
    rows.reshape(-1)[: len(values)] = values
    return rows


def exponents_of(rows: NDArray) -> Lanes:
    """Of each row, the least e with all |x| < 2^e."""
    most = np.abs(rows).max(axis=1, initial=0.0)
    return np.where(most > 0, np.frexp(most)[1], ZERO).astype(np.int32)


def to_words(rows: NDArray, exponents: Lanes, workers: int, words: int) -> Lanes:
    """Whole numbers: (words x rows, lanes), most significant word first."""
    bits = bits_of(workers)
    scaled = np.ldexp(rows, (bits - exponents)[:, None])
    high = np.rint(scaled)
    if words == 1:
        return high.astype(np.int32)
    return np.concatenate([high, np.rint(np.ldexp(scaled - high, bits))]).astype(np.int32)


def from_words(sums: Lanes, exponents: Lanes, workers: int, words: int) -> NDArray:
    """The floats of summed words, in float64."""
    bits = bits_of(workers)
    parts = sums.astype(np.float64).reshape(words, len(exponents), -1)
    value = parts[0] if words == 1 else parts[0] + np.ldexp(parts[1], -bits)
    return np.ldexp(value, (exponents - bits)[:, None])


def in_blocks(values: NDArray, workers: int, maxima: Callable[[Lanes], Lanes], sums: Callable[[Lanes], Lanes]) -> NDArray:
    """Sums of floats over the workers, in their own dtype, out of maxima and sums of whole numbers over them.

    Raises:
        NotFinite: If a value is none.
    """
    rows = blocks_of(values)
    agreed = maxima(exponents_of(rows))
    words = words_of(values.dtype.itemsize)
    whole = from_words(sums(to_words(rows, agreed, workers, words)), agreed, workers, words)
    return whole.reshape(-1)[: len(values)].astype(values.dtype)
