"""A user's own training loop on this rank.

    model, optimizer = session.wrap(make(), make_optimizer)
    for batch in session.shard(loader):                  # global batches in, this rank's part out
        loss = session.step(model, batch, loss_fn)       # forward and backward; returns the global loss
        session.clip(model, max_norm=1.0)
        optimizer.step(); optimizer.zero_grad()

The first `step` captures the model on its batch, checks everything that `train` checks before its first step, and cuts the
model in place; the optimizer then holds what this rank holds.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.errors import Fault, Refused, refuse
from partita.runtime import saved
from partita.runtime.batch import Batch, Share, divides, samples_of, taken
from partita.runtime.batch_form import Form, LossFunction
from partita.runtime.capture import capture
from partita.runtime.checkpoint import peek
from partita.runtime.net import Net
from partita.runtime.norm import clip, clip_faults, global_norm
from partita.runtime.prepare import prepare
from partita.runtime.site import coordinate_of, data_axes_of
from partita.runtime.step import Step
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.strategy import Strategy, check

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Session:
    """One rank's side of a story.

    Args:
        net: The rank's network.
        strategies: Innermost first.
        accumulate: Microbatches of a step, on every data rank.
        seed: Of everything that is drawn while training.
        batch_norm: "microbatch" accepts statistics of microbatches.
        forward: Names of the batch's entries that the model takes; None: those it accepts.
    """

    def __init__(
        self,
        net: Net,
        strategies: Sequence[Strategy],
        *,
        accumulate: int = 1,
        seed: int = 0,
        batch_norm: str | None = None,
        forward: tuple[str, ...] | None = None,
    ) -> None:
        self.net, self.strategies, self.forward = net, tuple(strategies), forward
        self.training = Training(0, accumulate, seed=seed, batch_norm=batch_norm)
        self.rank, self.ranks = net.rank, net.ranks
        self._axes = data_axes_of(self.strategies, net.mesh)
        self._part, self._parts = coordinate_of(net, self._axes)
        self._step: Step | None = None
        self._form: Form | None = None
        self._whole: Batch | None = None  # the global batch the last shard was cut from
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._make: MakeOptimizer | None = None
        self._done = 0
        self._resumed: Path | None = None

    # ---- the verbs
    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model on this rank's device, and its optimizer."""
        assert self._model is None, "a session wraps one model"
        self._model, self._make = model.to(self.net.device), make_optimizer
        self._optimizer = make_optimizer(self._model)
        return self._model, self._optimizer

    def shard(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's part of every global batch of a loader."""
        size: int | None = None
        for number, batch in enumerate(loader):
            form = self._formed(batch)
            named = form.named(batch)
            samples = samples_of(named) or 0
            if size is not None and samples != size:
                raise Refused(_uneven(number, samples, size))
            size = samples
            refuse(divides(samples, self._parts, self.training.microbatches))
            each = samples // self._parts
            self._whole = named
            yield form.like(batch, taken(named, Share(self._part * each, each), samples))

    def step(self, model: nn.Module, batch: Any, loss_fn: LossFunction) -> Tensor:
        """Forward and backward of this rank's part of a batch; gradients and the loss are those of one device."""
        self.net.notes.doing(f"step {self._done + 1}", slow=self._step is None)
        form = self._formed(batch)
        local = form.named(batch)
        if self._step is None:
            self._step = self._first(model, local, batch, loss_fn)
            self.net.notes.doing("step 1")
        step = self._step
        site = step.site
        assert model is site.module, "a session trains the model it wrapped"
        site.subject = replace(site.subject, loss=form.loss(loss_fn, batch))
        kept = {p: p.grad.clone() for p in step.pieces.values() if p.grad is not None}
        for p in kept:
            p.grad = None
        first, size = step.shares[0].first, samples_of(local) or 0
        if size != step.samples // self._parts:
            raise Refused(_uneven(self._done, size * self._parts, step.samples))
        shares = [Share(s.first - first, s.samples) for s in step.shares]
        loss = step.gradients([taken(local, s, size, self.net.device) for s in shares], self._done)
        for p, before in kept.items():
            p.grad = before if p.grad is None else p.grad.add_(before)
        self._done += 1
        self.net.notes.stepped()
        self.net.notes.doing(f"the story's own work after step {self._done}", slow=True)
        return torch.tensor(loss, dtype=torch.float64)

    def clip(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of the whole model; returns it as it was before."""
        refuse(clip_faults((max_norm, norm_type)))
        if self._step is None:
            held: dict[str, Tensor] = dict(model.named_parameters())
            norm = global_norm(self.net, held, {}, norm_type)
        else:
            site = self._step.site
            held = site.pieces
            norm = global_norm(self.net, self._step.counted(), site.placements, norm_type, apart=site.apart)
        clip(held.values(), norm, max_norm)
        return norm

    # ---- what a story may want besides
    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers, as on one device. All ranks call it."""
        assert self._model is not None, "wrap comes first"
        if self._step is None:
            return dict(self._model.state_dict())
        dropped = set(self._step.site.transient)
        return {name: t for name, t in saved.whole_state(self._step.site).items() if name not in dropped}

    def resume(self, folder: str | Path) -> int:
        """Go on from the newest checkpoint of a folder; returns the steps it had done.

        All ranks call it, before the first step: module, optimizer and random state are filled once that has cut the module.
        """
        assert self._step is None, "resume comes before the first step"
        self._resumed, self._done = Path(folder), peek(Path(folder)).step
        return self._done

    def save(self, folder: str | Path, step: int) -> None:
        """A checkpoint under a folder. All ranks call it, after the first step."""
        assert self._step is not None, "there is nothing to save before the first step"
        assert self._optimizer is not None, "wrap comes first"
        saved.save(self._step.site, self._optimizer, Path(folder), step)

    # ---- the first step
    def _formed(self, batch: Any) -> Form:
        assert self._model is not None, "wrap comes first"
        self._form = self._form or Form(self._model, batch)
        return self._form

    def _first(self, model: nn.Module, local: Batch, batch: Any, loss_fn: LossFunction) -> Step:
        assert self._optimizer is not None, "wrap comes first"
        assert self._make is not None, "wrap comes first"
        form = self._formed(batch)
        whole = self._whole if self._whole is not None else _joined(self.net, self._axes, local)
        pristine = copy.deepcopy(model)
        subject = Subject(
            make=lambda: copy.deepcopy(pristine),
            batches=lambda _: whole,
            loss=form.loss(loss_fn, batch),
            optimizer=self._make,
            forward=self.forward or form.forward,
        )
        samples = (samples_of(whole) or 1) // self.training.microbatches
        program = replace(capture(subject, max(samples, 1)), microbatches=self.training.microbatches)
        refuse(check(program, self.strategies, self.net.mesh))
        before = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        step = prepare(self.net, subject, model, whole, self.strategies, program, self.training)
        step.site.adopt(self._optimizer, before)
        if self._resumed is not None:
            saved.resume(step.site, self._optimizer, self._resumed)
        stepping = step.site.stepping(self._optimizer)
        if stepping is not self._optimizer:  # the user holds the optimizer: it steps as the strategies want it to
            self._optimizer.step = stepping.step
        return step


def _joined(net: Net, axes: Sequence[str], local: Batch) -> Batch:
    """The global batch from every rank's own part. Quiet."""
    size = samples_of(local)

    def whole(t: Any) -> Any:
        if isinstance(t, Tensor) and t.dim() and t.shape[0] == size:
            for axis in reversed(axes):
                t = net.all_gather(t, axis, label="batch")
        return t

    with net.quiet():
        return tree_map(whole, local)


def _uneven(number: int, have: int, want: int) -> Fault:
    return Fault(
        "P112",
        f"batch {number} has {have} samples",
        have=f"the first one has {want}",
        law="every step trains on one global batch of the same size, cut over the same ranks",
        cure="drop_last=True for a loader",
        at="session.shard",
    )
