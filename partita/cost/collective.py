"""Time and bytes of a collective.

n bytes on the large side, p ranks, latency a of a step, bandwidth B of one rank (of the slowest link that the ring crosses):

    ring all-reduce                       2 (p-1) a + 2 (p-1)/p n/B
    all-gather, reduce-scatter, all-to-all  (p-1) a +   (p-1)/p n/B
    tree all-reduce, pipelined        2 log2(p) a + 2 n/B
    halving and doubling all-reduce   2 log2(p) a + 2 (p-1)/p n/B
    hierarchical all-reduce           reduce-scatter inside g, all-reduce of n/g across, all-gather inside

Sources: Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002 (ring); Thakur, Rabenseifner & Gropp 2005,
doi:10.1177/1094342005051521 (halving and doubling, all-gather). The time of a call is the least over what the backend has.

Bytes are counted three ways and never merged: algorithmic (the large side, backend-free), backend (what the backend sends for
it, below), and wire (measured on sockets elsewhere).
"""

from dataclasses import dataclass
from math import ceil, log2

from partita.cluster import Cluster, Curve, Link
from partita.mesh import Mesh
from partita.program.switched import BLOCK, OPS, PACKET, WINDOW, blocks_in, packets_of, words_of

SEGMENT = 1 << 20  # bytes of a segment of gloo's ring; counted on its sockets at 2, 3 and 4 ranks, 16 B to 64 MiB, torch 2.13
FRAME = (
    144  # bytes of the three 48 B headers that go with one message of gloo (ready to send, ready to receive, data); as above
)
MESSAGES = ("send", "receive")  # between two ranks of an axis


# ---- closed forms: seconds


def ring_all_reduce(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Time of a ring all-reduce of `size` bytes.

    Example:
        >>> ring_all_reduce(8, 2, 0.0, 1.0)
        8.0
    """
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def gather_ring(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Time of an all-gather, reduce-scatter or all-to-all whose large side has `size` bytes."""
    return (ranks - 1) * (latency + size / ranks / bandwidth)


def tree_all_reduce(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Time of a pipelined tree all-reduce of `size` bytes."""
    return 2 * log2(ranks) * latency + (2 * size / bandwidth if ranks > 1 else 0.0)


def halving_doubling(size: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Time of an all-reduce by recursive halving and doubling."""
    return 2 * log2(ranks) * latency + 2 * (ranks - 1) / ranks * size / bandwidth


def hierarchical(size: float, inside: int, across: int, inner: Link, outer: Link) -> float:
    """Time of an all-reduce over `across` nodes with `inside` ranks each: scatter inside, reduce across, gather inside."""
    local = 2 * gather_ring(size, inside, inner.latency, inner.bandwidth)
    return local + ring_all_reduce(size / inside, across, outer.latency, outer.bandwidth)


# ---- bytes


def algorithmic(op: str, size: float, ranks: int) -> float:
    """Bytes a rank must send at least, in the bandwidth-optimal form of `op`; what is received is the sender's."""
    if op in MESSAGES:
        return size if op == "send" else 0.0
    if op == "switch_reduce":
        return size
    return size * (ranks - 1) / ranks * (2 if op in ("all_reduce", "block_reduce") else 1)


def backend_bytes(backend: str, op: str, size: int, ranks: int, width: int = 4) -> float:
    """Bytes a rank sends (a mean over the group) when `backend` carries `op`.

    gloo's reduce-scatter sends what its all-reduce sends, and each message carries 144 bytes of headers. Its ring cuts the
    payload into segments of at most 1 MiB, at least two a rank, their number a multiple of the ranks.

    Args:
        backend: "gloo" or "nccl".
        op: As in `Collective`.
        size: Bytes of the large side.
        ranks: In the group.
        width: Bytes of an element.
    """
    if ranks == 1 or not size:
        return 0.0
    if backend != "gloo":
        return algorithmic(op, size, ranks)
    if op in OPS:
        return _switched_bytes(op, size // width, ranks, width)
    if op in MESSAGES:
        sent, messages = algorithmic(op, size, ranks), 1 if op == "send" else 0
    elif op in ("all_reduce", "reduce_scatter"):
        sent, messages = algorithmic("all_reduce", size, ranks), 2 * (ranks - 1) / ranks * ring_segments(size, ranks, width)
    else:
        steps = {"all_gather": 2 * (ranks - 1), "all_to_all": ranks - 1, "broadcast": (ranks - 1) / ranks}
        sent, messages = algorithmic(op, size, ranks), steps[op]
    return sent + messages * FRAME


def _switched_bytes(op: str, count: int, ranks: int, width: int) -> float:
    """Of a sum in block floating point: packets through a switch, or the ring's bytes for as many whole numbers."""
    if op == "switch_reduce":
        return packets_of(count, width) * PACKET
    blocks = blocks_in(count)
    return sum(backend_bytes("gloo", "all_reduce", 4 * n, ranks) for n in (blocks, words_of(width) * blocks * BLOCK))


def ring_segments(size: int, ranks: int, width: int) -> int:
    """Segments that gloo's ring really sends (those past the end of a tiny payload are empty)."""
    elements = max(1, size // width)
    segments = ceil(max(ceil(size / SEGMENT), 2 * ranks) / ranks) * ranks
    return ceil(elements / ceil(elements / segments))


# ---- routes: which links an axis uses


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one axis's ring: `inside` ranks in a node, over `across` nodes.

    Args:
        size: Ranks of a group.
        inner, outer: The link inside a node, and between nodes (None if no group leaves its node).
        bandwidth: Bytes per second of a ring over the whole group: the least of what it crosses.
        crowd: Ranks that share a core.
    """

    axis: str
    size: int
    inside: int
    across: int
    inner: Link
    outer: Link | None
    bandwidth: float
    crowd: float

    @property
    def slowest(self) -> Link:
        return self.outer or self.inner


def route_of(axis: str, mesh: Mesh, cluster: Cluster) -> Route:
    """The route of `axis`: ranks are laid out node by node, so outer axes meet the slower link."""
    inner = cluster.link("node")
    group = mesh.group(axis, 0) if axis in mesh.names else (0,)
    nodes = len({rank // cluster.per_node for rank in group}) if cluster.nodes > 1 else 1
    inside = ceil(len(group) / nodes)
    crowd = crowding(mesh.ranks, cluster)
    if nodes == 1:
        return Route(axis, len(group), inside, 1, inner, None, inner.bandwidth, crowd)
    outer = cluster.link("network")
    return Route(axis, len(group), inside, nodes, inner, outer, min(inner.bandwidth, inside * outer.bandwidth), crowd)


def crowding(ranks: int, cluster: Cluster) -> float:
    """Ranks per core of a node, at least 1; 1 where each rank has its own device."""
    return max(1.0, -(-ranks // cluster.nodes) / (cluster.cores or cluster.per_node)) if cluster.shared else 1.0


# ---- time


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds of one call, and how they were found."""

    seconds: float
    algorithm: str
    source: str


def charge(op: str, size: float, route: Route, cluster: Cluster) -> Charge:
    """Time of one call of `op` with `size` bytes on the large side."""
    if route.size == 1 or not size or op == "receive":
        return Charge(0.0, "none", "")
    measured = _measured(op, size, route, cluster)
    if measured is not None:
        return Charge(measured, "measured", cluster.measured.source)
    link = route.slowest
    algorithms = _gloo(op, size, route, cluster) if cluster.backend == "gloo" else _nccl(op, size, route)
    algorithm = min(algorithms, key=lambda name: algorithms[name])
    return Charge(link.start * route.crowd + algorithms[algorithm], algorithm, link.source)


def _gloo(op: str, size: float, route: Route, cluster: Cluster) -> dict[str, float]:
    """Crowded ranks take longer over each step and, inside a node, over each byte: what waits for a cable needs no core."""
    if op == "switch_reduce":
        return {"switch": _through_a_switch(size, route, cluster)}
    sent = backend_bytes("gloo", op, int(size), route.size)
    latency, bandwidth = route.slowest.latency * route.crowd, route.bandwidth / (1 if route.outer else route.crowd)
    steps = (route.size - 1) * (2 if op in ("all_reduce", "reduce_scatter", "block_reduce") else 1)
    if op == "send":
        return {"message": latency + sent / bandwidth}
    return {"ring": steps * latency + sent / bandwidth}


def _through_a_switch(size: float, route: Route, cluster: Cluster) -> float:
    """Two round trips, exponents and words, and what takes longest: the link, the window, or the ranks' handling of packets."""
    link, trip = route.slowest, 2 * route.slowest.latency * route.crowd
    packets = packets_of(int(size) // 4, 4)
    handled = cluster.numbers.get("switch.packet")
    each = handled.value * route.crowd if handled else 0.0
    return 2 * trip + packets * max(PACKET / link.bandwidth, trip / WINDOW, each)


def _nccl(op: str, size: float, route: Route) -> dict[str, float]:
    if op == "send":
        return {"message": route.slowest.latency + size / route.slowest.bandwidth}
    rounds = 2 if op == "all_reduce" else 1
    hops = rounds * (route.across - 1)
    latency = hops * route.slowest.latency + (rounds * (route.size - 1) - hops) * route.inner.latency
    found = {"ring": latency + algorithmic(op, size, route.size) / route.bandwidth}
    if op == "all_reduce":
        depth = 2 * ((route.inside - 1) * route.inner.latency + log2(route.across) * route.slowest.latency)
        found["tree"] = depth + 2 * size / route.bandwidth
        if route.outer and route.inside > 1:
            found["hierarchical"] = hierarchical(size, route.inside, route.across, route.inner, route.outer)
    return found


def _measured(op: str, size: float, route: Route, cluster: Cluster) -> float | None:
    """A probe's time for this call; another group size is scaled by steps (small sizes) and bytes sent (large ones)."""
    curves = {ranks: curve for (name, ranks), curve in cluster.measured.collectives.items() if name == op}
    if not curves or route.across > 1:
        return None
    nearest = min(curves, key=lambda ranks: abs(log2(ranks / route.size)))
    crowd = route.crowd / max(1.0, nearest / cluster.per_node)  # its own crowd is in the measurement
    return crowd * _scaled(op, size, nearest, route.size, curves[nearest])


def _scaled(op: str, size: float, have: int, want: int, curve: Curve) -> float:
    if have == want:
        return curve(size)
    floor = curve.ys[0]
    more = algorithmic(op, 1.0, want) / algorithmic(op, 1.0, have)
    return floor * (want - 1) / (have - 1) + max(0.0, curve(size) - floor) * more
