"""Sums gradients over a data axis in buckets and leaves each rank its own rows of the sums.

    backward    ... grad 7  grad 6 | grad 5  grad 4 | ...
    axis                           └ reduce_scatter ┘└ reduce_scatter ...       always in this order, on every rank

`every` microbatch: gradients go as they are made and are forgotten; each rank adds the sums of its rows up, in float32 for half
types. Else whole gradients are accumulated over the microbatches and go with the last one. One bucket is on its way while the
next is filled.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from partita.runtime.buckets import HALF
from partita.runtime.gradients import Bucket, Gradients
from partita.runtime.net import Net, Work
from partita.runtime.rows import Lines


class Packed(Bucket):
    """Parameters whose gradients are packed by rows.

    Args:
        names, parameters, once, stage: As of `Bucket`.
        lines: Where their rows go.
        dtype: They are sent in.
        wide: dtype they are added up in: whole ones of what goes once, else this rank's rows.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], lines: Lines, dtype: torch.dtype,
        *, wide: torch.dtype, once: bool, stage: int | None,
    ) -> None:  # fmt: skip
        super().__init__(names, parameters, once=once, stage=stage)
        self.lines, self.dtype = lines, dtype
        device = self.parameters[0].device
        self.sum = torch.zeros(lines.width, dtype=dtype if once else wide, device=device)
        if once:
            sizes = [p.numel() for p in parameters]
            self.home = torch.zeros(sum(sizes), dtype=wide, device=device)
            self.homes = [h.view(p.shape) for h, p in zip(self.home.split(sizes), parameters, strict=True)]


class Scattered(Gradients[Packed]):
    """The gradients of one rank, of whose sums it keeps its own rows.

    Args:
        net, axis: Where they are summed.
        parameters: By name.
        pieces: This rank's rows of them, by name: what the optimizer steps on.
        names: Per bucket, in launch order.
        every: They are sent with every pass, but for those that several stages add to.
        dtype: They are summed in; None means their own.
        microbatches: Of a step.
        stages: Of a pipeline: parameter name -> the stages of this rank that read it; those of a bucket have the same.
        optional, later: As of `Gradients`.
    """

    def __init__(  # noqa: PLR0913 - what a rank has, and how it is sent
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Tensor],
        names: Sequence[Sequence[str]],
        *,
        every: bool,
        dtype: torch.dtype | None = None,
        microbatches: int = 1,
        stages: Mapping[str, Sequence[int]] | None = None,
        optional: bool = False,
        later: Collection[int] = (),
    ) -> None:
        def bucket(some: Sequence[str]) -> Packed:
            sent = dtype or parameters[some[0]].dtype
            wide = torch.float32 if sent in HALF and microbatches > 1 else sent
            own, at = [parameters[n] for n in some], stages[some[0]] if stages else ()
            lines, once = Lines([p.shape for p in own], net.size(axis), net.coordinate[axis]), not every or len(at) > 1
            stage = at[0] if every and len(at) == 1 else None
            return Packed(some, own, lines, sent, wide=wide, once=once, stage=stage)

        super().__init__(net, axis, [bucket(some) for some in names], optional=optional, later=later)
        self.over, self.pieces, self.several = axis, pieces, microbatches > 1
        self.flying: tuple[Work | None, Packed, Tensor, Tensor] | None = None  # the lines sent are kept until they have arrived

    def clear(self) -> None:
        for bucket in self.buckets:
            if self._adds(bucket):
                bucket.sum.zero_()
            if bucket.once:
                bucket.home.zero_()

    def point(self) -> None:
        for bucket in self.buckets:
            for p, home in zip(bucket.parameters, bucket.homes, strict=False):
                p.grad = home if home.dtype == p.dtype else None

    def launch(self, bucket: Packed) -> None:
        """Send a bucket, once the one before it has arrived."""
        self.arrive()
        grads = bucket.homes or [None if self.silent else p.grad for p in bucket.parameters]
        sent = bucket.lines.pack(grads, bucket.dtype, bucket.sum.device)
        if not bucket.homes:
            for p in bucket.parameters:
                p.grad = None
        line = bucket.sum
        if self._adds(bucket):
            line = torch.empty(bucket.lines.width, dtype=bucket.dtype, device=sent.device)
        work = self.net.reduce_scatter_into(line, sent, self.over, label=bucket.names[-1], overlapped=True)
        self.flying = work, bucket, line, sent

    def arrive(self) -> None:
        if self.flying is not None:
            work, bucket, line, _ = self.flying
            if work is not None:
                work.wait()
            if line is not bucket.sum:
                bucket.sum.add_(line)
            self.flying = None

    def settle(self) -> None:
        """Hand this rank's rows to the optimizer's tensors; the parameters themselves keep no gradient."""
        for bucket in self.buckets:
            for name, p, rows in zip(bucket.names, bucket.parameters, bucket.lines.rows(bucket.sum), strict=True):
                p.grad = None
                self.pieces[name].grad = rows if rows.dtype == p.dtype else rows.to(p.dtype)

    def forget(self, name: str) -> None:
        self.pieces[name].grad = None

    def _adds(self, bucket: Packed) -> bool:
        """Whether the rows of several passes are added up."""
        return self.several and not bucket.once


class Gathering:
    """Fills in the rows of the other ranks once the optimizer has stepped on this rank's.

    Args:
        net, axis: Where they are gathered.
        parameters: Whole, by name; `pieces` are views of them.
        pieces: This rank's rows.
        names: Per call; those of a call have one dtype.
    """

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Tensor],
        names: Sequence[Sequence[str]],
    ) -> None:
        self.net, self.axis = net, axis
        self.calls = []
        for some in names:
            own = [parameters[n] for n in some]
            lines = Lines([p.shape for p in own], net.size(axis), net.coordinate[axis])
            self.calls.append((some[-1], lines, [p.detach() for p in own], [pieces[n] for n in some]))

    @torch.no_grad()
    def run(self) -> None:
        """All_gather, call by call."""
        for label, lines, whole, pieces in self.calls:
            line = lines.line(pieces, whole[0].dtype, whole[0].device)
            out = torch.empty(lines.ranks * lines.width, dtype=line.dtype, device=line.device)
            self.net.all_gather_into(out, line, self.axis, label=label)
            lines.unpack(out, whole)
