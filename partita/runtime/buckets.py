"""Sums gradients over a data axis in flat buckets, launched from hooks while backward still runs.

    backward    ... grad 7  grad 6 | grad 5  grad 4 | ...
    axis                           └ bucket 0 ──────┘└ bucket 1 ...        always in this order, on every rank

Gradients are views of the buckets: zeroed before the first microbatch, accumulated in place, reduced with the last one. Half
types are accumulated over microbatches in float32. A parameter without a gradient anywhere keeps `grad` None.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from partita.errors import RunFailed
from partita.runtime.net import Net, Work

HALF = (torch.float16, torch.bfloat16)


class Bucket:
    """One flat buffer and the parameters whose gradients are views of it.

    `home` is where gradients accumulate over microbatches: the buffer itself, or a float32 one beside a half one.
    """

    def __init__(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, *, wide: bool) -> None:
        self.names = list(names)
        self.parameters = [parameters[n] for n in names]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=self.parameters[0].device)
        self.home = torch.zeros_like(self.flat, dtype=torch.float32) if wide else self.flat
        shapes = [p.shape for p in self.parameters]
        self.views = [piece.view(shape) for piece, shape in zip(self.flat.split(sizes), shapes, strict=True)]
        self.homes = [piece.view(shape) for piece, shape in zip(self.home.split(sizes), shapes, strict=True)]
        self.waiting: set[int] = set()


class Buckets:
    """The gradients of one rank, summed over one data axis or, with axis None, only accumulated.

    Args:
        net, axis: Where they are summed.
        parameters: By name.
        names: Per bucket, in launch order.
        dtype: They are summed in; None means their own.
        microbatches: Of a step; above 1, half types are accumulated in float32.
        optional: Control flow depends on data: a parameter may be without a gradient on this rank, or on all.
    """

    def __init__(
        self,
        net: Net,
        axis: str | None,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[Sequence[str]],
        *,
        dtype: torch.dtype | None = None,
        microbatches: int = 1,
        optional: bool = False,
    ) -> None:
        self.net, self.axis, self.optional = net, axis, optional
        self.buckets = []
        for some in names:
            own = dtype or parameters[some[0]].dtype
            self.buckets.append(Bucket(some, parameters, own, wide=own in HALF and microbatches > 1))
        self.where = {id(p): (b, k) for b in self.buckets for k, p in enumerate(b.parameters)}
        self.seen: set[int] = set()  # parameters that got a gradient on this rank in this step
        self.works: list[Work | None] = []
        self.last = False  # in the last microbatch
        self.later: set[int] = set()  # parameters of which more is to come even then
        me = weakref.ref(self)  # a strong reference in a hook would be a cycle no collector can free

        def ready(parameter: Tensor) -> None:
            owner = me()
            if owner is not None:
                owner.ready(parameter)

        self.hooks = [p.register_post_accumulate_grad_hook(ready) for b in self.buckets for p in b.parameters]

    @property
    def ids(self) -> set[int]:
        """id() of the parameters."""
        return set(self.where)

    def begin(self) -> None:
        """Before the first microbatch of a step."""
        self.seen, self.works, self.last = set(), [], False
        for bucket in self.buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}
            bucket.home.zero_()
            for p, home in zip(bucket.parameters, bucket.homes, strict=True):
                p.grad = home if home.dtype == p.dtype else None

    def start(self) -> None:
        """Before each microbatch."""

    def end(self, *, idle: bool) -> None:
        """After each microbatch."""

    def ready(self, parameter: Tensor) -> None:
        """A microbatch has added to the gradient of a parameter."""
        bucket, k = self.where[id(parameter)]
        self.seen.add(id(parameter))
        if parameter.grad is not bucket.homes[k] and parameter.grad is not None:
            bucket.homes[k].add_(parameter.grad)
            parameter.grad = None
        if self.last and id(parameter) not in self.later:
            bucket.waiting.discard(id(parameter))
            while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting:
                self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[len(self.works)]
        if bucket.home is not bucket.flat:
            bucket.flat.copy_(bucket.home)
        work = None
        if self.axis is not None:
            work = self.net.all_reduce(bucket.flat, self.axis, label=bucket.names[-1], overlapped=True)
        self.works.append(work)

    def finish(self, *, idle: bool = False) -> None:
        """After the last backward: send what is left, wait for all.

        Args:
            idle: This rank had nothing to learn from in this step, so no gradient is expected.
        """
        if not self.optional and not idle and self.axis is not None:
            self._expect_all()
        while len(self.works) < len(self.buckets):
            self._launch()
        for work in self.works:
            if work is not None:
                work.wait()

    def _expect_all(self) -> None:
        missing = [n for b in self.buckets for n, p in zip(b.names, b.parameters, strict=True) if id(p) not in self.seen]
        if missing:
            raise missing_gradient(missing[0], self.net.rank, len(missing))

    def settle(self) -> None:
        """Hand the gradients to the parameters."""
        for bucket in self.buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view if view.dtype == p.dtype else view.to(p.dtype)

    def used(self, axis: str) -> None:
        """With optional gradients: agree over a data axis on who has one."""
        if self.optional:
            everyone = [p for b in self.buckets for p in b.parameters]
            flags = torch.tensor([id(p) in self.seen for p in everyone], dtype=torch.uint8, device=self.net.device)
            self.net.all_reduce(flags, axis, op="max", label="used")
            self.seen |= {id(p) for p, flag in zip(everyone, flags.tolist(), strict=True) if flag}

    def drop(self) -> None:
        """A parameter that got no gradient anywhere has none, as on one device: weight decay then leaves it alone."""
        if self.optional or self.axis is None:
            for p in (p for b in self.buckets for p in b.parameters if id(p) not in self.seen):
                p.grad = None


def missing_gradient(name: str, rank: int, count: int = 1) -> RunFailed:
    """A parameter that was to get a gradient and got none."""
    return RunFailed(
        f"parameter {name!r} got no gradient on rank {rank} in this step, though it had one when the "
        f"module was captured ({count} such): its path through the module depends on the data\n"
        "  try    a first batch that shows it, or a module whose path is fixed"
    )


def reduce_again(
    net: Net,
    axis: str,
    parameters: Mapping[str, Tensor],
    names: Sequence[Sequence[str]],
    dtype: torch.dtype | None = None,
    room: Callable[[str], int] | None = None,
) -> None:
    """Sum gradients over one more axis, bucket by bucket, after the first has finished; in `dtype`, or their own.

    Args:
        net, axis: Where.
        parameters: What the gradients are of, by name.
        names: Per bucket.
        dtype: They are summed in; None means their own.
        room: Elements sent for one: more than it has where another rank owns more rows of it.
    """
    for some in names:
        grads = {n: g for n in some if (g := parameters[n].grad) is not None}
        sizes = [room(n) if room else g.numel() for n, g in grads.items()]
        flat = torch.zeros(sum(sizes), dtype=dtype or next(iter(grads.values())).dtype, device=net.device)
        for grad, piece in zip(grads.values(), flat.split(sizes), strict=True):
            piece[: grad.numel()].copy_(grad.reshape(-1))
        net.all_reduce(flat, axis, label=some[-1])
        for grad, piece in zip(grads.values(), flat.split(sizes), strict=True):
            grad.copy_(piece[: grad.numel()].view(grad.shape))
