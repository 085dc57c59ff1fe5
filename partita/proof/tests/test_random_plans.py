"""Random legal plans commute: what each rank does is what was said, and in float64 the numbers are one device's.

Hypothesis draws the plans; then all plans of one world size run in the same forked ranks, each on a network of its own mesh.
"""

import tempfile
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from partita.errors import PartitaError
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Program
from partita.proof.numerics import compare
from partita.proof.prove import data_ranks, training_of
from partita.proof.square import Call, first_difference, said_calls
from partita.runtime import saved
from partita.runtime.batch import Feed
from partita.runtime.capture import capture
from partita.runtime.net import Net
from partita.runtime.prepare import prepare
from partita.runtime.programs import dressed
from partita.runtime.random import draws
from partita.runtime.ranks import run_ranks
from partita.runtime.record import Recorder
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.runtime.whole import train_whole
from partita.strategies import DDP, FSDP, TensorParallel, Zero1, Zero2
from partita.strategy import Promise, check, compose
from partita.workload import GPT, MLP, Llama, ResNet, Workload

PLANS, TWO_AXES, KINDS = 60, 20, 24  # distinct; on two axes; kinds of model on kinds of mesh
STEPS = 2
MESHES = (
    {"dp": 2}, {"tp": 2}, {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 1}, {"tp": 2, "dp": 1}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2},
    {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "more": 2}, {"more": 2, "dp": 2},
)  # fmt: skip


# ---------------------------------------------------------------- drawing plans
@st.composite
def specs(draw, ways):
    """A tiny model whose heads and widths split `ways` ways."""
    kind = draw(st.sampled_from(["gpt", "llama", "gpt", "llama", "mlp", "resnet"]))
    if kind == "mlp":
        return MLP(draw(st.integers(2, 4)), *(draw(st.sampled_from([4, 8, 12])) for _ in range(3)))
    if kind == "resnet":
        return ResNet(layers=1, stages=draw(st.integers(1, 2)), hidden=4, classes=4, size=draw(st.sampled_from([4, 8])))
    heads = ways * draw(st.integers(1, 2))
    common = {
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "hidden": heads * draw(st.sampled_from([2, 4, 6])),
        "vocab": 4 * draw(st.integers(2, 5)),
        "sequence": draw(st.integers(2, 6)),
        "ffn": draw(st.sampled_from([None, 8, 12, 20])),
        "tie_embeddings": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.1])),
    }
    return GPT(**common) if kind == "gpt" else Llama(**common, kv_heads=draw(st.sampled_from([None, ways])))


@st.composite
def plans(draw):
    mesh = draw(st.sampled_from(MESHES))
    spec = draw(specs(mesh.get("tp", 1)))
    globs = draw(st.sampled_from([("*",), ("*",), ("blocks.*",), ("*.mlp", "layers.*")])) if "tp" in mesh else ("*",)
    buckets = st.sampled_from([1, 1 << 10, 25 << 20])
    strategies = [TensorParallel(modules=globs)] * ("tp" in mesh)
    strategies += [DDP(axis=axis, bucket=draw(buckets)) for axis in mesh if axis != "tp"]
    for at in [n for n, s in enumerate(strategies) if isinstance(s, DDP)][:1]:  # a second data axis sums what is left
        axis, bucket = strategies[at].axis, strategies[at].bucket
        kinds = [strategies[at], Zero1(axis=axis, bucket=bucket), Zero2(axis=axis, bucket=bucket)]
        strategies[at] = draw(st.sampled_from([*kinds, FSDP(axis=axis), FSDP(axis=axis, reshard=False)]))
    accumulate = 1 if isinstance(spec, ResNet) else draw(st.integers(1, 3))
    sized = Mesh.of(mesh)
    samples = 2 if isinstance(spec, ResNet) else draw(st.integers(1, 2))
    workload = Workload(
        type(spec).kind,
        spec,
        batch=data_ranks(strategies, sized) * accumulate * samples,
        accumulate=accumulate,
        dtype=draw(st.sampled_from(["float64", "float64", "float64", "float32", "bfloat16"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        clip=draw(st.sampled_from([None, 0.1])),
        seed=draw(st.integers(0, 3)),
    )
    if workload.dtype == "bfloat16":
        workload = replace(workload, reduce_dtype=draw(st.sampled_from([None, "float32"])))
    return Plan(workload, mesh=sized, strategies=strategies)


def drawn(count):
    """So many distinct plans, always the same ones, spread evenly over kinds of model and mesh."""
    found = {}

    @settings(
        max_examples=8 * count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(plans())
    def keep(plan):
        found.setdefault(kind_of(plan), {})[plan.hash] = plan

    keep()
    rounds = zip_longest(*(kind.values() for kind in found.values()))
    return [plan for one in rounds for plan in one if plan is not None][:count]


def kind_of(plan):
    return plan.workload.model, plan.mesh.axes, tuple(s.name for s in plan.strategies)


# ---------------------------------------------------------------- running them
@dataclass
class Ready:
    """A plan, captured and said."""

    plan: Plan
    subject: Subject
    program: Program
    said: list[Call]


def ready(plan):
    subject = subject_of(plan.workload, synthetic=True)
    subject = replace(subject, batches=Feed(subject.batches))
    subject.batches(0)
    program = dressed(capture(subject, plan.workload.batch // plan.accumulate), plan.workload)
    faults = check(program, plan.strategies, plan.mesh)
    assert not faults, f"{plan.to_toml()}\n{faults[0]}"
    return Ready(plan, subject, program, said_calls(compose(program, plan.strategies, plan.mesh).collectives()))


def stepped(net, one, *, strategies):
    """Some steps of a plan on a rank: its losses, what the recorder heard in the last, and the site."""
    training = training_of(one.plan.workload, STEPS)
    module = one.subject.make()
    step = prepare(net, one.subject, module, one.subject.batches(0), strategies, one.program, training)
    optimizer = one.subject.optimizer(step.site.module)
    step.site.adopt(optimizer)
    losses = []
    for k in range(STEPS):
        optimizer.zero_grad()
        recorder = Recorder(net.axes, step.site.module)
        at = len(net.ledger)
        with recorder:
            losses.append(step.run(one.subject.batches(k), k, optimizer).loss)
    heard = [[h.op, h.axis, h.nbytes, h.dtype] for h in recorder.heard]
    ledger = [e.json()[:4] for e in net.ledger[at:]]
    return losses, heard, ledger, step.site


def whole(one):
    """The same on one device: plain torch, or with dropout one rank under partita's stream."""
    if draws(one.program):
        alone = replace(one, program=replace(one.program, microbatches=1), plan=Plan(replace(one.plan.workload, accumulate=1)))
        losses, _, _, site = stepped(Net(Mesh(), 0), alone, strategies=())
        return losses, saved.whole_state(site), saved.whole_gradients(site)
    clip = one.plan.workload.clip
    got = train_whole(one.subject, STEPS, clip=None if clip is None else (clip, 2.0))
    return got.losses, got.state, got.gradients


def flat(kind, number, tensors):
    return {f"{number}/{kind}/{name}": t.detach().clone().contiguous() for name, t in tensors.items()}


def run_all(world, chosen):
    """All plans in the same ranks; returns (losses, heard by rank, tensors of the split and the whole run) per plan."""

    def work(net):
        nets, told, kept = {}, [], {}
        for number, one in enumerate(chosen):
            net.notes.doing(f"plan {number}: {one.plan.mesh} {one.plan.workload}", slow=True)
            mine = nets.setdefault(one.plan.mesh, None) or Net(one.plan.mesh, net.rank, folder=net.folder, store=net.store)
            nets[one.plan.mesh], mine.notes = mine, net.notes
            try:
                losses, heard, ledger, site = stepped(mine, one, strategies=one.plan.strategies)
            except PartitaError as error:
                told.append({"error": str(error)})
                continue
            state, gradients = saved.whole_state(site), saved.whole_gradients(site)
            told.append({"losses": losses, "heard": heard, "ledger": ledger})
            if net.rank == 0 and one.plan.workload.dtype == "float64":
                losses, *tensors = whole(one)
                told[-1]["whole"] = losses
                for kind, pair in (("state", (state, tensors[0])), ("gradient", (gradients, tensors[1]))):
                    kept |= flat(f"split {kind}", number, pair[0]) | flat(f"whole {kind}", number, pair[1])
        if net.rank == 0:
            save_file(kept, net.folder / "kept.safetensors")
        return told

    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(Mesh((("all", world),)), work, folder=Path(folder))
        return ranks, load_file(Path(folder) / "kept.safetensors")


def numerics(number, told, kept):
    def tensors(side, kind):
        start = f"{number}/{side} {kind}/"
        return {n.removeprefix(start): t for n, t in kept.items() if n.startswith(start)}

    pairs = {kind: (tensors("split", kind), tensors("whole", kind)) for kind in ("state", "gradient")}
    return compare(Promise.REORDERED, (told["losses"], told["whole"]), pairs)


@pytest.mark.law
@pytest.mark.gloo
def test_random_legal_plans_commute():
    torch.manual_seed(0)
    chosen = [ready(plan) for plan in drawn(72)]
    two = [one for one in chosen if sum(n > 1 for _, n in one.plan.mesh.axes) == 2]
    assert len({one.plan.hash for one in chosen}) >= PLANS
    assert len({one.plan.hash for one in two}) >= TWO_AXES
    assert len({kind_of(one.plan)[:2] for one in chosen}) >= KINDS
    assert {s.name for one in chosen for s in one.plan.strategies} == {"ddp", "zero1", "zero2", "fsdp", "tensor_parallel"}
    faults, compared = [], 0
    for world in (2, 4):
        mine = [one for one in chosen if one.plan.mesh.ranks == world]
        ranks, kept = run_all(world, mine)
        for number, one in enumerate(mine):
            told = [rank[number] for rank in ranks]
            wrong = [t["error"] for t in told if "error" in t][:1]
            if not wrong:
                difference = first_difference(one.said, {r: [Call(*h) for h in t["heard"]] for r, t in enumerate(told)})
                wrong += [str(difference)] if difference else []
                wrong += [f"ledger of rank {r}" for r, t in enumerate(told) if t["ledger"] != t["heard"]]
            if not wrong and "whole" in told[0]:
                compared += 1
                found = numerics(number, told[0], kept)
                wrong += [] if found.held else [str(found)]
            faults += [f"{one.plan.to_toml()}\n{w}" for w in wrong]
    assert not faults, f"{len(faults)} of {len(chosen)} plans do not commute; the first:\n{faults[0]}"
    assert compared >= PLANS // 2
