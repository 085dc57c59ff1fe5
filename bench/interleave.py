"""Times contestants one after another in the same ranks: the ratio is theirs, not the machine's."""

import time
from collections.abc import Callable, Mapping

from partita.runtime.net import Net

WARM = 5


def interleaved(net: Net, contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every contestant; the order turns round by round, and ranks start together."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + WARM):
        for name in names if number % 2 else reversed(names):
            net.barrier()
            began = time.perf_counter()
            contestants[name]()
            if number >= WARM:
                found[name].append(time.perf_counter() - began)
    return found


def p10(seconds: list[float]) -> float:
    """The 10th percentile."""
    return sorted(seconds)[len(seconds) // 10]


def slowest(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """p10 of the slowest rank, by contestant."""
    return {name: max(p10(rank[name]) for rank in ranks) for name in ranks[0]}
