"""The subject a workload describes: a catalogue model, a transformers config, or a user's own factory."""

import importlib
from typing import Any

import torch
from torch import nn

from partita.errors import Fault, Refused
from partita.runtime.models import build, factory, hints_of
from partita.runtime.subject import Subject, held_tokens_of, labelled_loss, labelled_of, optimizer_of, token_loss, tokens_of
from partita.workload import MLP, ResNet, Workload


def subject_of(workload: Workload, *, synthetic: bool = False) -> Subject:
    """The task a workload describes.

    Args:
        workload: Any model; `hf:` needs transformers, `python:` runs the user's code.
        synthetic: Seeded random batches; no data is read.

    Raises:
        Refused: If the module cannot be built or says nothing of its batches, or transformers is missing.
    """
    if workload.model.startswith("hf:"):
        return _transformers(workload, synthetic=synthetic)
    if workload.model.startswith("python:"):
        return factory.subject(workload)
    spec = workload.spec
    assert spec is not None, f"{workload.model!r} has no spec"

    def make() -> nn.Module:
        torch.manual_seed(workload.seed)
        return build(spec).to(getattr(torch, workload.dtype))

    if isinstance(spec, ResNet | MLP):
        return Subject(make, labelled_of(workload), labelled_loss, optimizer_of(workload), ("x",), hints_of(spec))
    batches, held_out = (read(workload, spec.vocab, spec.sequence, synthetic=synthetic) for read in (tokens_of, held_tokens_of))
    assert batches is not None, "a token model always has batches"
    return Subject(make, batches, token_loss, optimizer_of(workload), ("tokens",), hints_of(spec), held_out)


def config_text(workload: Workload) -> str:
    """The config.json of an `hf:` workload, with what the plan overrides."""
    return _room(workload).config_text(workload)


def _transformers(workload: Workload, *, synthetic: bool) -> Subject:
    """A module of transformers, which is loaded only when asked for."""
    return _room(workload).subject(workload, synthetic)


def _room(workload: Workload) -> Any:
    try:
        return importlib.import_module("partita.runtime.models.hugging_face")
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        law = "an hf: model is the real module that transformers builds from the config"
        cure = "pip install transformers"
        raise Refused(
            Fault("P108", f"{workload.model!r} needs transformers", "it is not installed", law, cure, "workload.model")
        ) from None
