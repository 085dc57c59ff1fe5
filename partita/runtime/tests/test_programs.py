"""Folding changes nothing, a small capture stands for a large one, and kept programs come back equal."""

import collections
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from partita.program.events import Compute, Phase
from partita.program.fold import fold, stretch, unfold
from partita.program.split import derive, rewrite
from partita.program.text import FORMAT, from_json, to_json
from partita.runtime.capture import capture
from partita.runtime.programs import program_of
from partita.runtime.task import subject_of
from partita.workload import GPT, MLP, Llama, ResNet, Workload

pytestmark = pytest.mark.law

TOKENS = {
    "gpt": GPT(5, 32, 4, 64, 16),
    "gpt tied, dropout": GPT(5, 32, 4, 64, 16, tie_embeddings=True, dropout=0.1),
    "llama": Llama(5, 32, 4, 2, 64, 16, ffn=48),
}
CLASSES = [("batch",), ("heads", "ffn"), ("heads", "ffn", "vocab"), ("sequence",)]


def workload(spec, **more):
    return Workload(spec.kind, spec, **{"batch": 4, **more})


def caught(spec):
    return capture(subject_of(workload(spec), synthetic=True), 4)


def line(e):
    return e.op, e.module, e.phase, getattr(e, "flop", None), getattr(e, "nbytes", None)


def wiring(program):
    """Per event: what made each input, and whose storage it is."""
    made = {o: (n, k) for n, e in enumerate(program.events()) if isinstance(e, Compute) for k, o in enumerate(e.outs)}
    tensors = program.tensors
    return [
        [(made.get(i, tensors[i].name), made.get(tensors[i].root, tensors[tensors[i].root].name)) for i in e.ins]
        for e in program.events()
    ]


def split(program, names):
    atoms = set().union(*(program.classes[n] for n in names))
    return rewrite(program, derive(program, "x", 2, atoms))


@pytest.mark.parametrize("spec", TOKENS.values(), ids=TOKENS)
def test_folding_and_stretching_give_the_flat_program_back(spec):
    flat = caught(spec)
    folded, stretched = fold(flat), stretch(fold(caught(replace(spec, layers=3))), 5)
    for other in (folded, stretched):
        assert [s.count for s in other.segments if s.block] == [3, 3, 3]
        assert len(list(other.events())) < len(list(flat.events()))
        assert other.flop() == flat.flop()
        again = unfold(other)
        assert [line(e) for e in again.events()] == [line(e) for e in flat.events()]
        assert wiring(again) == wiring(flat)
        assert [t.name for t in again.parameters()] == [t.name for t in flat.parameters()]
        assert len(again.gradients) == len(flat.gradients)
        copies = other.copies()
        assert sum(t.nbytes * copies.get(t.id, 1) for t in other.parameters()) == sum(t.nbytes for t in flat.parameters())


@pytest.mark.parametrize("names", CLASSES, ids=str)
@pytest.mark.parametrize("spec", TOKENS.values(), ids=TOKENS)
def test_splitting_commutes_with_folding(spec, names):
    flat = caught(spec)
    wanted, folded = split(flat, names), split(fold(flat), names)
    assert [line(c) for c in folded.collectives()] == [
        line(replace(c, module=folded_name(c.module))) for c in wanted.collectives()
    ]
    assert [line(e) for e in unfold(folded).events()] == [line(e) for e in wanted.events()]
    assert folded.flop() == wanted.flop()


def folded_name(module):
    """The middle blocks of a folded program all bear the name of block 1."""
    return module.replace("blocks.2", "blocks.1").replace("blocks.3", "blocks.1")


def test_two_axes_commute_with_folding():
    flat = caught(TOKENS["gpt"])
    both = [split(p, ("heads", "ffn")) for p in (flat, fold(flat))]
    flat2, folded2 = (rewrite(p, derive(p, "dp", 2, p.classes["batch"])) for p in both)
    assert [line(e) for e in unfold(folded2).events()] == [line(e) for e in flat2.events()]


@pytest.mark.parametrize("spec", [ResNet(2, 2, 8), MLP(), GPT(2, 32, 4, 64, 16)], ids=lambda s: s.kind)
def test_what_has_no_three_equal_blocks_stays_flat(spec):
    p = caught(spec)
    assert fold(p) is p


def test_blocks_that_differ_stay_flat():
    p = caught(GPT(5, 32, 4, 64, 16))
    at = next(n for n, e in enumerate(p.events()) if e.module == "blocks.2.mlp" and e.op == "gelu")
    events = list(p.segments[0].events)
    events[at] = replace(events[at], op="silu")
    other = replace(p, segments=(replace(p.segments[0], events=tuple(events)), *p.segments[1:]))
    assert fold(other) is other


@pytest.mark.parametrize("spec", [*TOKENS.values(), ResNet(1, 2, 8), MLP()], ids=str)
def test_a_small_capture_stands_for_a_large_one(spec):
    said, flat = (
        program_of(workload(spec, batch=12, accumulate=2)),
        capture(subject_of(workload(spec, batch=6), synthetic=True), 6),
    )
    assert said.microbatches == 2
    assert said.flop() == 2 * flat.flop()
    again = unfold(said)
    assert [line(e) for e in again.events()] == [line(e) for e in flat.events()]
    shapes = [[[p.tensors[i].shape for i in e.outs] for e in p.events()] for p in (again, flat)]
    assert shapes[0] == shapes[1]


ODD = [
    GPT(1, 8, 1, 16, 4), GPT(3, 8, 8, 16, 1, ffn=1), GPT(3, 1, 1, 3, 2, ffn=4),
    GPT(3, 12, 3, 7, 5, ffn=9, tie_embeddings=True, dropout=0.1),
    Llama(3, 8, 4, 2, 16, 4, ffn=3), Llama(3, 16, 8, 1, 2, 2, ffn=1), Llama(3, 4, 2, 2, 16, 1),
    ResNet(1, 1, 1, 2, 1, 4), ResNet(1, 2, 4, 10, 3, 96), MLP(1, 4, 4, 2), MLP(3, 1, 4, 2), MLP(5, 4, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("spec", ODD, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_sizes_of_one_and_odd_sizes_are_captured(spec, batch):
    p = program_of(workload(spec, batch=batch))
    assert p.opaque_share() == 0
    assert {p.atoms[a] for a in p.classes["batch"]} == {batch}
    assert p.flop() == capture(subject_of(workload(spec, batch=batch), synthetic=True), batch).flop()


def test_a_program_comes_back_from_the_cache(tmp_path):
    w = workload(TOKENS["gpt"])
    first = program_of(w, tmp_path)
    (kept,) = (tmp_path / "programs").iterdir()
    assert kept.suffix == ".json"
    assert program_of(w, tmp_path) == first == program_of(w)
    assert program_of(replace(w, spec=replace(w.spec, layers=9), batch=64), tmp_path).copies()
    assert len(list((tmp_path / "programs").iterdir())) == 1, "depth and batch need no capture of their own"
    program_of(replace(w, dtype="bfloat16"), tmp_path)
    assert len(list((tmp_path / "programs").iterdir())) == 2
    kept.write_text("{")
    assert program_of(w, tmp_path) == first, "what cannot be read is captured again"


def test_a_cached_program_needs_no_torch(tmp_path):
    program_of(workload(TOKENS["gpt"]), tmp_path)
    code = (
        "import sys; from pathlib import Path; from partita.workload import GPT, Workload;"
        "from partita.runtime.programs import program_of;"
        f"p = program_of(Workload('gpt', GPT(5, 32, 4, 64, 16), batch=4), Path({str(tmp_path)!r}));"
        "print(p.flop(), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == [str(program_of(workload(TOKENS["gpt"])).flop()), "False"]


def test_json_round_trips_folded_and_split_programs():
    p = split(fold(caught(TOKENS["llama"])), ("heads", "ffn", "vocab"))
    assert from_json(to_json(p)) == p
    assert json.loads(to_json(p))["partita_program"] == FORMAT


def test_a_large_model_is_said_in_no_time():
    program_of(workload(GPT(3)))
    start = time.perf_counter()
    p = program_of(workload(GPT(96, 12288, 96, 50257, 2048), batch=1536, dtype="bfloat16"))
    assert time.perf_counter() - start < 5
    parameters = sum(t.nbytes // 2 * p.copies().get(t.id, 1) for t in p.parameters())
    assert 174.5e9 < parameters < 176e9  # GPT-3 has 175 billion; Brown et al. 2020, arXiv:2005.14165, Table 2.1
    counted = collections.Counter()
    for e, n in p.counted():
        counted[e.phase] += getattr(e, "flop", 0) * n
    tokens, embeddings = 1536 * 2048, (50257 + 2048) * 12288
    product, attention = 2 * (parameters - embeddings) * tokens, 96 * 4 * tokens * 2048 * 12288
    assert abs(counted[Phase.FORWARD] / (product + attention) - 1) < 1e-3
