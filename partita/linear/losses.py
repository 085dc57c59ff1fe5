"""The losses f(y, m) of a margin m, their conjugates and their coordinate steps, compiled.

A loss is a number so that one compiled kernel serves them all. b is a signed dual variable, optimal at b = -c f'(m); c is the
weight of the sample:

    name             f(m)                          c f*(-b / c)
    squared          (y - m)^2 / 2                 b^2 / 2c - b y
    logistic         log(1 + exp(-y m))            c (a log a + (1 - a) log(1 - a)),  a = b y / c in [0, 1]
    poisson          exp(m) - y m                  c (t log t - t),  t = y - b / c >= 0
    hinge            max(0, 1 - y m)               -b y,  b y / c in [0, 1]
    squared_hinge    max(0, 1 - y m)^2             b^2 / 4c - b y,  b y >= 0
    epsilon          max(0, |y - m| - e)           e |b| - b y,  |b| <= c
    squared_epsilon  max(0, |y - m| - e)^2         b^2 / 4c + e |b| - b y

The two with a kink are softened by a width h > 0 where a second derivative is needed: max(0, x) becomes h log(1 + exp(x / h)).
"""

from typing import Any

import numpy as np
from numba import njit

from partita.linear.arithmetic import exp, log1p

SQUARED, LOGISTIC, POISSON, HINGE, SQUARED_HINGE, EPSILON, SQUARED_EPSILON = range(7)
OPTIONS = {"fastmath": {"contract", "nsz", "reassoc", "arcp"}, "cache": True, "nogil": True, "error_model": "numpy"}
FAR = 50.0  # widths of a softened kink from which it does not count: exp(-50) is far below rounding
TINY = 1e-300  # keeps a logarithm finite; no sum sees it


@njit(inline="always", **OPTIONS)
def _soft_plus(x: float, h: float) -> float:
    if h <= 0:
        return max(x, 0.0)
    return max(x, 0.0) + h * log1p(exp(-min(abs(x) / h, FAR)))


@njit(inline="always", **OPTIONS)
def _sigmoid(x: float) -> float:
    e = exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


@njit(inline="always", **OPTIONS)
def _step(x: float, h: float) -> float:
    if h <= 0:
        return 1.0 if x > 0 else 0.0
    return _sigmoid(x / h)


@njit(inline="always", **OPTIONS)
def _bump(x: float, h: float) -> float:
    z = abs(x) / h
    e = exp(-min(z, FAR))
    return e / ((1.0 + e) * (1.0 + e) * h) if z < FAR else 0.0


@njit(inline="always", **OPTIONS)
def value(loss: int, y: float, m: float, e: float, h: float) -> float:
    """f(m)."""
    if loss == SQUARED:
        return 0.5 * (y - m) * (y - m)
    if loss == LOGISTIC:
        return _soft_plus(-y * m, 1.0)
    if loss == POISSON:
        return exp(m) - y * m
    if loss == HINGE:
        return _soft_plus(1 - y * m, h)
    if loss == SQUARED_HINGE:
        return max(0.0, 1 - y * m) ** 2
    if loss == EPSILON:
        return _soft_plus(y - m - e, h) + _soft_plus(m - y - e, h)
    return max(0.0, abs(y - m) - e) ** 2


@njit(inline="always", **OPTIONS)
def slope(loss: int, y: float, m: float, e: float, h: float) -> float:
    """f'(m)."""
    if loss == SQUARED:
        return m - y
    if loss == LOGISTIC:
        return -y * _sigmoid(-y * m)
    if loss == POISSON:
        return exp(m) - y
    if loss == HINGE:
        return -y * _step(1 - y * m, h)
    if loss == SQUARED_HINGE:
        return -2 * y * max(0.0, 1 - y * m)
    if loss == EPSILON:
        return _step(m - y - e, h) - _step(y - m - e, h)
    return 2 * (max(0.0, m - y - e) - max(0.0, y - m - e))


@njit(inline="always", **OPTIONS)
def curvature(loss: int, y: float, m: float, e: float, h: float) -> float:
    """f''(m), of the softened loss where there is a kink."""
    if loss == SQUARED:
        return 1.0
    if loss == LOGISTIC:
        return _bump(y * m, 1.0)
    if loss == POISSON:
        return exp(m)
    if loss == HINGE:
        return _bump(1 - y * m, h)
    if loss == SQUARED_HINGE:
        return 2.0 if y * m < 1 else 0.0
    if loss == EPSILON:
        return _bump(m - y - e, h) + _bump(y - m - e, h)
    return 2.0 if abs(y - m) > e else 0.0


@njit(inline="always", **OPTIONS)
def _entropy(a: float) -> float:
    """A log a, and 0 at 0."""
    return a * np.log(max(a, TINY))


@njit(inline="always", **OPTIONS)
def conjugate(loss: int, y: float, b: float, c: float, e: float) -> float:
    """C f*(-b / c), for a feasible b."""
    if loss == SQUARED:
        return b * b / (2 * c) - b * y
    if loss == LOGISTIC:
        a = min(max(b * y / c, 0.0), 1.0)
        return c * (_entropy(a) + _entropy(1 - a))
    if loss == POISSON:
        t = max(y - b / c, 0.0)
        return c * (_entropy(t) - t)
    if loss == HINGE:
        return -b * y
    if loss == SQUARED_HINGE:
        return b * b / (4 * c) - b * y
    if loss == EPSILON:
        return e * abs(b) - b * y
    return b * b / (4 * c) + e * abs(b) - b * y


@njit(inline="always", **OPTIONS)
def soften(x: float, by: float) -> float:
    """Soft threshold."""
    return max(x - by, 0.0) + min(x + by, 0.0)


@njit(inline="always", **OPTIONS)
def _logistic_step(m: float, a: float, q: float) -> float:
    """The a with a = sigmoid(s), s + m + q (a - a_old) = 0: Newton in s, inside a bracket that every step narrows.

    The start is the s of the present margin, which is the answer at the optimum.
    """
    s, low, high = -m, -m - q * (1 - a), -m + q * a
    for _ in range(50):
        z = _sigmoid(s)
        g = s + m + q * (z - a)
        if g > 0:
            high = s
        else:
            low = s
        move = g / (1 + q * z * (1 - z))
        s -= move
        if s < low or s > high:
            s = 0.5 * (low + high)
        elif abs(move) < 1e-4:  # Newton is quadratic: what is left is about 1e-9
            break
    return _sigmoid(s)


@njit(inline="always", **OPTIONS)
def dual_step(loss: int, y: float, m: float, b: float, c: float, q: float, e: float) -> float:
    """The new dual variable of a sample with margin m, whose margin moves by q times the change."""
    if loss == SQUARED:
        return c * (y - m + q * b) / (1 + c * q)
    if loss == LOGISTIC:
        return c * y * _logistic_step(y * m, b * y / c, q * c)
    if loss == HINGE:
        return y * min(max(b * y + (1 - y * m) / q, 0.0), c)
    if loss == SQUARED_HINGE:
        return y * max(0.0, 2 * c * (1 - y * m + q * b * y) / (1 + 2 * c * q))
    if loss == EPSILON:
        return min(max(soften(b + (y - m) / q, e / q), -c), c)
    return soften(q * b + y - m, e) / (q + 1 / (2 * c))


@njit(**OPTIONS)
def loss_sum(loss: int, y: Any, m: Any, c: Any, e: float, h: float) -> float:
    """Sum of c f(y, m)."""
    total = 0.0
    for i in range(y.shape[0]):
        total += c[i] * value(loss, y[i], m[i], e, h)
    return total


@njit(**OPTIONS)
def loss_along(loss: int, y: Any, m: Any, t: Any, by: float, c: Any, e: float, h: float) -> float:
    """Sum of c f(y, m + by t)."""
    total = 0.0
    for i in range(y.shape[0]):
        total += c[i] * value(loss, y[i], m[i] + by * t[i], e, h)
    return total


@njit(**OPTIONS)
def slopes(loss: int, y: Any, m: Any, c: Any, e: float, h: float, out: Any) -> float:
    """The dual variables b = -c f'(m), and their sum."""
    total = 0.0
    for i in range(y.shape[0]):
        out[i] = -c[i] * slope(loss, y[i], m[i], e, h)
        total += out[i]
    return total


@njit(**OPTIONS)
def curvatures(loss: int, y: Any, m: Any, c: Any, e: float, h: float, out: Any) -> float:
    """C f''(m), and their sum."""
    total = 0.0
    for i in range(y.shape[0]):
        out[i] = c[i] * curvature(loss, y[i], m[i], e, h)
        total += out[i]
    return total


@njit(**OPTIONS)
def conjugate_sum(loss: int, y: Any, b: Any, c: Any, e: float) -> float:
    """Sum of c f*(-b / c) over the samples that count."""
    total = 0.0
    for i in range(y.shape[0]):
        if c[i] > 0:
            total += conjugate(loss, y[i], b[i], c[i], e)
    return total


@njit(**OPTIONS)
def apart(loss: int, y: Any, m: Any, b: Any, c: Any, e: float, out: Any) -> float:
    """How far each sample is from its dual variable, c f(m) + c f*(-b / c) + b m >= 0, and the sum."""
    total = 0.0
    for i in range(y.shape[0]):
        out[i] = 0.0
        if c[i] > 0:
            out[i] = max(0.0, c[i] * value(loss, y[i], m[i], e, 0.0) + conjugate(loss, y[i], b[i], c[i], e) + b[i] * m[i])
            total += out[i]
    return total
