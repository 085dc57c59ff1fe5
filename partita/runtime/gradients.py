"""Gradients of one rank on their way into buckets: which bucket is complete, and in which order buckets go.

    backward    ... grad 7  grad 6 | grad 5  grad 4 | ...       hooks fill buckets in whatever order the engine likes
    queue                          └ bucket 0 ──────┘└ bucket 1 ...      and they go in this one, on every rank

A bucket goes once a step, with the last pass that adds to it, or with every pass. A pass is the backward of a microbatch; in a
pipeline that of one microbatch on one stage, and it has the buckets of that stage. What several stages of a rank add to is
complete only when all of them are done.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from partita.errors import RunFailed
from partita.runtime.net import Net


class Bucket:
    """Parameters whose gradients are sent together.

    Args:
        names, parameters: Of the bucket.
        once: It goes once a step; else with every pass.
        stage: Of a pipeline whose every pass sends it: whose pass; None without stages.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, once: bool = True, stage: int | None = None
    ) -> None:
        self.names, self.parameters, self.once, self.stage = list(names), list(parameters), once, stage
        self.homes: list[Tensor] = []  # where gradients of microbatches are added up; none: they go as they are made
        self.waiting: set[int] = set()


B = TypeVar("B", bound=Bucket)


class Gradients(ABC, Generic[B]):
    """The buckets of one rank.

    Args:
        net, axis: Where they are summed; with axis None gradients are only added up.
        buckets: In launch order.
        optional: Control flow depends on data: a parameter may be without a gradient on this rank, or on all.
        later: id() of parameters that the passes of several stages of this rank add to.
    """

    def __init__(
        self, net: Net, axis: str | None, buckets: Sequence[B], *, optional: bool = False, later: Collection[int] = ()
    ) -> None:
        self.net, self.axis, self.buckets, self.optional, self.later = net, axis, list(buckets), optional, frozenset(later)
        self.where = {id(p): (b, k) for b in self.buckets for k, p in enumerate(b.parameters)}
        self.seen: set[int] = set()  # parameters that got a gradient on this rank in this step
        self.queue: list[B] = []  # to be sent
        self.last = self.silent = False
        me = weakref.ref(self)  # a strong reference in a hook would be a cycle no collector can free

        def ready(parameter: Tensor) -> None:
            owner = me()
            if owner is not None:
                owner.ready(parameter)

        self.hooks = [p.register_post_accumulate_grad_hook(ready) for b in self.buckets for p in b.parameters]

    # ---- what each kind does
    @abstractmethod
    def clear(self) -> None:
        """Empty the room gradients are added up in."""

    @abstractmethod
    def point(self) -> None:
        """Have backward add to that room where it can."""

    @abstractmethod
    def launch(self, bucket: B) -> None:
        """Send a bucket."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for what is on its way."""

    @abstractmethod
    def settle(self) -> None:
        """Hand the gradients to what the optimizer steps on."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """A parameter has no gradient after all."""

    # ---- a step
    @property
    def ids(self) -> set[int]:
        """id() of the parameters."""
        return set(self.where)

    def begin(self) -> None:
        """Before the first microbatch of a step."""
        self.seen, self.last = set(), False
        self.clear()
        self.point()
        self.queue = [_expecting(b) for b in self.buckets if b.once]

    def start(self, stage: int | None = None, *, last: bool, silent: bool = False) -> None:
        """Before a pass.

        Args:
            stage: Whose; None without stages.
            last: Of this stage in this step.
            silent: What it makes counts nothing: it runs for what ranks say to each other in it.
        """
        self.last, self.silent = last, silent
        for p in self._parameters() if silent else ():
            p.grad = None
        queued = [_expecting(b) for b in self.buckets if not b.once and b.stage == stage]
        if queued and stage is not None:  # it had the passes between to arrive, and its room is wanted now
            self.arrive()
        self.queue[:0] = queued

    def ready(self, parameter: Tensor) -> None:
        """A pass has added to the gradient of a parameter."""
        bucket, k = self.where[id(parameter)]
        self.seen.add(id(parameter))
        if self.silent:
            parameter.grad = None
        elif bucket.homes and parameter.grad is not None and parameter.grad is not bucket.homes[k]:
            bucket.homes[k].add_(parameter.grad)
            parameter.grad = None
        if (self.last or not bucket.once) and id(parameter) not in self.later:
            bucket.waiting.discard(id(parameter))
            while self.queue and not self.queue[0].waiting:
                self.launch(self.queue.pop(0))

    def end(self, *, idle: bool = False) -> None:
        """After a pass; `idle`: it had nothing to learn from."""
        while self.queue and not self.queue[0].once:
            bucket = self.queue.pop(0)
            if not idle:
                self._expect([bucket], bucket.waiting)
            self.launch(bucket)
        if self.silent:
            self.silent = False
            self.point()

    def finish(self, *, idle: bool = False) -> None:
        """After the last pass: send what is left, wait for all; `idle`: the step had nothing to learn from on this rank."""
        if not idle and self.axis is not None:
            self._expect(self.buckets, self.ids - self.seen)
        while self.queue:
            self.launch(self.queue.pop(0))
        self.arrive()

    def _expect(self, buckets: Sequence[B], missing: set[int]) -> None:
        if missing and not self.optional:
            names = [n for b in buckets for n, p in zip(b.names, b.parameters, strict=True) if id(p) in missing]
            raise missing_gradient(names[0], self.net.rank, len(names))

    def _parameters(self) -> list[nn.Parameter]:
        return [p for b in self.buckets for p in b.parameters]

    # ---- parameters without a gradient
    def used(self, axis: str) -> None:
        """With optional gradients: agree over a data axis on who has one."""
        if self.optional:
            everyone = self._parameters()
            flags = torch.tensor([id(p) in self.seen for p in everyone], dtype=torch.uint8, device=self.net.device)
            self.net.all_reduce(flags, axis, op="max", label="used")
            self.seen |= {id(p) for p, flag in zip(everyone, flags.tolist(), strict=True) if flag}

    def drop(self) -> None:
        """A parameter that got no gradient anywhere has none, as on one device: weight decay then leaves it alone."""
        if self.optional or self.axis is None:
            for b in self.buckets:
                for name, p in zip(b.names, b.parameters, strict=True):
                    if id(p) not in self.seen:
                        self.forget(name)


def _expecting(bucket: B) -> B:
    bucket.waiting = {id(p) for p in bucket.parameters}
    return bucket


def missing_gradient(name: str, rank: int, count: int = 1) -> RunFailed:
    """A parameter that was to get a gradient and got none."""
    return RunFailed(
        f"parameter {name!r} got no gradient on rank {rank} in this step, though it had one when the "
        f"module was captured ({count} such): its path through the module depends on the data\n"
        "  try    a first batch that shows it, or a module whose path is fixed"
    )
