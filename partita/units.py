"""Human units, at the border only: parses "80 GiB", "100 Mbit/s" and "5 ms", prints 12.3 ms.

Inside the library every quantity is SI: seconds, bytes, flop, joules. GiB (2^30) and GB (10^9) are never confused.
"""

import re
from collections.abc import Mapping

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES = _DECIMAL | _BINARY
_RATES = {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes(text: str | int) -> int:
    """Bytes in "70 GiB", "25MB" or a plain integer.

    Raises:
        ValueError: If the text is no size; the message lists the units.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)?\s*", text)
    if not match or (match[2] or "B") not in _BYTES:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(_BYTES)}")
    return round(float(match[1]) * _BYTES[match[2] or "B"])


def _measure(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)\s*", text)
    if not match or match[2] not in units:
        raise ValueError(f"{text!r} is no {what}: write a number and one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def parse_rate(text: str) -> float:
    """Bytes per second in "100 Mbit/s".

    Raises:
        ValueError: If the text is no rate; the message lists the units.
    """
    return _measure(text, _RATES, "rate") / 8


def parse_time(text: str) -> float:
    """Seconds in "5 ms".

    Raises:
        ValueError: If the text is no time; the message lists the units.
    """
    return _measure(text, _TIMES, "time")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    if value != value:  # NaN
        return "nan"
    for factor, unit in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:.3g} {unit}"


def format_bytes(size: float) -> str:
    """`size` bytes in binary units: 1536 -> "1.5 KiB"."""
    return _scaled(size, ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")))


def format_rate(rate: float) -> str:
    """`rate` in bytes per second as a network's: 12.5e6 -> "100 Mbit/s"."""
    return _scaled(8 * rate, tuple((factor, unit) for unit, factor in reversed(_RATES.items())))


def format_time(seconds: float) -> str:
    """`seconds` with a fitting unit: 0.0123 -> "12.3 ms"."""
    return _scaled(seconds, ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_count(value: float) -> str:
    """`value` with a decimal prefix: 1.2e12 -> "1.2 T"."""
    return _scaled(value, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))).rstrip()
