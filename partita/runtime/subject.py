"""What is trained, as callables: the same for catalogue models, `hf:`, `python:` and a user's own module."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.runtime.corpus import batches_of
from partita.runtime.models import build, hints_of
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
        hints: Parameter glob -> its named dims, e.g. {"*.qkv.weight": "(three heads e) hidden"}.
    """

    make: Callable[[], nn.Module]
    batches: Batches
    loss: Callable[[Any, dict[str, Any]], Tensor | tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    forward: tuple[str, ...] | None = None
    hints: Mapping[str, str] = field(default_factory=dict)

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
        """The loss on a batch; nothing but the autograd graph outlives it."""
        return self.loss(self.call(module, batch), batch)


def subject_of(workload: Workload, synthetic: bool = False) -> Subject:  # noqa: FBT001, FBT002
    """The task a workload describes.

    Args:
        workload: Any model; `hf:` needs transformers, `python:` runs the user's code.
        synthetic: Seeded random batches; no data is read.

    Raises:
        Refused: If the module cannot be built or says nothing of its batches.
    """
    if workload.model.startswith("hf:"):
        return importlib.import_module("partita.runtime.models.hugging_face").subject(workload, synthetic)
    if workload.model.startswith("python:"):
        return importlib.import_module("partita.runtime.models.factory").subject(workload)
    spec = workload.spec
    assert spec is not None, f"{workload.model!r} has no spec"

    def make() -> nn.Module:
        torch.manual_seed(workload.seed)
        return build(spec).to(getattr(torch, workload.dtype))

    if isinstance(spec, ResNet | MLP):
        return Subject(make, _labelled(workload), labelled_loss, optimizer_of(workload), ("x",), hints_of(spec))
    batches = tokens_of(workload, spec.vocab, spec.sequence, synthetic=synthetic)
    return Subject(make, batches, token_loss, optimizer_of(workload), ("tokens",), hints_of(spec))


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
        known = workload if workload.spec else replace(workload, spec=GPT(vocab=vocab, sequence=sequence))
        return batches_of(known)

    def batches(step: int) -> dict[str, Any]:
        drawn = torch.randint(vocab, (workload.batch, sequence + 1), generator=generator_of(workload.seed, step))
        return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}

    return batches


def _labelled(workload: Workload) -> Batches:
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
def optimizer_of(workload: Workload) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """The named optimizer with torch's own defaults, over the parameters that train."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[workload.optimizer]

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return kind([p for p in module.parameters() if p.requires_grad], lr=workload.learning_rate)

    return optimizer
