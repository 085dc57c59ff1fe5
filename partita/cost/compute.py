"""Time of one op on one device: a roofline with shape efficiency, overridden by measured entries.

    t = max(F / (P e), bytes / (W f)) + launch

    e = e_max [tiles / (waves units)] k / (k + half_k)      matrix products, (m, k) @ (k, n)
        tiles = ceil(m / tile_m) ceil(n / tile_n) count,  waves = ceil(tiles / units)
    f = f_max b / (b + half_bytes)                          everything else, b bytes moved

P, W and the rest are numbers of the cluster (`device.*`). What is marked as the host's runs at the host's bandwidth, and copies
between the two at the link's (`device.host.*`); a cluster without these has one memory: the first runs on the device, the
second is nothing. A probe's matrix products override e by the rates of the nearest shapes in log space, its op curves override
bytes / (W f).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, log, log2, prod

from partita.cluster import Cluster, Curve, Product
from partita.program.events import WIDTH, Compute, Kind, Phase
from partita.program.host import COPIES
from partita.program.program import Program

# Classes of ops that cost alike. The first word that an op's name starts with, or contains after "_", decides.
CLASSES: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "linear", "matmul"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "norm": ("native_layer_norm", "native_batch_norm", "native_group_norm", "batch_norm", "rms_norm", "layer_norm"),
    "softmax": ("softmax", "log_softmax", "nll_loss", "logsumexp"),
    "gather": ("embedding", "index", "gather", "scatter", "select_backward", "slice_backward"),
    "activation": ("gelu", "silu", "tanh", "sigmoid", "exp", "erf", "pow", "sin", "cos", "log", "mish", "softplus", "elu"),
    "random": ("native_dropout", "bernoulli", "rand", "uniform", "normal"),
    "reduction": (
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "std",
        "norm",
        "linalg_vector_norm",
        "any",
        "all",
        "prod",
        "cumsum",
    ),
    "copy": (
        "copy",
        "clone",
        "to_copy",
        "cat",
        "stack",
        "fill",
        "zero",
        "zeros",
        "ones",
        "full",
        "arange",
        "empty",
        "constant_pad_nd",
        "to_host",
        "to_device",
    ),
    "optimizer": ("fused_adam", "fused_adamw", "fused_sgd", "foreach"),
}
TERMS = (
    "matmul",
    "attention",
    "norm",
    "softmax",
    "gather",
    "activation",
    "random",
    "reduction",
    "copy",
    "optimizer",
    "elementwise",
    "view",
)
HOST_LINK, HOST_BANDWIDTH, HOST_EFFICIENCY = "device.host.link", "device.host.bandwidth", "device.host.efficiency"
NEAREST = 4  # measured products that vote on a rate
FREE = ("drop", "(write)")  # bookkeeping of the program: no op runs
READS_ROWS = ("embedding", "index", "gather", "index_select")  # read as much of their table as they write


@cache
def class_of(op: str) -> str:
    """The class an op belongs to; "elementwise" if nothing else fits."""
    name = op.strip("_")
    for kind, words in CLASSES.items():
        if any(name == word or name.startswith(word + "_") for word in words) or (kind == "attention" and words[0] in name):
            return kind
    return "elementwise"


@dataclass(frozen=True, slots=True)
class Work:
    """What an op asks of a device.

    Args:
        op, kind: Its name and class; `kind` is "view" if it moves nothing.
        dtype: That it computes in.
        flop, bytes: Of this rank.
        count, m, n, k: Of a matrix product, else 0.
        place: "device", "host" or "link".
    """

    op: str
    kind: str
    dtype: str
    flop: int
    bytes: int
    count: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    place: str = "device"


def work_of(event: Compute, program: Program) -> Work:
    """The work of one op on one rank, under every axis rewritten so far."""
    dtype = _dtype(event, program)
    if event.view:
        return Work(event.op, "none" if event.op in FREE else "view", dtype, 0, 0)
    kind = class_of(event.op)
    if event.op in COPIES:
        return Work(event.op, kind, dtype, 0, sum(map(program.local_bytes, event.ins)), place="link")
    moved = _moved(event, program)
    if event.flop and kind == "matmul" and event.outs:
        shape = program.local_shape(event.ins[0] if event.op == "convolution_backward" else event.outs[0])
        count, m, n = _product(event.op, shape)
        return Work(event.op, kind, dtype, event.flop, moved, count, m, n, max(1, round(event.flop / (2 * count * m * n))))
    place = "host" if any(program.tensors[i].host for i in (*event.ins, *event.outs)) else "device"
    return Work(event.op, kind, dtype, event.flop, moved, place=place)


def _dtype(event: Compute, program: Program) -> str:
    """What a product reads; for other ops the widest floating type they read or make."""
    if event.flop and event.ins and "float" in (first := program.tensors[event.ins[0]].dtype):
        return first
    kinds = {program.tensors[i].dtype for i in (*event.outs, *event.ins)}
    floats = [d for d in kinds if "float" in d]
    return max(floats, key=lambda d: (WIDTH[d], d)) if floats else "float32"


def _product(op: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(count, m, n) of the product that makes a tensor of `shape`; a convolution as the implicit product it is."""
    if "convolution" in op and len(shape) > 2:
        return 1, max(1, shape[0] * prod(shape[2:])), shape[1]
    if len(shape) < 2:
        return 1, max(1, prod(shape)), 1
    return max(1, prod(shape[:-2])), max(1, shape[-2]), max(1, shape[-1])


def _moved(event: Compute, program: Program) -> int:
    """Bytes read and written, in eager mode: nothing is fused."""
    size = program.owned_bytes if event.phase == Phase.OPTIMIZER else program.local_bytes
    outs = sum(size(i) for i in dict.fromkeys(event.outs))
    ins = list(dict.fromkeys(event.ins))
    if event.op.strip("_").startswith("embedding_dense_backward"):
        return sum(size(i) for i in ins) + 2 * outs  # cleared, then added to
    if event.op.strip("_") in READS_ROWS and ins:
        return 2 * outs + sum(size(i) for i in ins if program.tensors[i].kind != Kind.PARAMETER and size(i) <= outs)
    unread = event.signature.unread if event.signature else set()
    skipped = {event.ins[at] for at in unread if at < len(event.ins)}
    return sum(size(i) for i in ins if i not in skipped) + outs


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one op, and what bound it.

    Args:
        bound: "flop", "bytes", "launch" or "measured".
        key: The number of the cluster that decided.
    """

    seconds: float
    bound: str
    key: str


def price(work: Work, phase: Phase, cluster: Cluster) -> Price:
    """Time of `work` on one device of `cluster`, without crowding."""
    if work.kind == "none":
        return Price(0.0, "launch", "device.launch")
    if work.place != "device" and HOST_LINK in cluster.numbers:
        key = HOST_LINK if work.place == "link" else HOST_BANDWIDTH
        return Price(work.bytes / (cluster.value(key) * cluster.value(HOST_EFFICIENCY)), "bytes", key)
    if work.place == "link":
        return Price(0.0, "launch", "device.launch")
    if cluster.measured.source:
        return _measured(work, phase, cluster)
    return _roofline(work, phase, cluster)


def _roofline(work: Work, phase: Phase, cluster: Cluster) -> Price:
    gpu = cluster.backend == "nccl"
    # On a GPU the host runs ahead: views cost nothing, and the optimizer's ops are issued for all tensors at once.
    launch = 0.0 if gpu and (work.kind == "view" or phase == Phase.OPTIMIZER) else cluster.value("device.launch")
    by_flop = work.flop / (cluster.flop_per_second(work.dtype) * efficiency(work, cluster)) if work.flop else 0.0
    reach = cluster.value("device.bandwidth") * cluster.value("device.efficiency.memory")
    half = 0.0 if gpu and phase == Phase.OPTIMIZER else cluster.value("device.shape.half_bytes")
    by_bytes = (work.bytes + half) / reach if work.bytes else 0.0
    bound = max((by_flop, "flop"), (by_bytes, "bytes"), (launch, "launch"))[1]
    listed = f"device.flop.{work.dtype}" if f"device.flop.{work.dtype}" in cluster.numbers else "device.flop.float32"
    key = {"flop": listed, "bytes": "device.bandwidth", "launch": "device.launch"}[bound]
    return Price(max(by_flop, by_bytes) + launch, bound, key)


def efficiency(work: Work, cluster: Cluster) -> float:
    """Share of the peak that a product reaches: tiles that fill whole waves, and a k that hides their start."""
    value = cluster.value
    if work.kind != "matmul" or not work.m:
        return value("device.efficiency.attention")
    units = value("device.units")
    tiles = ceil(work.m / value("device.shape.tile_m")) * ceil(work.n / value("device.shape.tile_n")) * work.count
    # A product with few tiles and a long k is cut along k as well, down to pieces of half_k.
    pieces = max(1.0, min(units / tiles, work.k / value("device.shape.half_k")))
    filled = tiles * pieces / (ceil(tiles * pieces / units) * units) if units > 1 else 1.0
    deep = work.k / pieces
    return value("device.efficiency.matmul") * min(1.0, filled) * deep / (deep + value("device.shape.half_k"))


# ---- measured entries


def _measured(work: Work, phase: Phase, cluster: Cluster) -> Price:
    source = cluster.measured
    if work.kind == "view":
        return Price(cluster.value("device.view"), "launch", "device.view")
    extra = cluster.value("device.step" if phase == Phase.OPTIMIZER else "device.autograd")
    if work.flop and work.m:
        like = work.op if "convolution" in work.op else "mm"
        if products := [p for p in source.products if p.dtype == work.dtype and p.op == like]:
            return Price(work.flop / product_rate(work, products) + extra, "measured", "measured.products")
    for key in ((work.op, work.dtype), (work.kind, work.dtype), (work.op, "float32"), (work.kind, "float32")):
        if curve := source.ops.get(key):
            return Price(_along(curve, work) + extra, "measured", f"measured.ops.{key[0]}")
    return _roofline(work, phase, cluster)


def _along(curve: Curve, work: Work) -> float:
    """A class of flop (attention) is measured over flop, every other over bytes."""
    return curve(max(1.0, float(work.flop or work.bytes)))


def product_rate(work: Work, products: Iterable[Product]) -> float:
    """Flop per second of a product, from the nearest measured shapes: a mean of log rates weighted by 1 / distance^2."""
    near = sorted(((distance(work, p), p) for p in products), key=lambda pair: pair[0])[:NEAREST]
    if near[0][0] < 1e-9:
        return near[0][1].rate
    weights = [1 / d**2 for d, _ in near]
    return exp(sum(w * log(p.rate) for w, (_, p) in zip(weights, near, strict=True)) / sum(weights))


def distance(work: Work, product: Product) -> float:
    """Distance of two shapes: doublings of m, n and k, and half as much for the batch."""
    pairs = ((work.m, product.m), (work.n, product.n), (work.k, product.k))
    return sum(log2(a / b) ** 2 for a, b in pairs) ** 0.5 + abs(log2(work.count / product.count)) / 2
