"""Runs an unmodified module on its shards: a torch-function mode replays the captured calls and changes only the marked ones.

user code        q = self.q(x).view(b, t, heads, -1)          loss = F.cross_entropy(logits, targets)
on a rank        enter x; its own rows; view(b, t, heads / n) its own classes; two exchanges of statistics; sum
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.errors import RunFailed
from partita.runtime.calls import at, counts, mark, put, writes
from partita.runtime.grid import Plane
from partita.runtime.net import Net
from partita.runtime.steps import Edge, Script, Step
from partita.runtime.through import Place, Resumable, Through


class Talk:
    """What calls on shards send: all_reduces over axes, and products in blocks on a plane; silent while a script is tried out.

    Args:
        net: The network.
        axes: Along which the calls are split; none in a module that is whole.
        plane: Of products in blocks; None if there are none.
    """

    def __init__(self, net: Net, axes: Sequence[str] = (), plane: Plane | None = None) -> None:
        self.net, self.axes, self.plane = net, tuple(axes), plane
        self._silent = False

    @property
    def silent(self) -> bool:
        """Whether nothing is sent."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        if self.plane is not None:
            self.plane.silent = silent

    def reduce(self, tensor: Tensor, axis: str, how: str = "sum", label: str = "") -> None:
        """All_reduce in place."""
        if not self._silent:
            self.net.all_reduce(tensor, axis, op=how, label=label)


class Sum(torch.autograd.Function):
    """Makes a Partial value whole; its gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, talk: Talk, axis: str, label: str) -> Tensor:
        whole = x.clone(memory_format=torch.contiguous_format)
        talk.reduce(whole, axis, "sum", label)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


class Enter(torch.autograd.Function):
    """Takes a whole value into a split region: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, talk: Talk, axis: str, label: str) -> Tensor:
        ctx.talk, ctx.axis, ctx.label = talk, axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.talk.reduce(whole, ctx.axis, "sum", ctx.label)
        return whole, None, None, None


class Zero(torch.autograd.Function):
    """What another rank adds: zero here, the gradient untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Replay(Through, Resumable):
    """The mode; entered around one forward pass and its loss.

    Args:
        talk: What its calls send.
        script: Of a module in training mode.
        module: Whose mode decides which script is followed.
        evaluation: Writes the script of evaluation, when it is first needed.
    """

    def __init__(
        self, talk: Talk, script: Script, module: nn.Module | None = None, evaluation: Callable[[], Script] | None = None
    ) -> None:
        super().__init__()
        self.talk, self.module, self.evaluation = talk, module, evaluation
        self.scripts = {True: script}
        self.steps, self.next = script.steps, 0
        self.store: dict[tuple[str, int], Tensor] = {}
        self.names: dict[int, str] = {}  # of the parameters, by id
        self.rehearsing = False

    def __enter__(self) -> Self:
        training = self.module is None or self.module.training or self.evaluation is None
        if training not in self.scripts:
            assert self.evaluation is not None
            with torch.inference_mode(mode=False), torch.enable_grad():
                self.scripts[training] = self.evaluation()
        self.steps, self.next, self.store = self.scripts[training].steps, 0, {}
        if not self.names and self.module is not None:
            self.names = names_of(self.module)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.store = {}
        super().__exit__(*exc)
        if exc[0] is None and self.next < len(self.steps):
            raise RunFailed(_strayed(self.next, self.steps[self.next], "the end"))

    def place(self) -> Place:
        return _Stood(self, self.steps, self.next, dict(self.store))

    @contextmanager
    def resumed(self, steps: tuple[Step, ...], at: int, store: Mapping[tuple[str, int], Tensor]) -> Iterator[None]:
        """Once more from a step on, with what earlier steps left for it."""
        kept, (self.steps, self.next, self.store) = (self.steps, self.next, self.store), (steps, at, dict(store))
        try:
            with self.on():
                yield
        finally:
            self.steps, self.next, self.store = kept

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not counts(func, args, kwargs):
            return func(*args, **kwargs) if kwargs else func(*args)
        step = self.steps[self.next] if self.next < len(self.steps) else None
        if step is None or (step.func is not func and step.func != func):
            raise RunFailed(_strayed(self.next, step, func.__name__))
        for path, name in step.reads:
            if self.names.get(id(at(args, kwargs or {}, path)), name) != name:
                raise RunFailed(_strayed(self.next, step, f"{func.__name__} of another parameter than {name!r}"))
        self.next += 1
        out = self.call(step, args, kwargs or {})
        if writes(func):
            mark(args[0])
        if self.rehearsing:
            _fits(step, out)
        return mark(out)

    def call(self, step: Step, args: tuple, kwargs: dict) -> Any:
        """One call, as its step says."""
        if step.edges:
            changed, named = list(args), dict(kwargs)
            for edge in step.edges:
                put(changed, named, edge.path, self.changed(edge, step, at(changed, named, edge.path)))
            args, kwargs = tuple(changed), named
        out = step.run(step.func, args, kwargs) if step.run else step.func(*args, **kwargs)
        for axis in step.summed:
            out = Sum.apply(out, self.talk, axis, step.module)
        return out

    def changed(self, edge: Edge, step: Step, x: Tensor) -> Tensor:
        """What stands in for an argument."""
        key = edge.key
        if edge.again:
            return self.store.pop(key) if edge.last else self.store[key]
        if edge.kind == "sum":
            with nullcontext() if step.graded else torch.enable_grad():
                y = Sum.apply(x, self.talk, edge.axis, step.module)
        elif edge.kind == "enter":
            y = Enter.apply(x, self.talk, edge.axis, step.module)
        elif edge.kind == "one":
            y = Zero.apply(x)
        else:
            assert edge.part is not None
            y = edge.part.of(x, edge.part.dim)
        if not edge.last:
            self.store[key] = y
        return y


@dataclass
class _Stood(Place):
    """Where a replay stands: the next of its steps, and what earlier ones left for later ones."""

    replay: Replay
    steps: tuple[Step, ...]
    at: int
    store: dict[tuple[str, int], Tensor]

    def passed(self) -> None:
        read = {e.key for step in self.steps[self.at : self.replay.next] for e in step.edges if e.again}
        self.store = {key: value for key, value in self.store.items() if key in read}

    def resumed(self) -> AbstractContextManager[None]:
        return self.replay.resumed(self.steps, self.at, self.store)


def _fits(step: Step, out: Any) -> None:
    """Raise ValueError unless the results have their local shapes."""
    have = tuple(tuple(t.shape) for t in tree_leaves(out) if isinstance(t, Tensor))
    fits = [mine == part or (0 in mine and 0 in part) for mine, part in zip(have, step.shapes, strict=True)]
    if not all(fits):
        raise ValueError(f"shape {have} on a rank where {step.shapes} is its part")


def names_of(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def _strayed(number: int, step: Step | None, now: str) -> str:
    was = f"{step.func.__name__} in {step.module or 'the model'!r}" if step else "the end"
    return (
        f"call {number} was {was} when the module was captured and is {now} now: the module took another path\n"
        "  try    make the calls of the module independent of the data and of the step, or leave the split out"
    )
