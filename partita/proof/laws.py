"""The laws of a strategy that need no ranks: its form, and what it says.

Each law is a function of the class that returns what is wrong, in words; its docstring is its name.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache

from partita.cluster import cluster_of
from partita.cost.figures import Figures
from partita.errors import CODES, Fault, Refused
from partita.mesh import Mesh
from partita.plans import Plan, load_text
from partita.program import Compute, Program
from partita.program.fold import unfold
from partita.program.rounds import rounds_of
from partita.program.text import from_json, to_json
from partita.proof.purity import without_torch
from partita.runtime.programs import program_of
from partita.simulate import predict
from partita.strategies import GARDEN, HOUSE
from partita.strategy import Pipelined, Place, Promise, Strategy, check, compose, compose_roles
from partita.workload import GPT, Workload

MANY = 4096  # ranks on which saying must work
ODD = 7  # divides nothing the kit uses
DATACENTRE = "8x8-h100"
CLOSE = 1e-9  # relative: a sum of times in another order

Law = Callable[[type[Strategy]], list[str]]


def broken(kind: type[Strategy]) -> list[str]:
    """Every law that a class breaks, by name; the laws of saying are tried only on what has the form of a strategy."""
    found = _told(has_the_form, kind)
    if found:
        return found
    return [reason for law in LAWS for reason in _told(law, kind)]


def _told(law: Law, kind: type[Strategy]) -> list[str]:
    name = (law.__doc__ or law.__name__).strip().rstrip(".")
    try:
        return [f"{name}: {reason}" for reason in law(kind)]
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]


# ---------------------------------------------------------------- form
def has_the_form(kind: type[Strategy]) -> list[str]:
    """It is a frozen dataclass with name, place, promise and cases."""
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        return [f"{kind!r} is no subclass of partita.strategy.Strategy"]
    if missing := sorted(kind.__abstractmethods__):
        return [f"it has no {', '.join(missing)}"]
    reasons = []
    if "__dataclass_params__" not in vars(kind) or not vars(kind)["__dataclass_params__"].frozen:
        reasons.append("it is no frozen dataclass, so a setting cannot be a field")
    for word, type_ in (("name", str), ("place", Place), ("promise", Promise)):
        if not isinstance(getattr(kind, word, None), type_):
            reasons.append(f"it has no class variable {word} of type {type_.__name__}")
    return reasons


def has_a_name_of_its_own(kind: type[Strategy]) -> list[str]:
    """A plan can name it."""
    if kind.name in HOUSE and GARDEN[kind.name] is not kind:
        return [f"the name {kind.name!r} is taken by {GARDEN[kind.name].__module__}"]
    return [] if kind.name.isidentifier() else [f"{kind.name!r} is no identifier"]


def settings_are_plain(kind: type[Strategy]) -> list[str]:
    """Its settings are plain data that a plan file holds."""
    own = settled(kind)
    lists = json.loads(json.dumps(own.settings()))
    if any(isinstance(v, float) and not math.isfinite(v) for v in lists.values()):
        return [f"a default is no finite number: {lists}"]
    plan = Plan(Workload("gpt", GPT()), mesh=Mesh(tuple((axis, 1) for axis in own.axes)), strategies=[own])
    (back,) = load_text(plan.to_toml(), strategies={kind.name: kind}).strategies
    return [] if back == own else [f"{own} comes back from a plan file as {back}"]


def has_cases_on_two_axes(kind: type[Strategy]) -> list[str]:
    """Its cases try two axes, for a wrong axis cannot be seen on one."""
    cases = list(kind.cases())
    return (
        [] if any(sum(n > 1 for n in case.mesh.values()) > 1 for case in cases) else [f"{len(cases)} cases, none on two axes"]
    )


# ---------------------------------------------------------------- saying
def says_purely(kind: type[Strategy]) -> list[str]:
    """Saying is pure, on 4,096 ranks."""
    own, program = settled(kind), large()
    own, mesh = _on_many(own)
    before = to_json(program)
    with without_torch(kind):
        faults = check(program, [own], mesh)
        said = [] if faults else [[to_json(role) for role in compose_roles(program, [own], mesh)] for _ in range(2)]
    if faults:
        return [f"it refuses sizes that divide: {faults[0].what}; {faults[0].have}"]
    reasons = [] if to_json(program) == before else ["it changes the program it is given"]
    return reasons + ([] if said[0] == said[1] else ["it says something else the second time"])


def says_the_same_of_a_fold(kind: type[Strategy]) -> list[str]:
    """What is said of a folded program is what is said of it written out, and every figure is the same."""
    own, program = settled(kind), small()
    mesh = Mesh(tuple((axis, 2) for axis in own.axes))
    folded, flat = (compose_roles(p, [own], mesh) for p in (program, unfold(program)))
    said = [[c for r in rounds_of(roles) for role in r.roles for c in role.collectives()] for roles in (folded, flat)]
    if len(said[0]) != len(said[1]):
        return [f"{len(said[0])} calls folded, {len(said[1])} written out"]
    for k, (a, b) in enumerate(zip(*said, strict=True)):
        if (a.op, a.axis, a.nbytes, a.dtype) != (b.op, b.axis, b.nbytes, b.dtype):
            one, two = (f"{c.op} on {c.axis} of {c.nbytes} bytes {c.dtype}" for c in (a, b))
            return [f"call {k} is {one} folded, {two} written out"]
    figures = [predict(roles, cluster_of(DATACENTRE), mesh, Workload("gpt", batch=32)) for roles in (folded, flat)]
    return [f"{name} is {a} folded and {b} written out" for name, a, b in _figures(*figures) if a != b]


def _figures(one: Figures, two: Figures) -> list[tuple[str, object, object]]:
    near = math.isclose(one.step_seconds, two.step_seconds, rel_tol=CLOSE)
    return [
        ("traffic", one.traffic, two.traffic),
        ("peak memory", one.peak, two.peak),
        ("flop", one.flop, two.flop),
        ("step time", one.step_seconds, one.step_seconds if near else two.step_seconds),
    ]


def says_nothing_alone(kind: type[Strategy]) -> list[str]:
    """An axis of size 1 moves nothing."""
    own, program = settled(kind), small()
    mesh = Mesh(tuple((axis, 1) for axis in own.axes))
    said = compose(program, [own], mesh)
    reasons = [f"it says {c.op} on {c.axis} of {c.nbytes} bytes" for c in said.collectives()[:1]]
    if not own.axes:  # what splits nothing does something on one device, and may compute more for it
        return reasons
    return reasons + ([] if said.flop() == program.flop() else [f"flop {program.flop()} become {said.flop()}"])


def keeps_what_is_computed(kind: type[Strategy]) -> list[str]:
    """It forgets no gradient and no step of the optimizer."""
    own, program = settled(kind), small()
    roles = compose_roles(program, [own], Mesh(tuple((axis, 2) for axis in own.axes)))
    before, after = ([unfold(p) for p in some] for some in ((program,), roles))
    ops = [sum(isinstance(e, Compute) for p in some for e in p.events()) for some in (before, after)]
    kept = [sum(len(p.gradients) for p in some) for some in (before, after)]
    reasons = [] if kept[1] >= kept[0] else ["it loses gradients"]
    return reasons + ([] if ops[0] <= ops[1] else [f"{ops[0]} ops become {ops[1]}"])


def refuses_what_does_not_divide(kind: type[Strategy]) -> list[str]:
    """A size that divides nothing is refused, with the reason and the cure."""
    own, program = settled(kind), small()
    mesh = Mesh(tuple((axis, ODD) for axis in own.axes))
    if not own.axes:
        return []
    faults: Sequence[Fault]
    try:
        faults = check(program, [own], mesh)
    except Refused as refused:
        faults = refused.faults
    if not faults:
        return [f"it takes {ODD} ranks an axis for 16 heads and 32 samples"]
    return [f"{f.what!r} has no {slot}" for f in faults for slot in ("what", "have", "law", "cure") if not getattr(f, slot)] + [
        f"{f.code} is no code" for f in faults if f.code not in CODES
    ]


LAWS: tuple[Law, ...] = (
    has_a_name_of_its_own,
    settings_are_plain,
    has_cases_on_two_axes,
    says_purely,
    says_the_same_of_a_fold,
    says_nothing_alone,
    keeps_what_is_computed,
    refuses_what_does_not_divide,
)


# ---------------------------------------------------------------- programs to say something of
def large() -> Program:
    """A GPT that splits over MANY ranks on every dim; a new one each time, for a broken strategy may write to it."""
    return from_json(_text(GPT(layers=5, hidden=8 * MANY, heads=MANY, vocab=8 * MANY, sequence=MANY), 2 * MANY))


def small() -> Program:
    """A GPT of five blocks, folded; a new one each time."""
    return from_json(_text(GPT(layers=5, hidden=256, heads=16, vocab=256, sequence=16), 32))


@cache
def _text(spec: GPT, batch: int) -> str:
    return to_json(program_of(Workload("gpt", spec, batch=batch)))


def settled(kind: type[Strategy]) -> Strategy:
    """The strategy with its defaults; what has none is as in its first case."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return kind(**{name: next(iter(kind.cases())).settings[name] for name in needed})


def _on_many(own: Strategy) -> tuple[Strategy, Mesh]:
    """A strategy on a mesh of MANY ranks: of a pipeline, few of them in depth."""
    if isinstance(own, Pipelined):
        deep = 2  # its stages must be no more than the blocks
        return replace(own, microbatches=2 * deep), Mesh((("dp", MANY // deep), (own.axis, deep)))
    return own, Mesh(tuple(zip(own.axes, _sizes(MANY, len(own.axes)), strict=True)) if own.axes else ())


def _sizes(ranks: int, axes: int) -> list[int]:
    """Powers of two, as alike as can be, with product `ranks`."""
    bits = ranks.bit_length() - 1
    return [1 << (bits // axes + (k < bits % axes)) for k in range(axes)]
