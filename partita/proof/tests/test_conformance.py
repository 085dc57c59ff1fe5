"""The conformance kit holds ours to the law, and an outsider's found by entry point; it names every law a broken one breaks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

import partita as pt
from partita.cli.main import main
from partita.cluster import cluster_of
from partita.errors import Fault
from partita.mesh import Mesh
from partita.pages import text
from partita.program import Collective, Phase
from partita.program.fold import unfold
from partita.program.program import before_optimizer
from partita.program.text import to_json
from partita.proof import laws
from partita.proof.conformance import Unlawful
from partita.proof.laws import large
from partita.proof.purity import TorchUsed, without_torch
from partita.runtime.programs import program_of
from partita.simulate import estimate
from partita.strategies import DDP, GARDEN, HOUSE, TensorParallel
from partita.strategy import Case, Promise, Strategy, check, compose
from partita.workload import GPT, Llama, Workload

TWO = ({"dp": 2, "tp": 2}, {})


# ---------------------------------------------------------------- ours
# One of the relaxed stands for the others; schedules that others are like, and what needs eight ranks, are of the slow lane.
MANY_ALIKE = [n for n in HOUSE if GARDEN[n].promise == Promise.RELAXED and n != "slim_dp"]
MANY_ALIKE += ["tesseract", "looped_bfs", "dualpipev"]


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in MANY_ALIKE else ()) for n in HOUSE])
def test_our_strategies_keep_every_law(name):
    (proof,) = pt.check_strategy(GARDEN[name], quick=True)
    assert proof.proved
    assert proof.said == proof.heard > 10  # accumulated, clipped


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("name", HOUSE)
def test_our_strategies_keep_every_law_in_every_case(name):
    proofs = pt.check_strategy(GARDEN[name])
    assert len(proofs) == len(GARDEN[name].cases())
    assert all(p.proved for p in proofs)


@pytest.mark.law
@pytest.mark.parametrize("sizes", [{"dp": 64, "tp": 64}, {"tp": 4096, "dp": 1}, {"dp": 4096, "tp": 1}])
def test_saying_is_pure_on_4096_ranks(sizes):
    mesh, ours = Mesh.of(sizes), [TensorParallel(), DDP()]
    program = large()
    before = to_json(program)
    with without_torch(TensorParallel), without_torch(DDP):
        assert check(program, ours, mesh) == []
        said = compose(program, ours, mesh)
    assert to_json(program) == before
    assert {c.axis for c in said.collectives()} == {a for a, n in sizes.items() if n > 1}


@pytest.mark.law
@pytest.mark.parametrize("mesh", [{"dp": 4, "tp": 2}, {"tp": 2, "dp": 2, "outer": 2}])
@pytest.mark.parametrize("layers", [3, 5, 9])
def test_folding_changes_no_figure_of_a_composition(mesh, layers):
    sizes = {"layers": layers, "hidden": 128, "heads": 8, "vocab": 256, "sequence": 16}
    ours = [TensorParallel(), DDP(bucket=1 << 16)] + [DDP(axis="outer")] * ("outer" in mesh)
    for spec in (GPT(**sizes, tie_embeddings=True), Llama(**sizes, kv_heads=4)):
        program = program_of(Workload(spec.kind, spec, batch=32, accumulate=2, clip=1.0))
        folded, flat = (compose(p, ours, Mesh.of(mesh)) for p in (program, unfold(program)))
        assert folded.collectives() != []
        calls = [[(c.op, c.axis, c.nbytes, c.dtype, c.once) for c in p.collectives()] for p in (folded, flat)]
        assert calls[0] == calls[1]
        one, two = (estimate(p, cluster_of("8x8-h100"), Mesh.of(mesh), Workload("gpt", batch=32)) for p in (folded, flat))
        assert (one.peak, one.traffic, one.flop, one.memory) == (two.peak, two.traffic, two.flop, two.memory)
        assert one.step_seconds == pytest.approx(two.step_seconds, rel=1e-9)


@pytest.mark.law
def test_torch_really_raises_while_saying():
    """The check can fail: a function, an op on a tensor there was, an import, a name of the module."""
    there = torch.ones(2)
    for use in (
        lambda: there + 1,
        lambda: there.view(1, 2),
        lambda: torch.zeros(2),
        lambda: __import__("torch").get_num_threads(),
    ):

        @dataclass(frozen=True)
        class Impure(DDP):
            pass

        with pytest.raises(TorchUsed), without_torch(Impure):
            use()
    assert torch.zeros(2).sum() == 0  # all is as it was
    assert sys.modules["torch"] is torch


# ---------------------------------------------------------------- an outsider's
OUTSIDE = '''
"""Sums every gradient by itself."""

from dataclasses import dataclass, replace
from typing import ClassVar

from partita.program import Collective, Compute, Phase
from partita.program.data import batch_faults, rewrite_batch, say_loss
from partita.program.fold import unfold
from partita.program.program import insert
from partita.strategy import Case, Place, Promise, Strategy


@dataclass(frozen=True)
class OneByOne(Strategy):
    """One all_reduce a parameter."""

    name: ClassVar[str] = "one_by_one"
    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "dp"

    def check(self, program, mesh):
        return batch_faults(program, self.axis, mesh.size(self.axis), "OneByOne")

    def rewrite(self, program, mesh):
        size = mesh.size(self.axis)
        if size == 1:
            return replace(program, axes={**program.axes, self.axis: 1})
        said = unfold(rewrite_batch(program, self.axis, size, self.name))
        made = {o: at for at, e in enumerate(said.events()) if isinstance(e, Compute) for o in e.outs}
        after, at = {}, 0
        for p in reversed([p for p in said.parameters() if p.id in said.gradients]):
            g = said.gradients[p.id]
            at = max(at, made[g])
            size = said.local_bytes(p.id)
            call = Collective("all_reduce", self.axis, (g,), size, p.dtype, Phase.BACKWARD, p.name, overlapped=True, once=True)
            after.setdefault(at, []).append(call)
        return say_loss(insert(said, after), self.axis)

    def apply(self, site):
        site.share_batch(self.axis)
        site.synchronise_batch_norm(self.axis)
        site.average_gradients(self.axis, [[n] for n, p in reversed(list(site.module.named_parameters()))])

    @classmethod
    def cases(cls):
        return (Case({"dp": 2}, {}, workload="mlp"), Case({"dp": 2, "tp": 2}, {}), Case({"tp": 2, "dp": 2}, {}))


@dataclass(frozen=True)
class Boastful(OneByOne):
    """Says twice what it moves."""

    name: ClassVar[str] = "boastful"

    def rewrite(self, program, mesh):
        said = super().rewrite(program, mesh)
        mine = lambda e: isinstance(e, Collective) and e.axis == self.axis and e.overlapped
        parts = (tuple(replace(e, nbytes=2 * e.nbytes) if mine(e) else e for e in s.events) for s in said.segments)
        return replace(said, segments=tuple(replace(s, events=p) for s, p in zip(said.segments, parts)))
'''
PLAN = """
[workload]
model = "gpt"
dropout = 0.1
[cluster]
ranks = 4
[mesh]
dp = 2
tp = 2
[[strategy]]
name = "tensor_parallel"
[[strategy]]
name = "one_by_one"
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """An installed package with an entry point."""
    (tmp_path / "outside_strategies.py").write_text(OUTSIDE)
    about = tmp_path / "outside_strategies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-strategies\nVersion: 1.0\n")
    points = "one_by_one = outside_strategies:OneByOne\nboastful = outside_strategies:Boastful\n"
    (about / "entry_points.txt").write_text(f"[partita.strategies]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("outside_strategies", None)


@pytest.mark.gloo
@pytest.mark.law
def test_an_outsiders_strategy_found_by_entry_point_keeps_every_law(outside):
    kind = GARDEN["one_by_one"]
    proofs = pt.check_strategy(kind)
    assert len(proofs) == 3
    assert all(p.proved for p in proofs)
    assert proofs[0].said > len(DDP.cases())


@pytest.mark.gloo
def test_an_outsiders_plan_is_proved_against_a_process_that_imports_no_strategy(outside, tmp_path, monkeypatch):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    asked = []
    run = pt.prove.__globals__["prove_plan"].__globals__["fresh"]
    monkeypatch.setitem(pt.prove.__globals__["prove_plan"].__globals__, "fresh", lambda w: asked.append(w) or run(w))
    proof = pt.prove(pt.load(path))
    assert proof.proved, proof.reasons
    assert [w.spec.dropout for w in asked] == [0.1]
    assert "proved" in text.proof(proof.json())


@pytest.mark.gloo
def test_the_command_names_what_differs_and_leaves_with_one(outside, tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("one_by_one", "boastful"))
    assert main(["prove", str(path), "--json"]) == 1
    printed = capsys.readouterr()
    got = json.loads(printed.out)
    assert (got["proved"], got["differs"], printed.err) == (False, ["nbytes"], "")
    first = got["square"]["first_difference"]
    assert (first["axis"], first["fields"], first["said"]["nbytes"]) == ("dp", ["nbytes"], 2 * first["heard"]["nbytes"])
    assert got["reasons"][0].startswith("square: rank 0, call 0 on dp differs in nbytes: said all_reduce on dp of ")
    assert main(["prove", str(path), "--ranks", "3"]) == 2
    assert "--ranks 4" in capsys.readouterr().err


# ---------------------------------------------------------------- broken ones
def variant(base=DDP, **members: Any) -> type[Strategy]:
    """A strategy like `base` but for some members, with a name of its own."""
    body = {"name": "broken", "__annotations__": {"name": ClassVar[str]}, "__module__": __name__} | members
    return dataclass(frozen=True)(type("Broken", (base,), body))


def after(change):
    return lambda self, program, mesh: change(self, DDP.rewrite(self, program, mesh), mesh)


def uses_torch(self, said, mesh):
    return said.with_notes(str(torch.zeros(1).item()))


def imports_torch(self, said, mesh):
    import torch.nn.functional as F  # noqa: PLC0415

    return said.with_notes(F.__name__)


TOLD: list[int] = []


def says_another(self, said, mesh):
    TOLD.append(1)
    return said.with_notes(f"said {len(TOLD)} times")


def writes_to_its_input(self, program, mesh):
    program.gradients.clear()
    return program


def spares_blocks(self, said, mesh):
    """Other bytes in a repeated body."""
    parts = (
        replace(
            s, events=tuple(replace(e, nbytes=2 * e.nbytes) if isinstance(e, Collective) and s.block else e for e in s.events)
        )
        for s in said.segments
    )
    return replace(said, segments=tuple(parts))


def counts_parameters(self, said, mesh):
    """One call a parameter, of a folded program too: the body's count only once."""
    size = mesh.size(self.axis)
    calls = [Collective("all_reduce", self.axis, (), 8, "float32", Phase.SYNC, p.name, once=True) for p in said.parameters()]
    return before_optimizer(said, tuple(calls)) if size > 1 else said


def talks_alone(self, said, mesh):
    return before_optimizer(said, (Collective("all_reduce", self.axis, (), 8, "float32", Phase.SYNC, once=True),))


def no_cure(self, program, mesh):
    return [Fault("P104", "no", "7", "law")] if mesh.size(self.axis) == 7 else []


class Plain(DDP):
    """No dataclass of its own."""


class Nameless(Strategy):
    pass


@dataclass(frozen=True)
class WithObject(DDP):
    name: ClassVar[str] = "with_object"
    thing: Any = field(default_factory=object)


BROKEN = {
    "no class": (3, "It is a frozen dataclass", "is no subclass of partita.strategy.Strategy"),
    "abstract": (Nameless, "It is a frozen dataclass", "it has no apply, cases, check, rewrite"),
    "no dataclass": (Plain, "It is a frozen dataclass", "it is no frozen dataclass"),
    "no place": (variant(place=3), "It is a frozen dataclass", "no class variable place of type Place"),
    "name taken": (variant(name="tensor_parallel"), "A plan can name it", "'tensor_parallel' is taken by partita.strategies"),
    "name no word": (variant(name="a b"), "A plan can name it", "'a b' is no identifier"),
    "object as setting": (WithObject, "Its settings are plain data", "not JSON serializable"),
    "one axis": (
        variant(cases=classmethod(lambda c: [Case({"dp": 2}, {})])),
        "Its cases try two axes",
        "1 cases, none on two axes",
    ),
    "uses torch": (variant(rewrite=after(uses_torch)), "Saying is pure, on 4,096 ranks", "torch was used: torch.zeros"),
    "imports torch": (variant(rewrite=after(imports_torch)), "Saying is pure, on 4,096 ranks", "torch was used: torch.nn"),
    "another word": (variant(rewrite=after(says_another)), "Saying is pure", "it says something else the second time"),
    "writes": (variant(rewrite=writes_to_its_input), "Saying is pure", "it changes the program it is given"),
    "folds": (variant(rewrite=after(counts_parameters)), "What is said of a folded program", "48 calls folded, 72 written out"),
    "folds other bytes": (variant(rewrite=after(spares_blocks)), "What is said of a folded program", "bytes float32 folded"),
    "alone": (variant(rewrite=after(talks_alone)), "An axis of size 1 moves nothing", "all_reduce on dp of 8 bytes"),
    "forgets": (
        variant(rewrite=after(lambda s, p, m: replace(p, gradients={}))),
        "It forgets no gradient",
        "it loses gradients",
    ),
    "takes all": (
        variant(check=lambda s, p, m: [], rewrite=lambda s, p, m: p),
        "A size that divides nothing is refused",
        "7 ranks an axis",
    ),
    "no cure": (variant(check=no_cure), "A size that divides nothing is refused", "'no' has no cure"),
    "raises": (variant(check=lambda s, p, m: 1 / 0), "Saying is pure", "ZeroDivisionError"),
}


@pytest.mark.law
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_law_is_named(what):
    kind, law, why = BROKEN[what]
    with pytest.raises(Unlawful) as caught:
        pt.check_strategy(kind, cases=())
    named = [reason for reason in caught.value.reasons if reason.startswith(law)]
    assert named, caught.value
    assert any(why in reason for reason in named), caught.value
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


@pytest.mark.law
def test_every_law_is_broken_by_something():
    broken = {law for _, law, _ in BROKEN.values()}
    for law in (laws.has_the_form, *laws.LAWS):
        assert any(law.__doc__.startswith(name) for name in broken), law.__doc__


@pytest.mark.law
def test_all_broken_laws_are_told_at_once():
    kind = variant(name="a b", check=lambda s, p, m: [], rewrite=lambda s, p, m: p, cases=classmethod(lambda c: ()))
    with pytest.raises(Unlawful) as caught:
        pt.check_strategy(kind)
    assert len(caught.value.reasons) == 3
    assert str(caught.value).startswith("Broken breaks 3 law(s):\n  - ")


def cases_of(*found: Case) -> Sequence[Case]:
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("members", "case", "why"),
    [
        ({}, Case({"dp": 2, "tp": 2}, {"bukcet": 3}), "TypeError"),
        ({}, Case({"dp": 2, "xp": 2}, {}), "no strategy of the house uses axis 'xp'"),
        (
            {"apply": lambda self, site: None},
            Case({"dp": 2}, {}, workload="mlp"),
            "square: rank 0, call 0 on dp differs in call",
        ),
        ({"apply": lambda self, site: 1 / 0}, Case({"dp": 2}, {}, workload="mlp"), "ZeroDivisionError"),
    ],
)
def test_a_case_that_is_not_proved_is_named_with_its_reason(members, case, why):
    with pytest.raises(Unlawful) as caught:
        pt.check_strategy(variant(**members), cases=[case])
    (*_, reason) = caught.value.reasons
    told = " ".join(caught.value.reasons)
    assert reason.startswith("case ")
    assert " on dp=2" in reason
    assert why in told
