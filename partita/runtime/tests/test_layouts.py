"""Every layout opens every other layout's checkpoint: the same parameters and optimizer state, bit for bit.

A row whose strategies are not in the garden yet joins by itself once they are.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.outcome import run
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import GARDEN
from partita.workload import GPT, Workload

pytestmark = pytest.mark.gloo
STEPS = 2
MICROBATCHES = 2
SETTINGS = {"one_f_one_b": {"microbatches": MICROBATCHES}}  # what a strategy has no default for


@dataclass(frozen=True)
class Layout:
    """A mesh, and the strategies on it by name, innermost first."""

    mesh: dict[str, int]
    strategies: tuple[str, ...] = ()


LAYOUTS = {
    "one": Layout({}),
    "dp2": Layout({"dp": 2}, ("ddp",)),
    "tp2": Layout({"tp": 2}, ("tensor_parallel",)),
    "dp2xtp2": Layout({"dp": 2, "tp": 2}, ("tensor_parallel", "ddp")),
    "pp2": Layout({"pp": 2}, ("one_f_one_b",)),
    "fsdp2": Layout({"dp": 2}, ("fsdp",)),
    "tp2xpp2": Layout({"pp": 2, "tp": 2}, ("tensor_parallel", "one_f_one_b")),
}
HERE = {name: layout for name, layout in LAYOUTS.items() if all(s in GARDEN for s in layout.strategies)}
RING = zip(HERE, [*list(HERE)[1:], next(iter(HERE))], strict=True)  # each saves once and loads once
NEXT = list(RING)
OTHERS = [pair for pair in itertools.product(HERE, HERE) if pair not in NEXT]


@pytest.fixture(scope="module")
def subject():
    spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=16, tie_embeddings=True)
    return subject_of(Workload("gpt", spec, batch=8), synthetic=True)


def trained(subject, name, steps, **settings):
    layout = HERE[name]
    program = replace(capture(subject, 8 // MICROBATCHES), microbatches=MICROBATCHES)
    keep = frozenset({"state", "optimizer"})
    training = Training(steps, MICROBATCHES, keep=keep, audit=False, **settings)
    return run(Mesh.of(layout.mesh), subject, [GARDEN[s](**SETTINGS.get(s, {})) for s in layout.strategies], program, training)


@pytest.fixture(scope="module")
def saved(subject, tmp_path_factory):
    """The run folder of a layout and the whole tensors it ended with."""
    kept = {}

    def of(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            kept[name] = folder, trained(subject, name, STEPS, folder=folder).tensors
        return kept[name]

    return of


def opens(subject, saved, source, target):
    """Without one step of training, what was loaded is what was saved."""
    folder, before = saved(source)
    after = trained(subject, target, STEPS, resume=folder)
    assert after.losses == []
    for kind in ("state", "optimizer"):
        assert after.tensors[kind].keys() == before[kind].keys()
        assert len(before[kind]) > 10
        for name, t in before[kind].items():
            assert after.tensors[kind][name].dtype == t.dtype
            assert torch.equal(after.tensors[kind][name], t), (kind, name)


@pytest.mark.parametrize(("source", "target"), NEXT, ids=[f"{a}-{b}" for a, b in NEXT])
def test_a_checkpoint_opens_under_the_next_layout(source, target, subject, saved):
    opens(subject, saved, source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), OTHERS, ids=[f"{a}-{b}" for a, b in OTHERS])
def test_a_checkpoint_opens_under_every_layout(source, target, subject, saved):
    opens(subject, saved, source, target)
