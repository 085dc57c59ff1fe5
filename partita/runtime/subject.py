"""What is trained, as callables, and the parts catalogue models have: losses, batches, optimizers."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.errors import Fault
from partita.runtime.corpus import batches_of, held_out_of
from partita.runtime.master import Mastered
from partita.workload import GPT, MLP, ResNet, Workload

Batches = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A training task.

    Args:
        make: Builds the module; seeded, so every call gives the same values.
        batches: The global batch of a step, as keyword arguments; tensors have samples on dim 0.
        loss: loss(output, batch) -> a scalar, or (sum, weight).
        optimizer: Builds the optimizer of a module's parameters.
        forward: Batch keys passed to the module; None means those its forward accepts (``**kwargs`` accepts all).
        held_out: Held-out batches by number; None where there are none.
        hints: Parameter glob -> its named dims, e.g. {"*.qkv.weight": "(three heads e) hidden"}.
    """

    make: Callable[[], nn.Module]
    batches: Batches
    loss: Callable[[Any, dict[str, Any]], Tensor | tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    forward: tuple[str, ...] | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    held_out: Callable[[int], dict[str, Any]] | None = None

    def keys(self, module: nn.Module, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """The batch keys this module is called with."""
        if self.forward is not None:
            return self.forward
        accepted = inspect.signature(module.forward).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
            return tuple(batch)
        return tuple(key for key in batch if key in accepted)

    def call(self, module: nn.Module, batch: Mapping[str, Any]) -> Any:
        """The module's output on a batch."""
        return module(**{key: batch[key] for key in self.keys(module, batch)})

    def evaluate(self, module: nn.Module, batch: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        """The loss on a batch, as a 0-dim tensor or a pair; nothing but the autograd graph outlives it."""
        return self.judge(self.call(module, batch), batch)

    def judge(self, output: Any, batch: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of an output, in the same form."""
        value = self.loss(output, batch)
        if isinstance(value, tuple | list):  # of another length: refused where its form is checked
            return tuple(map(_single, value))  # pyright: ignore[reportReturnType]
        return _single(value)


def _single(value: Any) -> Any:
    """A tensor of one element as a number without dims."""
    return value.reshape(()) if isinstance(value, Tensor) and value.dim() and value.numel() == 1 else value


# ---- losses
def token_loss(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Mean cross-entropy of the next token."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def labelled_loss(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Mean cross-entropy of the label."""
    return F.cross_entropy(output, batch["y"])


# ---- batches
def tokens_of(workload: Workload, vocab: int, sequence: int, *, synthetic: bool) -> Batches:
    """Batches {tokens, targets}, int64 (samples, sequence)."""
    if not synthetic:
        return batches_of(_known(workload, vocab, sequence))

    def batches(step: int) -> dict[str, Any]:
        drawn = torch.randint(vocab, (workload.batch, sequence + 1), generator=generator_of(workload.seed, step))
        return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}

    return batches


def held_tokens_of(workload: Workload, vocab: int, sequence: int, *, synthetic: bool) -> Batches | None:
    """Batches of the text that is held out; None if no text is read."""
    return None if synthetic else held_out_of(_known(workload, vocab, sequence))


def _known(workload: Workload, vocab: int, sequence: int) -> Workload:
    return workload if workload.spec else replace(workload, spec=GPT(vocab=vocab, sequence=sequence))


def labelled_of(workload: Workload) -> Batches:
    """Random vectors or images with random labels."""
    spec, dtype = workload.spec, getattr(torch, workload.dtype)
    assert isinstance(spec, ResNet | MLP)
    shape, classes = (
        ((spec.channels, spec.size, spec.size), spec.classes) if isinstance(spec, ResNet) else ((spec.inputs,), spec.outputs)
    )

    def batches(step: int) -> dict[str, Any]:
        generator = generator_of(workload.seed, step)
        x = torch.randn(workload.batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
        return {"x": x, "y": torch.randint(classes, (workload.batch,), generator=generator)}

    return batches


def generator_of(seed: int, step: int) -> torch.Generator:
    """Random numbers of one step, the same on every rank."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))


# ---- optimizers
def optimizer_faults(optimizer: Any) -> list[Fault]:
    """What is wrong with what a factory of optimizers returned."""
    law = "optimizer(module) returns one torch.optim.Optimizer over parameters of the module"
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"optimizer= returned a {type(optimizer).__name__}"
        return [Fault("P102", what, law=law, cure="lambda module: torch.optim.AdamW(module.parameters())", at="optimizer")]
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name, law = type(optimizer).__name__, "a step runs forward and backward once, before the optimizer"
        return [Fault("P115", f"{name} needs a closure", law=law, cure="torch.optim.AdamW, SGD, ...", at="optimizer")]
    return []


def optimizer_of(workload: Workload) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The named optimizer with torch's own defaults, over the parameters that train, on master copies if asked for."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[workload.optimizer]

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        made = kind([p for p in module.parameters() if p.requires_grad], lr=workload.learning_rate)
        return Mastered(made, getattr(torch, workload.master)) if workload.master else made

    return optimizer
