"""A testbed: several hosts on this one machine, each behind a link of its own that is as slow as one asks.

host 0   host 1   host 2         ranks are spread over the hosts in order: with 4 ranks on 2 hosts, 0 and 1 are on host 0
  │ rate   │        │
  └────────┴────────┘            one switch; `rate` limits each link in each direction, `delay` is one way
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from partita.errors import Fault, refuse
from partita.units import format_rate, parse_rate, parse_time

MOST = 64  # hosts: their addresses share one network of 254, and every one costs memory of the kernel
SLOWEST, FASTEST = parse_rate("1 Mbit/s"), parse_rate("100 Gbit/s")
LONGEST = 1.0  # seconds one way; gloo and TCP are made for less
FALLBACK = "loopback"


@dataclass(frozen=True)
class Testbed:
    """Several hosts on this machine.

    Args:
        hosts: How many.
        rate: Bytes per second of each host's link, in each direction.
        delay: Seconds a frame takes from host to host beside that; None adds none.
        fallback: "loopback" runs all ranks on the loopback where hosts cannot be made; None refuses.

    Example:
        >>> Testbed.of(hosts=4, rate="100 Mbit/s").rate
        12500000.0
    """

    __test__: ClassVar[bool] = False  # pytest takes classes named Test... for tests
    name: ClassVar[str] = "testbed"

    hosts: int = 2
    rate: float = parse_rate("1 Gbit/s")
    delay: float | None = None
    fallback: str | None = None

    @classmethod
    def of(cls, **settings: Any) -> "Testbed":
        """From what a plan file says: `rate` and `delay` as text with a unit.

        Raises:
            Refused: With every fault at once.
        """
        found, faults = cls.read(settings)
        refuse(faults)
        return found

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "tuple[Testbed, list[Fault]]":
        """The testbed of a table's keys, and what is wrong with them; a wrong one counts as left out."""
        values, faults = {}, []
        for key, law in _LAWS.items():
            if key in table:
                value, fault = law(key, table[key])
                faults += [fault] if fault else []
                values |= {} if fault else {key: value}
        return cls(**values), faults

    def table(self) -> dict[str, Any]:
        """As a plan file writes it."""
        delay = None if self.delay is None else f"{self.delay * 1e3:.12g} ms"
        rate = f"{self.rate * 8e-6:.12g} Mbit/s"  # digits enough to be read back as they are
        return {"hosts": self.hosts, "rate": rate, "delay": delay, "fallback": self.fallback}

    def per_host(self, ranks: int) -> int:
        """The most ranks on one host."""
        return -(-ranks // self.hosts)

    def host(self, rank: int, ranks: int) -> int:
        """Where a rank lives."""
        return rank // self.per_host(ranks)

    def __str__(self) -> str:
        delay = f", {self.delay * 1e3:g} ms one way" if self.delay else ""
        return f"{self.name} of {self.hosts} hosts at {format_rate(self.rate)}{delay}"


Where = str | Testbed  # how a plan names its cluster
KEYS = ("hosts", "rate", "delay", "fallback")
Read = tuple[Any, Fault | None]


def _hosts(key: str, given: Any) -> Read:
    law = f"a testbed has 1 to {MOST} hosts"
    if not isinstance(given, int) or isinstance(given, bool):
        return None, Fault("P102", f"{key} = {given!r} is not an integer", law=law, cure="4", at=f"cluster.{key}")
    if not 1 <= given <= MOST:
        return None, Fault(
            "P112", f"{key} = {given} is out of range", f"{key} = {given}", law, f"1 to {MOST}", f"cluster.{key}"
        )
    return given, None


def _measured(parse: Callable[[str], float], low: float, high: float, law: str, cure: str) -> Callable[[str, Any], Read]:
    def read(key: str, given: Any) -> Read:
        at = f"cluster.{key}"
        if not isinstance(given, str):
            return None, Fault("P102", f"{key} = {given!r} has no unit", law=law, cure=cure, at=at)
        try:
            value = parse(given)
        except ValueError as bad:
            return None, Fault("P112", f"{key} = {given!r} cannot be read", str(bad), law, cure, at)
        if not low <= value <= high:
            return None, Fault("P112", f"{key} = {given!r} is out of range", f"{key} = {given}", law, cure, at)
        return value, None

    return read


def _fallback(key: str, given: Any) -> Read:
    if given == FALLBACK:
        return given, None
    law = "what may stand in for hosts that cannot be made"
    cure = f'"{FALLBACK}", or leave the key out'
    return None, Fault("P107", f"unknown {key} {given!r}", f"{key} = {given!r}", law, cure, f"cluster.{key}")


_LAWS: dict[str, Callable[[str, Any], Read]] = {
    "hosts": _hosts,
    "rate": _measured(parse_rate, SLOWEST, FASTEST, "a rate is text: 1 Mbit/s to 100 Gbit/s", '"100 Mbit/s"'),
    "delay": _measured(parse_time, 0.0, LONGEST, "a delay is text: one way, up to 1 s", '"5 ms", or leave the key out'),
    "fallback": _fallback,
}
