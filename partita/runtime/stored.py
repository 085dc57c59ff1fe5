"""Parameters of a pipeline's stages held by rows, and whole only while a pass of their stage needs them.

    forward    a block is gathered before its module runs and let go of after it
    backward   it is gathered when the gradient of what it returned is known, and let go of when the next block comes
    a pass     the rest of its stage is there from its begin to its end

Autograd keeps views of parameters: their storages stay the same, and are emptied and filled again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.runtime.net import Net
from partita.runtime.rows import Lines, piece_of


class Group:
    """Parameters that are gathered together.

    Args:
        path: Of the block; "" of a rest.
        stages: That read them.
        parameters: By name; their storages are emptied.
        pieces: This rank's rows, by name.
    """

    def __init__(
        self, net: Net, axis: str, path: str, stages: Sequence[int],
        parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.net, self.axis, self.path, self.stages = net, axis, path, tuple(stages)
        self.parameters, self.pieces = list(parameters.values()), [pieces[n] for n in parameters]
        self.lines = Lines([p.shape for p in self.parameters], net.size(axis), net.coordinate[axis])
        self.here = False

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the parameters, unless they are."""
        if self.here:
            return
        self.here = True
        first = self.parameters[0]
        line = self.lines.line(self.pieces, first.dtype, first.device)
        out = torch.empty(self.lines.ranks * self.lines.width, dtype=line.dtype, device=line.device)
        self.net.all_gather_into(out, line, self.axis, label=self.path or "(rest)")
        whole = [p.data for p in self.parameters]  # autograd does not see it change
        for t in whole:
            t.untyped_storage().resize_(t.numel() * t.itemsize)
        self.lines.unpack(out, whole)

    def free(self) -> None:
        """Empty the parameters."""
        self.here = False
        for p in self.parameters:
            p.data.untyped_storage().resize_(0)


class Stored:
    """The parameters of a rank's stages, held by rows.

    Args:
        module: Of the rank.
        net, axis: Over which rows are shared out.
        groups: (path of a block or "", stages, names of parameters), in the order of their first gathers.
        running: The stage that runs forward now.
        reshard: Whole parameters are let go of within and after each pass.
    """

    def __init__(
        self, module: nn.Module, net: Net, axis: str, groups: Sequence[tuple[str, Sequence[int], Sequence[str]]],
        running: Callable[[], int], *, reshard: bool,
    ) -> None:  # fmt: skip
        self.running, self.reshard = running, reshard
        self.backward = False  # in a pass
        self.gathered: set[int] = set()  # id() of the blocks this backward has gathered
        named = dict(module.named_parameters())
        self.pieces: dict[str, Tensor] = {}
        self.groups: list[Group] = []
        for path, stages, names in groups:
            own = {n: named[n] for n in names}
            self.pieces |= {n: _apart(p, net.size(axis), net.coordinate[axis]) for n, p in own.items()}
            self.groups.append(Group(net, axis, path, stages, own, self.pieces))
        if reshard:
            for group in (g for g in self.groups if g.path):
                block = module.get_submodule(group.path)
                block.register_forward_pre_hook(partial(self._before, group))
                block.register_forward_hook(partial(self._after, group))

    # ---- passes
    @contextmanager
    def passing(self, stage: int, *, backward: bool = False, whole: bool = False) -> Iterator[None]:
        """Around a pass of a stage; `whole`: its blocks too are there from the beginning."""
        if not self.reshard:
            yield
            return
        self.backward, self.gathered = backward, set()
        for group in self._of(stage):
            if whole or not group.path:
                group.gather()
        try:
            yield
        finally:
            self.backward = False
            self.free(stage)

    def unshard(self, stage: int) -> None:
        """Gather all of a stage, and keep it."""
        for group in (g for g in self.groups if g.stages[0] == stage):
            group.gather()

    def free(self, stage: int) -> None:
        """Let go of a stage."""
        for group in (g for g in self._of(stage) if g.here):
            group.free()

    def _of(self, stage: int) -> list[Group]:
        return [g for g in self.groups if stage in g.stages]

    # ---- blocks
    def _before(self, group: Group, module: nn.Module, args: Any) -> None:
        if self.running() in group.stages and not self.backward:
            with torch._C.DisableTorchFunction():
                group.gather()

    def _after(self, group: Group, module: nn.Module, args: Any, output: Any) -> None:
        if self.running() in group.stages and not self.backward:
            with torch._C.DisableTorchFunction():
                for t in _tensors(output):
                    base = t if t._base is None else t._base  # a view that is written to would lose the hook on it
                    if base.requires_grad and base.grad_fn is not None:
                        base.register_hook(lambda _: self._ask(group))
                group.free()

    def _ask(self, group: Group) -> None:
        """Backward of a block begins."""
        if group.here or id(group) in self.gathered:
            return
        self.gathered.add(id(group))
        for other in self.groups:
            if other.path and other.here:
                other.free()
        group.gather()


@torch.no_grad()
def _apart(p: nn.Parameter, ranks: int, rank: int) -> Tensor:
    """This rank's rows, in memory of their own; the parameter is left without any."""
    piece = piece_of(p.detach(), ranks, rank).clone(memory_format=torch.contiguous_format)
    p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    p.data.untyped_storage().resize_(0)
    return piece


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for f in fields(leaf):
                yield from _tensors(getattr(leaf, f.name))
