"""A subject from a user's own parts: model, batches, loss, optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from partita.errors import Fault, refuse
from partita.runtime.batch import Feed
from partita.runtime.look import copied
from partita.runtime.subject import Subject

Model = Callable[[], nn.Module] | nn.Module
Loss = Callable[[Any, dict[str, Any]], Any]
OptimizerFactory = Callable[[nn.Module], Optimizer]
Batches = Callable[[int], dict[str, Any]] | Iterable[dict[str, Any]]


def subject_from(
    model: Model,
    batches: Batches | None,
    loss: Loss | None,
    optimizer: OptimizerFactory | None,
    forward: tuple[str, ...] | None,
) -> Subject:
    """A subject from a user's own parts.

    Raises:
        Refused: P102, naming every part that is missing or of the wrong kind.
    """
    faults = []
    if batches is None:
        faults.append(_missing("batches", "batches(step) -> {name: tensor}, or an iterable of such dicts"))
    if loss is not None and not callable(loss):
        faults.append(_missing("loss", "loss(output, batch) -> a scalar, or (sum, weight)"))
    if optimizer is not None and not callable(optimizer):
        faults.append(_missing("optimizer", "optimizer(module) -> a torch.optim.Optimizer over its parameters"))
    if not callable(model):
        faults.append(_missing("model", "a factory that returns a module, or a module"))
    refuse(faults)
    assert batches is not None
    whole = model
    make = (lambda: _copied(whole)) if isinstance(whole, nn.Module) else whole
    return Subject(make, Feed(batches), loss or (lambda output, batch: output), optimizer or _adamw, forward)


def _missing(name: str, cure: str) -> Fault:
    return Fault(
        "P102",
        f"{name}= is missing or cannot be called",
        law="a model of your own comes with its batches",
        cure=cure,
        at=f"train({name}=)",
    )


def _copied(module: nn.Module) -> nn.Module:
    """The user's module itself in a forked rank is a copy already; here it is copied, so that it is never changed."""
    return copied(module)


def _adamw(module: nn.Module) -> Optimizer:
    return AdamW(p for p in module.parameters() if p.requires_grad)
