"""Small subjects, and a run on real ranks compared with the single device."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from partita.mesh import Mesh
from partita.runtime.batch import Feed
from partita.runtime.capture import capture
from partita.runtime.loop import train_ranks
from partita.runtime.ranks import run_ranks
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.runtime.whole import train_whole
from partita.strategies.data.ddp import DDP
from partita.strategies.tensor.tensor_parallel import TensorParallel
from partita.strategy import Strategy
from partita.workload import GPT, Workload


@dataclass
class Split:
    """A run on ranks: what every rank told, and the whole tensors by kind."""

    ranks: list[dict[str, Any]]
    whole: dict[str, dict[str, Tensor]]

    @property
    def losses(self) -> list[float]:
        return self.ranks[0]["losses"]


def strategies_for(mesh: dict[str, int]) -> list[Strategy]:
    return [TensorParallel()] * ("tp" in mesh) + [DDP()] * ("dp" in mesh)


def run_split(subject: Subject, mesh: dict[str, int], steps: int = 3, accumulate: int = 1, **settings: Any) -> Split:
    """Train on forked ranks."""
    feed = Feed(subject.batches)
    subject = replace(subject, batches=feed)
    feed(0)
    program = capture(subject, max(feed.samples // accumulate, 1))
    program = replace(program, microbatches=accumulate, clip=settings.get("clip") is not None)
    settings.setdefault("keep", frozenset({"state", "gradients", "optimizer"}))
    training = Training(steps, microbatches=accumulate, **settings)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(
            Mesh.of(mesh), lambda net: train_ranks(net, subject, strategies_for(mesh), program, training), folder=Path(folder)
        )
        whole = {kind: load_file(f"{folder}/{name}") for kind, name in ranks[0]["files"].items()}
    return Split(ranks, whole)


def apart(split: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """Largest error of a tensor as the contract defines it; the names must be the same."""
    assert set(split) == set(whole), set(split) ^ set(whole)
    top = max((t.double().abs().max().item() for t in whole.values() if t.numel()), default=0.0)
    errors = [0.0]
    for name, t in whole.items():
        scale = max(t.double().abs().max().item(), 0.01 * top)
        gap = (split[name].double() - t.double()).abs().max().item()
        errors.append(gap / scale if scale else gap)
    return max(errors)


@pytest.fixture
def split() -> Callable[..., Split]:
    return run_split


@pytest.fixture
def equal() -> Callable[..., Split]:
    """Runs a subject split and whole, and asserts that both are the same and that the recorder heard the ledger."""

    def check(
        subject: Subject, mesh: dict[str, int], steps: int = 3, accumulate: int = 1, bound: float = 1e-10, **settings: Any
    ) -> Split:
        schedule = (settings.get("schedule", "constant"), settings.get("warmup", 0), settings.get("horizon"))
        whole = train_whole(subject, steps, clip=settings.get("clip"), schedule=schedule)
        got = run_split(subject, mesh, steps, accumulate, **settings)
        for a, b in zip(got.losses, whole.losses, strict=True):
            assert abs(a - b) <= bound * abs(b), (got.losses, whole.losses)
        names = {n for n in got.whole["state"] if n in whole.state}
        assert names == set(whole.state)
        assert apart({n: got.whole["state"][n] for n in names}, whole.state) <= bound
        assert apart(got.whole["gradients"], whole.gradients) <= bound
        for rank in got.ranks:
            assert rank["losses"] == got.losses
            assert [e[:4] for e in rank["ledger"]] == [h[:4] for h in rank["heard"]]
        return got

    return check


@pytest.fixture
def gpt() -> Subject:
    spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=16)
    return subject_of(Workload("gpt", spec, batch=8, dtype="float64"), synthetic=True)


@pytest.fixture(autouse=True)
def _plain_dtype() -> Any:
    kept = torch.get_default_dtype()
    yield
    torch.set_default_dtype(kept)
