"""What must hold between the four nouns of a plan: workload, cluster, mesh, strategies."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partita.cluster import Testbed, Where
from partita.errors import Fault
from partita.plans.numbers import divisors, listed, multiples
from partita.program.switched import PORTS
from partita.strategy import Place, Strategy, microbatches
from partita.workload import GPT, Llama, Workload


@dataclass(frozen=True)
class Parts:
    """A plan before it is one.

    Args:
        workload: None where Python passes the model later.
        cluster: Its name, and how many devices it has (None: any number of ranks is legal, as on `here`).
        mesh: (axis, size) pairs as written, outermost first.
        bad: Places already found wrong; laws about them say nothing.
    """

    workload: Workload | None
    cluster: Where
    devices: int | None
    ranks: int
    mesh: tuple[tuple[str, int], ...]
    strategies: tuple[Strategy, ...]
    bad: frozenset[str] = frozenset()

    def size(self, axes: Iterable[str]) -> int:
        """Ranks along all of `axes` together."""
        sizes = dict(self.mesh)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def placed(self, place: Place) -> tuple[str, ...]:
        """The axes of the strategies that stand at `place`."""
        return tuple(axis for s in self.strategies if s.place == place for axis in s.axes)


def plan_faults(parts: Parts) -> list[Fault]:
    """Every broken law whose inputs could be read."""
    return [fault for inputs, law in LAWS if not _touched(parts.bad, inputs) for fault in law(parts)]


def _touched(bad: frozenset[str], inputs: tuple[str, ...]) -> bool:
    return any(b == i or b.startswith((f"{i}.", f"{i}[")) for b in bad for i in inputs)


def mesh_multiplies_out(parts: Parts) -> list[Fault]:
    have = math.prod(size for _, size in parts.mesh)
    if have == parts.ranks:
        return []
    sizes = " x ".join(f"{axis} = {size}" for axis, size in parts.mesh) or "no axes"
    cures = [
        f"{axis} = {parts.ranks // (have // size)}"
        for axis, size in parts.mesh
        if parts.ranks % (have // size) == 0 and parts.ranks // (have // size) != size
    ]
    cure = " or ".join([*cures, f"ranks = {have}"])
    law = "the product of the mesh equals ranks"
    what = f"the mesh has {have} ranks, the cluster {parts.ranks}"
    return [Fault("P103", what, f"{sizes}; ranks = {parts.ranks}", law, cure, "mesh")]


def ranks_have_devices(parts: Parts) -> list[Fault]:
    if parts.devices is None or parts.ranks <= parts.devices:
        return []
    return [
        Fault(
            "P118",
            f"{parts.ranks} ranks on {parts.cluster!r}",
            have=f"ranks = {parts.ranks}, devices = {parts.devices}",
            law="a rank needs a device of its own",
            cure=f"ranks = {parts.devices} or less, or a larger cluster",
            at="cluster.ranks",
        )
    ]


def axes_are_distinct(parts: Parts) -> list[Fault]:
    names = [axis for axis, _ in parts.mesh]
    law = "an axis is one direction of the mesh"
    twice = sorted({n for n in names if names.count(n) > 1})
    return [Fault("P105", f"axis {n!r} stands twice in the mesh", ", ".join(names), law, "another name", "mesh") for n in twice]


def axes_exist(parts: Parts) -> list[Fault]:
    names = [axis for axis, _ in parts.mesh]
    return [
        Fault(
            "P105",
            f"{s.name} uses axis {axis!r}, which the mesh has not",
            have=f"mesh axes: {', '.join(names) or 'none'}",
            law="a strategy splits over an axis of the mesh; an axis of size 1 is legal and moves nothing",
            cure=f"{axis} = 1 in [mesh]" + (f", or axis = {' or '.join(map(repr, names))}" if names else ""),
            at=f"strategy.{s.name}.axis",
        )
        for s in parts.strategies
        for axis in s.axes
        if axis not in names
    ]


def axes_are_used_once(parts: Parts) -> list[Fault]:
    law = "every mesh axis is used by exactly one strategy"
    faults = []
    for axis in dict.fromkeys(axis for axis, _ in parts.mesh):
        users = [s.name for s in parts.strategies for a in s.axes if a == axis]
        if not users:
            cure = f"a [[strategy]] with axis = {axis!r}, or leave {axis} out of [mesh]"
            faults.append(Fault("P105", f"axis {axis!r} is used by no strategy", "strategies: 0", law, cure, f"mesh.{axis}"))
        if len(users) > 1:
            have = f"{axis}: {', '.join(users)}"
            cure = "one of them, or an axis for each"
            faults.append(Fault("P105", f"axis {axis!r} is used by {len(users)} strategies", have, law, cure, f"mesh.{axis}"))
    return faults


def strategies_are_in_order(parts: Parts) -> list[Fault]:
    right = sorted(parts.strategies, key=lambda s: s.place)
    if list(parts.strategies) == right:
        return []
    return [
        Fault(
            "P106",
            "the strategies stand in the wrong order",
            have=", ".join(s.name for s in parts.strategies),
            law="innermost first: " + ", ".join(p.name.lower() for p in Place),
            cure=", ".join(s.name for s in right),
            at="strategy",
        )
    ]


def batch_divides(parts: Parts) -> list[Fault]:
    work = parts.workload
    data = parts.size(axis for s in parts.strategies for axis in s.batch_axes)
    if work is None:
        return []
    rounds = microbatches(parts.strategies, 1)
    each = rounds * work.accumulate
    if work.batch % (data * each) == 0:
        return []
    cures = [f"batch = {multiples(work.batch, data * each)}"]
    if work.batch % (data * rounds) == 0:
        cures.append(f"accumulate = {listed(divisors(work.batch // (data * rounds)))}")
    if rounds > 1 and work.batch % (data * work.accumulate) == 0:
        cures.append(f"microbatches = {listed(divisors(work.batch // (data * work.accumulate)))}")
    if work.batch % each == 0:
        cures.append(f"data ranks = {listed(divisors(work.batch // each))}")
    pipelined = f", microbatches = {rounds}" if rounds > 1 else ""
    return [
        Fault(
            "P104",
            f"batch = {work.batch} does not divide among {data} data ranks",
            have=f"batch = {work.batch}, data ranks = {data}, accumulate = {work.accumulate}{pipelined}",
            law=f"global batch = data ranks x accumulate x {'microbatches x ' * bool(pipelined)}microbatch size",
            cure="; ".join(cures),
            at="workload.batch",
        )
    ]


def switch_is_there(parts: Parts) -> list[Fault]:
    """A switch is a part of this machine: of its loopback, or of a testbed."""
    if parts.cluster == "here" or isinstance(parts.cluster, Testbed) or parts.devices is None:
        return []
    law = "a switch that adds up is one of this machine's: on its loopback, or in a testbed"
    return [
        Fault(
            "P115",
            f"no switch adds up on {parts.cluster!r}",
            have=f"{s.name} over {s.switch[0]}: reduce = {s.switch[1]!r}",
            law=law,
            cure='cluster.name = "testbed" or "here"; or a strategy that needs no switch, such as ddp',
            at=f"strategy.{s.name}.reduce",
        )
        for s in parts.strategies
        if s.switch
    ]


def switch_has_bits(parts: Parts) -> list[Fault]:
    """A slot of a switch has a bit for each rank."""
    law = "a slot of the switch has a bit for each rank"
    return [
        Fault(
            "P112",
            f"{axis} = {size} is too many for a switch",
            f"{axis} = {size}",
            law,
            f"{axis} = {PORTS} or less",
            f"mesh.{axis}",
        )
        for axis in (s.switch[0] for s in parts.strategies if s.switch)
        if (size := parts.size([axis])) > PORTS
    ]


def sizes_divide(parts: Parts) -> list[Fault]:
    """Whole heads, and equal parts of the MLP and the vocabulary, on every rank of a tensor axis.

    One head of keys is held by every rank; the vocabulary of an `hf:` model, which nobody chose for the mesh, may stay whole.
    """
    work = parts.workload
    if work is None or not isinstance(work.spec, GPT | Llama):
        return []
    spec = work.spec
    sizes = {"heads": spec.heads, "ffn": spec.width, "vocab": spec.vocab}
    if work.model.startswith("hf:"):
        del sizes["vocab"]
    if isinstance(spec, Llama) and spec.key_heads not in (1, spec.heads):
        sizes["kv_heads"] = spec.key_heads
    return [
        fault
        for s in parts.strategies
        if s.place == Place.TENSOR and len(s.axes) == 1 and s.modules == ("*",)
        for fault in _splits(s, s.axes[0], parts.size(s.axes), sizes, work.model)
    ]


def _splits(strategy: Strategy, axis: str, ranks: int, sizes: dict[str, int], model: str) -> list[Fault]:
    legal = listed(divisors(math.gcd(*sizes.values())))
    faults = []
    for dim, size in sizes.items():
        if size % ranks:
            whole = dim.endswith("heads")
            law = f"each rank owns {'whole' if whole else 'an equal part of'} {dim}, so {axis} must divide {size}"
            cure = f"{axis} = {legal}" + ("" if whole else f", or {dim} = {multiples(size, ranks)}")
            what = f"{type(strategy).__name__}(axis={axis!r}) cannot split dim {dim!r} of {model}"
            faults.append(Fault("P104", what, f"{dim} = {size}, {axis} = {ranks}", law, cure, f"mesh.{axis}"))
    return faults


_WORK = tuple(f"workload.{k}" for k in ("model", "heads", "kv_heads", "hidden", "ffn", "vocab"))

LAWS: tuple[tuple[tuple[str, ...], Callable[[Parts], list[Fault]]], ...] = (
    (("mesh", "cluster.ranks"), mesh_multiplies_out),
    (("cluster",), ranks_have_devices),
    (("mesh",), axes_are_distinct),
    (("strategy",), axes_exist),
    (("strategy",), axes_are_used_once),
    ((), strategies_are_in_order),
    (("mesh", "strategy", "workload.batch", "workload.accumulate"), batch_divides),
    (("cluster.name", "strategy"), switch_is_there),
    (("mesh", "strategy"), switch_has_bits),
    (("mesh", *_WORK), sizes_divide),
)
