"""Sums gradients over a data axis in buckets and leaves each rank its own rows of the sums.

    backward    ... grad 7  grad 6 | grad 5  grad 4 | ...
    axis                           └ reduce_scatter ┘└ reduce_scatter ...       always in this order, on every rank

`every` microbatch: gradients go as they are made and are forgotten; each rank adds the sums of its rows up, in float32 for half
types. Else whole gradients are accumulated over the microbatches and go with the last one. One bucket is on its way while the
next is filled.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from partita.runtime.buckets import HALF, missing_gradient
from partita.runtime.net import Net, Work
from partita.runtime.rows import Lines


class Bucket:
    """Parameters whose gradients are sent together.

    Args:
        names, parameters: Of the bucket.
        lines: Where their rows go.
        dtype: They are sent in.
        kept: dtype whole gradients are accumulated in; None keeps none.
        added: dtype this rank's rows are added up in.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], lines: Lines, dtype: torch.dtype,
        *, kept: torch.dtype | None, added: torch.dtype,
    ) -> None:  # fmt: skip
        self.names, self.parameters, self.lines, self.dtype = list(names), list(parameters), lines, dtype
        device = self.parameters[0].device
        self.sum = torch.zeros(lines.width, dtype=added, device=device)
        self.homes: list[Tensor] = []
        if kept is not None:
            sizes = [p.numel() for p in parameters]
            self.home = torch.zeros(sum(sizes), dtype=kept, device=device)
            self.homes = [h.view(p.shape) for h, p in zip(self.home.split(sizes), parameters, strict=True)]
        self.waiting: set[int] = set()


class Scattered:
    """The gradients of one rank, of whose sums it keeps its own rows.

    Args:
        net, axis: Where they are summed.
        parameters: By name.
        pieces: This rank's rows of them, by name: what the optimizer steps on.
        names: Per bucket, in launch order.
        every: They are sent with every microbatch.
        dtype: They are summed in; None means their own.
        microbatches: Of a step.
        optional: Control flow depends on data: a parameter may be without a gradient on this rank, or on all.
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
        optional: bool = False,
    ) -> None:
        self.net, self.axis, self.every, self.optional, self.pieces = net, axis, every, optional, pieces
        self.buckets = []
        for some in names:
            sent = dtype or parameters[some[0]].dtype
            wide = torch.float32 if sent in HALF and microbatches > 1 else sent
            own = [parameters[n] for n in some]
            lines = Lines([p.shape for p in own], net.size(axis), net.coordinate[axis])
            added = wide if every else sent
            self.buckets.append(Bucket(some, own, lines, sent, kept=None if every else wide, added=added))
        self.adds = every and microbatches > 1
        self.where = {id(p): (b, k) for b in self.buckets for k, p in enumerate(b.parameters)}
        self.seen: set[int] = set()  # parameters that got a gradient on this rank in this step
        self.here: set[int] = set()  # in this microbatch
        self.next = 0  # number of the bucket to be sent
        self.flying: tuple[Work | None, Bucket, Tensor, Tensor] | None = None  # the lines sent are kept until they have arrived
        self.last = False
        me = weakref.ref(self)  # a strong reference in a hook would be a cycle no collector can free

        def ready(parameter: Tensor) -> None:
            owner = me()
            if owner is not None:
                owner._ready(parameter)

        self.hooks = [p.register_post_accumulate_grad_hook(ready) for b in self.buckets for p in b.parameters]

    # ---- a step
    @property
    def ids(self) -> set[int]:
        """id() of the parameters."""
        return set(self.where)

    def begin(self) -> None:
        """Before the first microbatch of a step."""
        self.seen, self.last = set(), False
        for bucket in self.buckets:
            if self.adds:
                bucket.sum.zero_()
            for p, home in zip(bucket.parameters, bucket.homes, strict=False):
                home.zero_()
                p.grad = home if home.dtype == p.dtype else None
        self.start()

    def start(self) -> None:
        """Before each microbatch."""
        self.next, self.here = 0, set()
        for bucket in self.buckets:
            bucket.waiting = {id(p) for p in bucket.parameters}

    def end(self, *, idle: bool) -> None:
        """After each microbatch; `idle`: it had nothing to learn from."""
        if self.sends:
            self._expect_all(idle=idle)
            while self.next < len(self.buckets):
                self._launch()
        self.seen |= self.here

    def finish(self, *, idle: bool = False) -> None:
        """After the last backward: wait for what is on its way."""
        self._arrive()

    def settle(self) -> None:
        """Hand this rank's rows to the optimizer's tensors; the parameters themselves keep no gradient."""
        for bucket in self.buckets:
            for name, p, rows in zip(bucket.names, bucket.parameters, bucket.lines.rows(bucket.sum), strict=True):
                p.grad = None
                self.pieces[name].grad = rows if rows.dtype == p.dtype else rows.to(p.dtype)

    @property
    def sends(self) -> bool:
        """Whether this microbatch's gradients go."""
        return self.every or self.last

    # ---- hooks
    def _ready(self, parameter: Tensor) -> None:
        bucket, k = self.where[id(parameter)]
        self.here.add(id(parameter))
        if bucket.homes and parameter.grad is not None and parameter.grad is not bucket.homes[k]:
            bucket.homes[k].add_(parameter.grad)
            parameter.grad = None
        if self.sends:
            bucket.waiting.discard(id(parameter))
            while self.next < len(self.buckets) and not self.buckets[self.next].waiting:
                self._launch()

    def _launch(self) -> None:
        """Send the next bucket, once the one before it has arrived."""
        bucket = self.buckets[self.next]
        self.next += 1
        self._arrive()
        grads = bucket.homes or [p.grad for p in bucket.parameters]
        sent = bucket.lines.pack(grads, bucket.dtype, bucket.sum.device)
        if not bucket.homes:
            for p in bucket.parameters:
                p.grad = None
        line = torch.empty(bucket.lines.width, dtype=bucket.dtype, device=sent.device) if self.adds else bucket.sum
        work = self.net.reduce_scatter_into(line, sent, self.axis, label=bucket.names[-1], overlapped=True)
        self.flying = work, bucket, line, sent

    def _arrive(self) -> None:
        if self.flying is not None:
            work, bucket, line, _ = self.flying
            if work is not None:
                work.wait()
            if self.adds:
                bucket.sum.add_(line)
            self.flying = None

    def _expect_all(self, *, idle: bool) -> None:
        if not self.optional and not idle:
            seen = self.here if self.every else self.seen | self.here
            for b in self.buckets:
                for n, p in zip(b.names, b.parameters, strict=True):
                    if id(p) not in seen:
                        raise missing_gradient(n, self.net.rank)

    # ---- parameters without a gradient
    def used(self, axis: str) -> None:
        """With optional gradients: agree over a data axis on who has one."""
        if self.optional:
            everyone = [p for b in self.buckets for p in b.parameters]
            flags = torch.tensor([id(p) in self.seen for p in everyone], dtype=torch.uint8, device=self.net.device)
            self.net.all_reduce(flags, axis, op="max", label="used")
            self.seen |= {id(p) for p, flag in zip(everyone, flags.tolist(), strict=True) if flag}

    def drop(self) -> None:
        """A parameter that got no gradient anywhere has none, as on one device: weight decay then leaves it alone."""
        if self.optional:
            for b in self.buckets:
                for n, p in zip(b.names, b.parameters, strict=True):
                    if id(p) not in self.seen:
                        self.pieces[n].grad = None


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
