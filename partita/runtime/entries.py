"""What a probe measures: matrix products, ops and attention as a model runs them, and how one is timed.

Inputs rotate through a pool larger than the caches and outputs reuse freed memory, as in a training step.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
POOL = 1 << 25  # elements: 128 MiB of floats, well over a last-level cache
ALIGN = 16  # elements: one cache line of floats
QUARTILE = 0.25
SHORT = 2e-4  # seconds: seldom interrupted, and as long as many reads of the processor-time clock
WIDTH = 256  # columns of the ops below: a hidden size


class Entry(NamedTuple):
    """One thing to time.

    Args:
        op: Its aten name.
        amount: Bytes moved, or flop where a class is measured over flop.
        make: Makes operands at fresh places; not timed.
        call: What is timed.
    """

    op: str
    amount: float
    make: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]


class Shape(NamedTuple):
    """A batch of products (m, k) @ (k, n); `form` says which of a layer's three products it is."""

    batch: int
    m: int
    n: int
    k: int
    form: str


class Pool:
    """Tensors cut from one large block, each at another place: never twice the same cache lines in a row."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.block = torch.randn(POOL).to(dtype)
        self.at = 0

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        assert size <= POOL, f"{shape} is larger than the pool"
        if self.at + size > POOL:
            self.at = 0
        start, self.at = self.at, -(-(self.at + size) // ALIGN) * ALIGN
        return self.block[start : start + size].view(shape)


def quartile(times: list[float]) -> float:
    """Lower quartile: quiet, but not the luckiest moment."""
    return sorted(times)[int(len(times) * QUARTILE)]


def repeats(guess: float, slice_: float) -> int:
    """How often to run an entry of about `guess` seconds within `slice_` seconds; no time left means twice."""
    return max(5, min(50, round(slice_ / max(guess, 1e-6)))) if slice_ else 2


def timed(make: Callable[[], tuple[Any, ...]], call: Callable[..., Any], slice_: float) -> float:
    """Lower quartile of `call(*make())` in seconds, within about `slice_` seconds.

    What takes long enough to be interrupted by other programs is counted in processor time of this thread.
    """
    made = make()
    call(*made)
    times = [_once(call, make())]
    times += [_once(call, make()) for _ in range(repeats(times[0], slice_))]
    return quartile(times[1:])


def _once(call: Callable[..., Any], made: tuple[Any, ...]) -> float:
    start, used = time.perf_counter(), time.thread_time()
    kept = call(*made)
    used, wall = time.thread_time() - used, time.perf_counter() - start
    del kept
    return wall if wall < SHORT else min(wall, used)


# ---- matrix products


def product_shapes(*, quick: bool) -> Iterator[Shape]:
    """The products of linear layers, forward and backward, and of attention written as products."""
    layers = [(64, 64), (64, 256), (256, 64), (256, 256), (256, 1024), (1024, 256), (512, 512)]
    layers += [] if quick else [(768, 768), (512, 2048), (2048, 512), (1024, 1024)]
    for tokens in (64, 512, 2048, 4096) if quick else (32, 128, 512, 2048, 4096):
        for inputs, outputs in layers:
            yield Shape(1, tokens, outputs, inputs, "forward")
            yield Shape(1, tokens, inputs, outputs, "input")
            yield Shape(1, outputs, inputs, tokens, "weight")
    for count, tokens, width in ((16, 32, 16), (64, 64, 32), (64, 128, 64)):
        yield Shape(count, tokens, tokens, width, "batch")
        yield Shape(count, tokens, width, tokens, "batch")


def product_entry(pool: Pool, shape: Shape) -> Entry:
    """A product with its operands laid out as autograd lays them out."""
    count, m, n, k, form = shape
    flop = 2.0 * count * m * n * k
    if form == "batch":
        return Entry("bmm", flop, lambda: (pool(count, m, k), pool(count, k, n)), torch.bmm)
    if form == "forward":
        return Entry("mm", flop, lambda: (pool(m, k), pool(n, k).t()), torch.mm)
    if form == "input":
        return Entry("mm", flop, lambda: (pool(m, k), pool(k, n)), torch.mm)
    return Entry("mm", flop, lambda: (pool(k, m).t(), pool(k, n)), torch.mm)


# ---- everything else


def op_entries(pool: Pool, n: int) -> list[Entry]:
    """Ops on tensors of n elements, over bytes moved."""
    rows, width = max(1, n // WIDTH), min(n, WIDTH)
    pointwise: dict[str, tuple[int, Callable[..., Any], int]] = {  # op -> tensors read, call, tensors read and written
        "add": (2, torch.add, 3),
        "mul": (2, torch.mul, 3),
        "div": (1, lambda x: x / 0.5, 2),
        "pow": (1, lambda x: aten.pow(x, 2), 2),
        "tanh": (1, aten.tanh, 2),
        "gelu": (1, aten.gelu, 2),
        "gelu_backward": (2, aten.gelu_backward, 3),
        "silu": (1, aten.silu, 2),
        "silu_backward": (2, aten.silu_backward, 3),
        "relu": (1, aten.relu, 2),
        "threshold_backward": (2, lambda g, x: aten.threshold_backward(g, x, 0), 3),
        "bernoulli_": (1, lambda x: x.bernoulli_(0.9), 2),
        "cat": (2, lambda a, b: torch.cat((a, b), 1), 4),
        "sum": (1, lambda x: torch.sum(x, 0, keepdim=True), 1),
        "mean": (1, lambda x: torch.mean(x, 1, keepdim=True), 1),
        "add_": (2, lambda x, y: x.add_(y, alpha=1e-6), 3),
        "mul_": (1, lambda x: x.mul_(0.999999), 2),
        "lerp_": (2, lambda x, y: x.lerp_(y, 1e-6), 3),
        "addcmul_": (2, lambda x, y: x.addcmul_(y, y, value=1e-6), 3),
        "addcdiv_": (3, lambda x, y, z: x.addcdiv_(y, z, value=1e-9), 4),
    }

    def maker(count: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(pool(rows, width) for _ in range(count))

    found = [Entry(op, streams * n * 4.0, maker(count), call) for op, (count, call, streams) in pointwise.items()]
    found.append(Entry("sqrt", 8.0 * n, lambda: (pool(rows, width).abs(),), torch.sqrt))
    found.append(
        Entry("clone", 8.0 * n, lambda: (pool(width, rows).t(),), lambda x: x.clone(memory_format=torch.contiguous_format))
    )
    return found + row_entries(pool, rows, width)


def row_entries(pool: Pool, rows: int, width: int) -> list[Entry]:
    """Ops that work along rows, over bytes moved."""
    n, ends, off = 4.0 * rows * width, 8.0 * rows, {"half_to_float": False}
    weight, index, table = torch.ones(width), torch.randint(rows, (rows,)), pool(rows, width)
    statistics, wanted = (torch.zeros(rows, 1), torch.ones(rows, 1)), [True, True, True]

    def one() -> tuple[Tensor]:
        return (pool(rows, width),)

    def two() -> tuple[Tensor, Tensor]:
        return pool(rows, width), pool(rows, width)

    def norm_backward(g: Tensor, x: Tensor) -> Any:
        return aten.native_layer_norm_backward(g, x, [width], *statistics, weight, weight, wanted)

    channels = 16 if rows * width >= 1 << 12 else 1
    image, per_channel = (8, channels, rows * width // 8 // channels), [torch.ones(channels) for _ in range(4)]

    def images(count: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(pool(*image) for _ in range(count))

    def batch_norm(x: Tensor) -> Any:
        return aten.native_batch_norm(x, *per_channel, *[True], 0.1, 1e-5)

    def batch_norm_backward(g: Tensor, x: Tensor) -> Any:
        return aten.native_batch_norm_backward(
            g, x, *per_channel[:1], *per_channel[2:], *per_channel[:2], *[True], 1e-5, wanted
        )

    return [
        Entry("native_batch_norm", 2 * n, images(1), batch_norm),
        Entry("native_batch_norm_backward", 3 * n, images(2), batch_norm_backward),
        Entry("native_layer_norm", 2 * n + ends, one, lambda x: aten.native_layer_norm(x, [width], weight, weight, 1e-5)),
        Entry("native_layer_norm_backward", 3 * n + ends, two, norm_backward),
        Entry("_softmax", 2 * n, one, lambda x: aten._softmax(x, -1, **off)),
        Entry("_softmax_backward_data", 3 * n, two, lambda g, y: aten._softmax_backward_data(g, y, -1, g.dtype)),
        Entry("_log_softmax", 2 * n, one, lambda x: aten._log_softmax(x, -1, **off)),
        Entry("_log_softmax_backward_data", 3 * n, two, lambda g, y: aten._log_softmax_backward_data(g, y, -1, g.dtype)),
        Entry("nll_loss_backward", n, one, torch.zeros_like),
        Entry("embedding", 2 * n + ends, lambda: (table,), lambda t: aten.embedding(t, index)),
        Entry(
            "embedding_dense_backward", 3 * n + ends, one, lambda g: aten.embedding_dense_backward(g, index, rows, -1, *[False])
        ),
    ]


def attention_entries(pool: Pool, *, quick: bool) -> Iterator[Entry]:
    """Causal attention, forward and backward, over flop (counted whole, as programs do)."""
    forward, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    causal = {"dropout_p": 0.0, "is_causal": True}
    shapes = [(1, 2, 16, 16), (2, 4, 64, 32), (8, 4, 64, 32), (8, 8, 128, 32), (16, 8, 128, 32), (4, 8, 256, 64)]
    for shape in shapes if quick else [*shapes, (8, 8, 256, 64), (4, 8, 512, 64)]:
        samples, heads, tokens, width = shape
        flop = 4.0 * samples * heads * tokens**2 * width

        def maker(count: int, shape: tuple[int, ...] = shape) -> Callable[[], tuple[Any, ...]]:
            return lambda: tuple(pool(*shape) for _ in range(count))

        out, spread = forward(*maker(3)(), **causal)
        yield Entry("_scaled_dot_product_flash_attention_for_cpu", flop, maker(3), lambda *qkv: forward(*qkv, **causal))
        yield Entry(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            2.5 * flop,
            maker(4),
            lambda g, q, k, v, out=out, spread=spread: backward(g, q, k, v, out, spread, **causal),
        )


CONVOLUTIONS = (  # samples, channels in and out, size of the image, of the kernel, stride: a small residual network
    (8, 3, 16, 32, 3, 1), (8, 16, 16, 32, 3, 1), (8, 16, 32, 32, 3, 2), (8, 16, 32, 32, 1, 2), (8, 32, 32, 16, 3, 1),
    (8, 32, 64, 16, 3, 2), (8, 64, 64, 16, 3, 1), (8, 64, 64, 8, 3, 1), (8, 64, 128, 8, 1, 2), (8, 128, 128, 4, 3, 1),
)  # fmt: skip


def convolution_entries(pool: Pool) -> Iterator[tuple[Shape, Entry]]:
    """Convolutions forward and backward, with the products they amount to."""
    straight, nothing, wanted = False, [0, 0], [True, True, False]
    for samples, inputs, outputs, size, kernel, stride in CONVOLUTIONS:
        image, weight, out = (samples, inputs, size, size), (outputs, inputs, kernel, kernel), size // stride
        how = [stride, stride], [kernel // 2, kernel // 2], [1, 1], straight, nothing, 1
        product = (samples * out * out, outputs, inputs * kernel**2)
        flop = 2.0 * product[0] * product[1] * product[2]

        def forward(x: Tensor, w: Tensor, how: tuple[Any, ...] = how) -> Any:
            return aten.convolution(x, w, None, *how)

        def backward(g: Tensor, x: Tensor, w: Tensor, how: tuple[Any, ...] = how) -> Any:
            return aten.convolution_backward(g, x, w, None, *how, wanted)

        def operands(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
            return lambda: tuple(pool(*shape) for shape in shapes)

        yield Shape(1, *product, "forward"), Entry("convolution", flop, operands(image, weight), forward)
        yield (
            Shape(1, *product[:2], 2 * product[2], "backward"),  # two products of the same size
            Entry("convolution_backward", 2 * flop, operands((samples, outputs, out, out), image, weight), backward),
        )
