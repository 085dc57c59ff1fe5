"""Sums gradients over a data axis in flat buckets, launched from hooks while backward still runs.

    backward    ... grad 7  grad 6 | grad 5  grad 4 | ...
    axis                           └ bucket 0 ──────┘└ bucket 1 ...        always in this order, on every rank

Gradients are views of the buckets: zeroed before the first microbatch, accumulated in place, reduced with the last one. Half
types are accumulated over microbatches in float32. A parameter without a gradient anywhere keeps `grad` None.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from partita.errors import RunFailed
from partita.runtime.gradients import Bucket, Gradients
from partita.runtime.net import Net, Work
from partita.runtime.switch.blocks import NotFinite

HALF = (torch.float16, torch.bfloat16)


class Flat(Bucket):
    """One flat buffer and the parameters whose gradients are views of it.

    `home` is where gradients accumulate over microbatches: the buffer itself, or a float32 one beside a half one.
    """

    def __init__(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, *, wide: bool) -> None:
        super().__init__(names, [parameters[n] for n in names])
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=self.parameters[0].device)
        self.home = torch.zeros_like(self.flat, dtype=torch.float32) if wide else self.flat
        shapes = [p.shape for p in self.parameters]
        self.views = [piece.view(shape) for piece, shape in zip(self.flat.split(sizes), shapes, strict=True)]
        self.homes = [piece.view(shape) for piece, shape in zip(self.home.split(sizes), shapes, strict=True)]


class Buckets(Gradients[Flat]):
    """The gradients of one rank, summed over one data axis or, with axis None, only accumulated.

    Args:
        net, axis: Where they are summed.
        parameters: By name.
        names: Per bucket, in launch order.
        dtype: They are summed in; None means their own.
        microbatches: Of a step; above 1, half types are accumulated in float32.
        optional, later: As of `Gradients`.
        through: An op that adds up in the network, after the backward pass.
    """

    def __init__(  # noqa: PLR0913 - what a rank has, and how it is sent
        self,
        net: Net,
        axis: str | None,
        parameters: Mapping[str, nn.Parameter],
        names: Sequence[Sequence[str]],
        *,
        dtype: torch.dtype | None = None,
        microbatches: int = 1,
        optional: bool = False,
        later: Collection[int] = (),
        through: str = "",
    ) -> None:
        def bucket(some: Sequence[str]) -> Flat:
            own = dtype or parameters[some[0]].dtype
            return Flat(some, parameters, own, wide=own in HALF and microbatches > 1)

        super().__init__(net, axis, [bucket(some) for some in names], optional=optional, later=later)
        self.works: list[Work | None] = []
        self.through, self.held = through, list[Flat]()  # what is to be added up in the network
        self.parameters = dict(parameters)

    def clear(self) -> None:
        self.works, self.held = [], []
        for bucket in self.buckets:
            bucket.home.zero_()

    def point(self) -> None:
        for bucket in self.buckets:
            for p, home in zip(bucket.parameters, bucket.homes, strict=True):
                p.grad = home if home.dtype == p.dtype else None

    def launch(self, bucket: Flat) -> None:
        if bucket.home is not bucket.flat:
            bucket.flat.copy_(bucket.home)
        if self.axis is not None and self.through:
            self.held.append(bucket)
        elif self.axis is not None:
            self.works.append(self.net.all_reduce(bucket.flat, self.axis, label=bucket.names[-1], overlapped=True))

    def arrive(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
        for bucket in self.held:
            assert self.axis is not None
            add_up(self.net, bucket.flat, self.axis, self.through, bucket.names, bucket.parameters)

    def settle(self) -> None:
        for bucket in self.buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view if view.dtype == p.dtype else view.to(p.dtype)

    def forget(self, name: str) -> None:
        self.parameters[name].grad = None


def add_up(net: Net, flat: Tensor, axis: str, op: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Sum a bucket in the network; what is no number is named, for whole numbers cannot carry it to the others."""
    try:
        net.add_up(flat, axis, op, label=names[-1])
    except NotFinite as bad:
        at = bad.at
        for name, tensor in zip(names, tensors, strict=True):
            if at < tensor.numel():
                raise RunFailed(
                    f"the gradient of {name!r} on rank {net.rank} is {bad.value} at {at}: no switch can sum it"
                ) from None
            at -= tensor.numel()
        raise


def reduce_again(
    net: Net,
    axis: str,
    parameters: Mapping[str, Tensor],
    names: Sequence[Sequence[str]],
    dtype: torch.dtype | None = None,
    room: Callable[[str], int] | None = None,
    through: str = "",
) -> None:
    """Sum gradients over one more axis, bucket by bucket, after the first has finished; in `dtype`, or their own.

    Args:
        net, axis: Where.
        parameters: What the gradients are of, by name.
        names: Per bucket.
        dtype: They are summed in; None means their own.
        room: Elements sent for one: more than it has where another rank owns more rows of it.
        through: An op that adds up in the network.
    """
    for some in names:
        grads = {n: g for n in some if (g := parameters[n].grad) is not None}
        sizes = [room(n) if room else g.numel() for n, g in grads.items()]
        flat = torch.zeros(sum(sizes), dtype=dtype or next(iter(grads.values())).dtype, device=net.device)
        for grad, piece in zip(grads.values(), flat.split(sizes), strict=True):
            piece[: grad.numel()].copy_(grad.reshape(-1))
        if through:
            add_up(net, flat, axis, through, list(grads), list(grads.values()))
        else:
            net.all_reduce(flat, axis, label=some[-1])
        for grad, piece in zip(grads.values(), flat.split(sizes), strict=True):
            grad.copy_(piece[: grad.numel()].view(grad.shape))
