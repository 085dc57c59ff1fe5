"""What a cluster is made of: sourced numbers, measured tables, links."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.cluster.testbed import Where


@dataclass(frozen=True, slots=True)
class Number:
    """A value with the place it comes from."""

    value: float
    source: str = "the user's cluster file"
    date: str = ""

    @property
    def cited(self) -> str:
        return f"{self.source} ({self.date})" if self.date else self.source


@dataclass(frozen=True, slots=True)
class Curve:
    """y over x through measured points, straight between them: a fixed cost and a rate between any two.

    Args:
        xs: Ascending, positive.
        ys: Positive.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        """Interpolated y; below the first point its y, beyond the last one in proportion to x."""
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1] * x / xs[-1]
        at = bisect_right(xs, x)
        return ys[at - 1] + (ys[at] - ys[at - 1]) * (x - xs[at - 1]) / (xs[at] - xs[at - 1])


@dataclass(frozen=True, slots=True)
class Product:
    """One measured matrix product (m, k) @ (k, n), `count` of them in a batch; a convolution is the product it amounts to."""

    dtype: str
    count: int
    m: int
    n: int
    k: int
    seconds: float
    op: str = "mm"

    @property
    def rate(self) -> float:
        """Flop per second."""
        return 2.0 * self.count * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Measured:
    """What a probe found on the machine itself.

    Args:
        ops: (op or class, dtype) -> seconds over bytes moved.
        products: Matrix products.
        collectives: (op, ranks) -> seconds over bytes of the large side.
        residuals: Class -> median of |predicted / measured - 1| over the entries kept out of the fit.
    """

    ops: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    products: tuple[Product, ...] = ()
    collectives: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    residuals: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A tier of the network: seconds to start a call, seconds a step, bytes per second of one device in one direction."""

    tier: str
    start: float
    latency: float
    bandwidth: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Args:
        name: As the user wrote it.
        nodes, per_node: Nodes, and devices of each.
        backend: "gloo" or "nccl".
        numbers: Dotted key -> number: device.*, links.node.*, links.network.*, band.*, interference.*, oversubscription.
        shared: The ranks of a node share its cores and its memory.
        open_ended: Any number of ranks is legal.
        cores: Of a node, where they are not as many as its devices.
        measured: A probe's tables; they override formulas.
        notes: What a reader should know.
    """

    name: Where
    nodes: int
    per_node: int
    backend: str
    numbers: Mapping[str, Number]
    shared: bool = False
    open_ended: bool = False
    cores: float | None = None
    measured: Measured = field(default_factory=Measured)
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def value(self, key: str) -> float:
        """The number at a dotted key.

        Raises:
            KeyError: If the cluster has no such number.
        """
        return self.numbers[key].value

    def source(self, key: str) -> str:
        return self.numbers[key].cited

    @property
    def kernel(self) -> float:
        """Bytes a rank keeps for every shape of a product of half types: what its library compiles for it; 0 on a GPU."""
        found = self.numbers.get("device.kernel")
        return found.value if found else 0.0

    def flop_per_second(self, dtype: str) -> float:
        """Dense peak of one device; float32's for a dtype that is not listed."""
        found = self.numbers.get(f"device.flop.{dtype}") or self.numbers["device.flop.float32"]
        return found.value

    def link(self, tier: str) -> Link:
        """The link inside a node ("node") or between nodes ("network")."""
        at = f"links.{tier}."
        bandwidth = self.value(at + "bandwidth") * self.value(at + "efficiency")
        if tier == "network":
            bandwidth /= self.value("oversubscription")
        return Link(tier, self.value(at + "start"), self.value(at + "latency"), bandwidth, self.source(at + "bandwidth"))

    def room(self, ranks: int) -> float:
        """Bytes one of `ranks` may use for tensors."""
        share = max(1, -(-ranks // self.nodes)) if self.shared else 1
        return self.value("device.memory") / share - self.value("device.reserve")
