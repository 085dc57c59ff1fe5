"""Tries one small training task under many layouts: the same numbers as one device, or a refusal before the first step.

    task = Task(make, data, loss)
    same(task, "dp=2 tp=2 accumulate=2")           losses, parameters, buffers, gradients
    refused(task, "tp=5", "P104", "heads = 6")     and no step was run

The truth is one process under plain torch that computes the whole batch at once; partita takes no part in it.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.api.run import Run
from partita.errors import Refused
from partita.strategies import DDP, FSDP, TensorParallel, Zero1, Zero2

BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-7, torch.complex64: 2e-5}
STRATEGIES = {"tp": TensorParallel, "dp": DDP, "zero1": Zero1, "zero2": Zero2, "fsdp": FSDP}  # innermost first


@dataclass(frozen=True)
class Task:
    """A training task, in the words of `pt.train`.

    Args:
        make: A seeded factory, or a module.
        data: data(step) -> the global batch as keyword arguments, or an iterable of them.
        loss: loss(output, batch).
        opt: Builds the optimizer; None means partita's own choice, AdamW.
        steps: Of the run.
        more: Further keywords of `pt.train`: clip, forward, batch_norm.
    """

    make: Callable[[], nn.Module] | nn.Module
    data: Callable[[int], dict[str, Any]] | Iterable[dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Any]
    opt: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    steps: int = 3
    more: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Task":
        """The same task with some parts changed."""
        fields = {k: changes.pop(k) for k in list(changes) if k in ("make", "data", "loss", "opt", "steps")}
        return replace(self, **fields, more={**self.more, **changes})


@dataclass(frozen=True)
class Numbers:
    """What a run ends with: losses by step; tensors by name."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def truth(task: Task) -> Numbers:
    """One process, the whole batch at once, plain torch."""
    module = copy.deepcopy(task.make) if isinstance(task.make, nn.Module) else task.make()
    optimizer = (task.opt or _adamw)(module)
    batches = None if callable(task.data) else iter(task.data)
    clip, losses = task.more.get("clip"), []
    for step in range(task.steps):
        batch = task.data(step) if batches is None else next(batches)
        keys = task.more.get("forward") or _accepted(module, batch)
        optimizer.zero_grad()
        value = task.loss(module(**{k: batch[k] for k in keys}), batch)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], *clip)
        optimizer.step()
        losses.append(float(value.detach()))
    state = {**module.state_dict(), **dict(module.named_buffers())}
    gradients = {n: p.grad.to_dense() for n, p in module.named_parameters() if p.grad is not None}
    return Numbers(losses, {n: t.detach().clone() for n, t in state.items()}, gradients)


def _accepted(module: nn.Module, batch: dict[str, Any]) -> list[str]:
    code = type(module).forward.__code__
    if code.co_flags & 0x08 or isinstance(module, nn.Sequential):  # **kwargs; nn.Sequential takes `input`
        return [k for k in batch if k == "input"] if isinstance(module, nn.Sequential) else list(batch)
    return [k for k in batch if k in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)


# ---------------------------------------------------------------- a layout
def plan_of(layout: str) -> pt.Plan:
    """A plan from "dp=2 tp=2 accumulate=2"; "one" is one rank, "fsdp=2" an axis dp with another strategy than ddp."""
    sizes = {name: int(size) for name, size in (word.split("=") for word in layout.split() if word != "one")}
    accumulate = sizes.pop("accumulate", 1)
    strategies = [kind() for axis, kind in STRATEGIES.items() if axis in sizes]
    mesh = {"tp" if word == "tp" else "dp": size for word, size in sizes.items()}
    return pt.Plan(cluster="cpu", mesh=mesh, strategies=strategies, accumulate=accumulate)


def run(task: Task, layout: str, **more: Any) -> Run:
    """The task under a layout, through the front door."""
    how = {"steps": task.steps, **task.more, **more}
    return pt.train(
        plan_of(layout), model=task.make, batches=task.data, loss=task.loss, optimizer=task.opt, keep_gradients=True, **how
    )


def split(task: Task, layout: str, folder: Path | None = None) -> Numbers:
    """What the task ends with under a layout. "A -> B" saves under A after half of the steps and goes on under B."""
    before, _, after = layout.partition(" -> ")
    losses: list[float] = []
    if after:
        assert folder is not None, "a resumed run needs a folder"
        losses = run(task, before, steps=task.steps // 2, out=folder / "first").losses
        done = run(task, after, resume=folder / "first", out=folder / "rest")
    else:
        done = run(task, before)
    assert done.outcome is not None
    return Numbers(losses + done.losses, done.outcome.tensors["state"], done.gradients())


# ---------------------------------------------------------------- verdicts
def same(
    task: Task, layout: str, *, bound: float | None = None, folder: Path | None = None, whole: Numbers | None = None
) -> None:
    """Assert that a layout gives the numbers of one device."""
    got = split(task, layout, folder)
    alike(got, whole or truth(task), bound)


def alike(got: Numbers, want: Numbers, bound: float | None = None) -> None:
    """Assert that two runs end with the same numbers."""
    worst = max((BOUNDS[t.dtype] for t in want.gradients.values()), default=1e-9) if bound is None else bound
    assert len(got.losses) == len(want.losses)
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert abs(a - b) <= worst * max(abs(b), 1e-3) or (a != a and b != b), f"loss of step {step + 1}: {a!r}, not {b!r}"
    for kind, mine, theirs in (("state", got.state, want.state), ("gradient", got.gradients, want.gradients)):
        assert set(mine) == set(theirs), f"{kind}: {sorted(set(mine) ^ set(theirs))} on one side only"
        most = max((_size(t) for t in theirs.values()), default=0.0)
        for name, t in theirs.items():
            assert mine[name].dtype == t.dtype, f"{kind} {name}: {mine[name].dtype}, not {t.dtype}"
            assert mine[name].shape == t.shape, f"{kind} {name}: shape {tuple(mine[name].shape)}, not {tuple(t.shape)}"
            if t.is_floating_point() or t.is_complex():
                apart = _size(torch.nan_to_num(mine[name]) - torch.nan_to_num(t))
                assert apart <= worst * max(_size(t), 0.01 * most), f"{kind} {name}: off by {apart:.2e} of {_size(t):.2e}"
                assert torch.equal(mine[name].isnan(), t.isnan()), f"{kind} {name}: NaN on one side only"
            else:
                assert torch.equal(mine[name], t), f"{kind} {name}: {mine[name]}, not {t}"


def _size(t: Tensor) -> float:
    wide = torch.nan_to_num(t if t.is_complex() else t.double())
    return wide.abs().max().item() if t.numel() else 0.0


def refused(task: Task, layout: str, *words: str, **more: Any) -> str:
    """Assert that a layout is refused before the first step, with a message that holds every one of `words`."""
    steps: list[Any] = []
    with pytest.raises(Refused) as caught:
        run(task, layout, progress=steps.append, **more)
    message = str(caught.value)
    assert not steps, f"{len(steps)} steps were run before {message}"
    for word in words:
        assert word in message, message
    for fault in caught.value.faults:
        assert fault.cure, f"no remedy: {message}"
    return message
