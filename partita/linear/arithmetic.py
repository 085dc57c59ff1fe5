"""exp and log(1 + e) in plain arithmetic, so that the compiler can vectorise the loops that call them.

exp(x)     = 2^k exp(r),  |r| <= ln 2 / 2,  by its Taylor sum
log(1 + e) = 2 artanh(e / (2 + e)),  0 <= e <= 1,  by its series in (e / (2 + e))^2 <= 1/9
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LOG2E = 1.4426950408889634  # 1 / ln 2
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # ln 2 in two parts, the first with 32 zero bits
FLOOR, CEILING = -708.0, 709.0  # the exponents a normal float64 can hold


@intrinsic
def _as_double(_context: Any, bits: Any) -> Any:
    """The float64 with the given bits."""

    def build(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), build


@njit(inline="always", fastmath={"contract", "nsz"}, error_model="numpy")
def exp(x: float) -> float:
    """e^x to about 2e-16, relative; x is clipped to [-708, 709]."""
    x = min(max(x, FLOOR), CEILING)
    k = int(x * LOG2E + 1024.5) - 1024  # rounds to nearest: truncation of a positive number
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    s = 1 / 39916800 + r * (1 / 479001600 + r * (1 / 6227020800))
    s = 1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * s))
    s = 1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * s))
    s = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * s))))
    return s * _as_double((k + 1023) << 52)  # pyright: ignore[reportCallIssue]


@njit(inline="always", fastmath={"contract", "nsz"}, error_model="numpy")
def log1p(e: float) -> float:
    """log(1 + e) for 0 <= e <= 1, to about 2e-16, relative."""
    z = e / (2.0 + e)
    s = z * z
    t = 1 / 29 + s * (1 / 31 + s * (1 / 33))
    t = 1 / 23 + s * (1 / 25 + s * (1 / 27 + s * t))
    t = 1 / 17 + s * (1 / 19 + s * (1 / 21 + s * t))
    t = 1 / 11 + s * (1 / 13 + s * (1 / 15 + s * t))
    t = 1 / 5 + s * (1 / 7 + s * (1 / 9 + s * t))
    return 2.0 * z * (1.0 + s * (1 / 3 + s * t))
