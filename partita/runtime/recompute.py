"""Computes the inside of a module once more in the backward pass: torch's checkpointing, at the place the first pass had.

    first pass     modes (random streams, replayed calls) stand at p ──▶ forward ──▶ they stand at q; the input is kept
    second pass    backward reads a tensor from inside: modes at p, buffers as they were ──▶ forward, to the last saved tensor

So masks are the same, the calls of a split module are replayed on the same parts and send the same sums, and buffers are
written once. The module stays what it is: class, names, hooks; only its forward is wrapped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partita.errors import RunFailed
from partita.runtime.again import Again
from partita.runtime.calls import MARK, mark
from partita.runtime.through import resumables

PLAIN = (int, float, str, bool, type(None))  # attributes that count or steer
INNER = ("_parameters", "_buffers", "_modules", "training")


def recomputed(module: nn.Module, keep: Sequence[str] = ()) -> None:
    """Wrap a module's forward, so that what it saves for backward is computed again.

    Args:
        module: Any; changed in place.
        keep: Globs of ops (aten names) whose results are kept.
    """
    own = vars(module).get("forward")
    own = own.__func__ if isinstance(own, MethodType) and own.__self__ is module else own and _unbound(own)
    module.forward = MethodType(_wrapped(own or type(module).forward, keep), module)


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def _wrapped(forward: Callable[..., Any], keep: Sequence[str]) -> Callable[..., Any]:
    changing: set[str] | None = None

    @wraps(forward)  # what it accepts is asked of it
    def again(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal changing
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        region = _Region(self, partial(forward, self), keep, changing)
        out = checkpoint(region.run, *args, use_reentrant=False, context_fn=region.contexts, **kwargs)
        changing = region.kept.changing if self.training else changing
        return out

    return again


class _Region:
    """One pass through a module, and what it takes to make it again."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], keep: Sequence[str], changing: set[str] | None) -> None:
        self.module, self.forward, self.keep = module, forward, keep
        self.kept = _Kept(module, changing)
        self.places = [mode.place() for mode in resumables()]
        self.marked: list[bool] = []  # which tensors of the input descend from a parameter
        self.second = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not self.second:
            self.marked = [bool(getattr(t, MARK, False)) for t in given]
            return self.forward(*args, **kwargs)
        for t, descends in zip(given, self.marked, strict=True):
            mark(t) if descends else None
        return Again(self.module)(self.forward, *args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first pass and around the second."""
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        if self.keep:
            first, second = create_selective_checkpoint_contexts(self._policy)
        return self._first(first), _Again(self, second)

    def _policy(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._schema.name.split("::")[1]
        kept = op.namespace == "aten" and any(fnmatchcase(name, glob) for glob in self.keep)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    @contextmanager
    def _first(self, keeping: AbstractContextManager[Any]) -> Iterator[None]:
        with keeping:
            yield
        self.kept.passed()
        for place in self.places:
            place.passed()


class _Again(AbstractContextManager):
    """Around the second pass: everything as it was before the first."""

    def __init__(self, region: _Region, keeping: AbstractContextManager[Any]) -> None:
        self.region, self.keeping = region, keeping

    def __enter__(self) -> None:
        region, self.stack = self.region, ExitStack()
        self.stack.enter_context(region.kept.restored())
        for place in region.places:
            self.stack.enter_context(place.resumed())
        self.stack.enter_context(self.keeping)
        region.second = True

    def __exit__(self, *exc: Any) -> None:
        self.region.second = False
        self.stack.__exit__(*exc)


class _Kept:
    """What the first pass changed in a module: buffers, and numbers and words among its attributes.

    Args:
        module: The module, before it runs.
        changing: Names of the buffers that a pass changes, found in the first pass of all; None before that.
    """

    def __init__(self, module: nn.Module, changing: set[str] | None) -> None:
        self.module, self.changing = module, changing
        self.attributes = _attributes(module)
        self.buffers = {n: b.detach().clone() for n, b in module.named_buffers() if changing is None or n in changing}
        self.versions = {n: b._version for n, b in module.named_buffers()}

    def passed(self) -> None:
        """After the pass: only what changed is kept."""
        held = dict(self.module.named_buffers())
        written = {n for n, version in self.versions.items() if held[n]._version != version}
        if self.changing is None:  # kernels that write without a word: batch norm's
            self.changing = written | {n for n, before in self.buffers.items() if not torch.equal(before, held[n])}
        if fresh := sorted(written - self.changing):
            raise RunFailed(
                f"buffer {fresh[0]!r} of a recomputed module is written now, and was not in the first pass\n"
                "  try    a buffer that every pass writes, or leave the module out with modules = [...] of recompute"
            )
        self.buffers = {n: before for n, before in self.buffers.items() if n in self.changing}
        now = _attributes(self.module)
        self.attributes = {key: old for key, old in self.attributes.items() if key in now and now[key] is not old}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was before the first pass; afterwards as it is now."""
        held = {n: b for n, b in self.module.named_buffers() if n in self.buffers}
        now, attributes = {n: b.detach().clone() for n, b in held.items()}, _attributes(self.module)
        _write(held, self.buffers)
        _set(self.module, self.attributes)
        try:
            yield
        finally:
            _write(held, now)
            _set(self.module, {key: attributes[key] for key in self.attributes})


def _attributes(module: nn.Module) -> dict[tuple[int, str], Any]:
    """Numbers and words that modules keep, by the number of the module and the name."""
    kept = ((n, k, v) for n, m in enumerate(module.modules()) for k, v in vars(m).items() if k not in INNER)
    return {(n, k): v for n, k, v in kept if isinstance(v, PLAIN)}


def _set(module: nn.Module, attributes: Mapping[tuple[int, str], Any]) -> None:
    modules = list(module.modules()) if attributes else []
    for (n, name), value in attributes.items():
        vars(modules[n])[name] = value


def _write(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
