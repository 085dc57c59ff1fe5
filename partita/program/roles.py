"""What each rank of a pipeline does: its stages' parts of the program, taking turns as the schedule says.

    rank 0    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1    then, once a step: tied gradients, loss, norm, optimizer
    rank 1    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1

A receive stands where its sender runs, ranks in turn, so that both ends of a channel have one order of messages.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.program.alike import Short, standing_for, turned
from partita.program.blocks import renumbered
from partita.program.events import RECEIVED, Collective, Compute, Event, Kind, Phase, Repeat, Tensor
from partita.program.fold import unfold
from partita.program.program import Pipeline, Program, Turn
from partita.program.schedules import Action, Pass, Schedule
from partita.program.stages import AFTER, EVERYWHERE, Stages

LOSS_BYTES = 16  # two float64: the weighted loss and its weight
SEND, RECEIVE = "send", "receive"
EVERY_RANK = (Kind.INPUT, Kind.BUFFER)  # what every rank of the pipeline has


def lower(schedule: Schedule, crossings: Sequence[tuple[bool, bool]]) -> tuple[tuple[Turn, ...], ...]:
    """Per rank, the schedule with its messages.

    Args:
        schedule: A legal one.
        crossings: Per cut: whether anything crosses it forward, and backward.

    Raises:
        RuntimeError: If ranks wait for each other.
    """
    place, last = schedule.placement, schedule.stages - 1
    turns: list[list[Turn]] = [[] for _ in schedule.order]
    at, done = [0] * schedule.ranks, set()

    def waits(action: Action) -> bool:
        stage, kind, microbatch = action
        if kind == Pass.WEIGHT:
            return False
        way, before = ("F", stage - 1) if kind == Pass.FORWARD else ("B", stage + 1)
        return 0 <= before <= last and (way, before, microbatch) not in done

    def run(rank: int, action: Action) -> None:
        stage, kind, microbatch = action
        turns[rank].append(Turn(f"{stage}{kind.value}", microbatch))
        if kind == Pass.WEIGHT:
            return
        way, to = ("F", stage + 1) if kind == Pass.FORWARD else ("B", stage - 1)
        done.add((way, stage, microbatch))
        if 0 <= to <= last and place[to] != rank and crossings[min(stage, to)][way == "B"]:
            turns[rank].append(Turn(f"{stage}SEND_{way}", microbatch))
            turns[place[to]].append(Turn(f"{to}RECV_{way}", microbatch))

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.order):
            if at[rank] < len(order) and not waits(order[at[rank]]):
                run(rank, order[at[rank]])
                at[rank], moved = at[rank] + 1, True
    if any(i < len(order) for i, order in zip(at, schedule.order, strict=True)):
        raise RuntimeError(f"the ranks of {schedule.name} wait for each other at {at}")
    return tuple(map(tuple, turns))


def roles(program: Program, stages: Stages, schedule: Schedule, axis: str) -> tuple[Program, ...]:
    """The program of each rank of the pipeline axis.

    Args:
        program: Flat, under the axes inside the pipeline.
        stages: It cut.
        schedule: Of one round.
        axis: Name of the pipeline axis.
    """
    turns = lower(schedule, [(bool(c.forward), bool(c.backward)) for c in stages.crossings])
    caster = _Caster(program, stages, schedule, axis)
    return tuple(caster.role(rank, schedule.held[rank], turns[rank]) for rank in range(schedule.ranks))


def alike_roles(short: Short, schedule: Schedule, axis: str) -> tuple[Program, ...]:
    """The program of each rank, those of one kind cast once: they have the same tensors and events.

    Args:
        short: One rank of each kind.
        schedule, axis: As of `roles`.
    """
    ends = [(bool(c.forward), bool(c.backward)) for c in short.stages.crossings]
    turns = lower(schedule, [ends[min(s, len(ends) - 1)] for s in range(schedule.stages - 1)])
    placement = tuple(next(r for r in set(short.stands) if s in schedule.held[r]) for s in short.place)
    caster = _Caster(short.program, short.stages, replace(schedule, placement=placement), axis)
    cast: dict[int, Program] = {}
    found = []
    for rank, kind in enumerate(short.stands):
        if kind not in cast:
            held = tuple(short.place[s] for s in schedule.held[kind])
            cast[kind] = caster.role(kind, held, turned(turns[kind], short.place))
        mine, behind = schedule.held[rank], short.behind(schedule.held[rank], schedule.held[kind])
        own = Pipeline(axis, rank, mine, schedule.stages, turns[rank], schedule.microbatches, behind)
        found.append(standing_for(cast[kind], own))
    return tuple(found)


@dataclass
class _Caster:
    program: Program
    stages: Stages
    schedule: Schedule
    axis: str

    def __post_init__(self) -> None:
        assert unfold(self.program) is self.program, "a pipeline is cut from a flat program"
        self.of: dict[int, list[Event]] = defaultdict(list)  # stage -> its events, in order
        after: list[Event] = []
        for event, stage in zip(self.program.events(), self.stages.of, strict=True):
            if event.phase in AFTER:
                after.append(event)
            else:
                for s in range(self.stages.count) if stage == EVERYWHERE else (stage,):
                    self.of[s].append(event)
        self.ids = {t.name: t.id for t in self.program.parameters()}
        self.always = {t.id for t in self.program.tensors if t.kind in EVERY_RANK} | {self.program.loss}
        self.states: dict[str, list[int]] = defaultdict(list)  # parameter -> optimizer state
        for t in self.program.tensors:
            if t.kind == Kind.OPTIMIZER:
                self.states[t.name.rpartition(".")[0]].append(t.id)
        self.after = self._owned(after)
        self.sources = {
            o: e for e in self.program.events() if isinstance(e, Compute) and e.phase == Phase.BACKWARD for o in e.outs
        }

    def role(self, rank: int, held: tuple[int, ...], turns: tuple[Turn, ...]) -> Program:
        mine = {name for name, at in self.stages.holders.items() if set(at) & set(held)}
        parts = self._parts(held, turns)
        gradients = self._gradients(mine, [e for s in held for e in self.of[s]])
        program = replace(
            self.program,
            segments=(*parts, *self._once(rank, mine, gradients)),
            gradients=gradients,
            axes={**self.program.axes, self.axis: self.schedule.ranks},
            pipeline=Pipeline(self.axis, rank, held, self.stages.count, turns, self.schedule.microbatches),
        )
        return self._held(program, held, mine)

    # ---- what is computed
    def _parts(self, held: Sequence[int], turns: Iterable[Turn]) -> list[Repeat]:
        """Segments by part: forward of each stage, then backward from the deepest; messages where they come first."""
        ran = {turn.part for turn in turns}
        found: dict[str, tuple[Event, ...]] = {}
        for s in held:
            found |= {f"{s}RECV_F": self._messages(s, RECEIVE, "F"), f"{s}F": self._phase(s, forward=True)}
            found |= {f"{s}SEND_F": self._messages(s + 1, SEND, "F")}
        for s in reversed(held):
            found |= {f"{s}RECV_B": self._messages(s + 1, RECEIVE, "B"), f"{s}B": self._phase(s, forward=False)}
            if f"{s}I" in ran:
                leads = s > 0 and self.stages.crossings[s - 1].backward
                ins, weights = self._apart(found[f"{s}B"]) if leads else ((), found[f"{s}B"])
                found |= {f"{s}I": ins, f"{s}W": weights}
            found |= {f"{s}SEND_B": self._messages(s, SEND, "B")}
        return [Repeat(1, events, part=part) for part, events in found.items() if part in ran]

    def _phase(self, stage: int, *, forward: bool) -> tuple[Event, ...]:
        return tuple(e for e in self.of[stage] if (e.phase == Phase.FORWARD) == forward)

    def _messages(self, cut: int, op: str, way: str) -> tuple[Event, ...]:
        """What crosses the cut before stage `cut`."""
        if not 0 < cut < self.stages.count:
            return ()
        crossing = self.stages.crossings[cut - 1]
        ids, phase = (crossing.forward, Phase.FORWARD) if way == "F" else (crossing.backward, Phase.BACKWARD)
        return tuple(
            Collective(op, self.axis, (i,), self.program.local_bytes(i), self.program.tensors[i].dtype, phase) for i in ids
        )

    def _apart(self, backward: Sequence[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """The backward pass as what leads to the input, and what only leads to gradients of parameters."""
        ends = set(self.program.gradients.values())  # gradients, then whatever is read on the way to them alone
        readers: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        late: set[int] = set()
        for at in reversed(range(len(backward))):
            event = backward[at]
            if not isinstance(event, Compute) or event.op == "drop":
                continue
            for o in event.outs:
                if readers[o] and all(ends.issuperset(outs) for outs in readers[o]):
                    ends.add(o)
            if event.outs and ends.issuperset(event.outs):
                late.add(at)
            for i in event.ins:
                readers[i].append(event.outs)
        return (
            tuple(e for at, e in enumerate(backward) if at not in late),
            tuple(e for at, e in enumerate(backward) if at in late),
        )

    # ---- what happens once
    def _gradients(self, mine: Iterable[str], events: Sequence[Event]) -> dict[int, int]:
        """Parameter -> its gradient as this rank makes it: of a tied one, this rank's summand."""
        made = {o for e in events if isinstance(e, Compute) for o in e.outs}

        def here(gradient: int) -> int | None:
            if gradient in made:
                return gradient
            event = self.sources.get(gradient)
            found = [
                h for i in (event.ins if event and event.op in ("add", "add_", "detach") else ()) if (h := here(i)) is not None
            ]
            return found[0] if found else None

        wanted = {p: here(g) for p, g in self.program.gradients.items() if self.program.tensors[p].name in mine}
        return {p: g for p, g in wanted.items() if g is not None}

    def _owned(self, events: Iterable[Event]) -> list[tuple[Event, frozenset[str]]]:
        """What happens once, each with the parameters it is for; of none it is for all."""
        tensors = self.program.tensors
        names = {t.id: {t.name} for t in self.program.parameters()}
        names |= {g: {tensors[p].name} for p, g in self.program.gradients.items()}
        names |= {i: {name} for name, ids in self.states.items() for i in ids}
        found = []
        for event in events:
            read = event.ins if isinstance(event, Compute) else event.tensors
            own = frozenset().union(*(names.get(i) or names.get(self._root(i), ()) for i in read))
            names.update({o: set(own) for o in event.outs} if isinstance(event, Compute) else {})
            found.append((event, own))
        return found

    def _once(self, rank: int, mine: set[str], gradients: Mapping[int, int]) -> list[Repeat]:
        """Tied gradients, then the loss, then what the program did once of this rank's parameters."""
        calls = [*self._tied(rank, gradients)]
        if self.schedule.ranks > 1:
            calls.append(
                Collective("all_reduce", self.axis, (self.program.loss,), LOSS_BYTES, "float64", Phase.SYNC, "loss", once=True)
            )
        steps = [event for event, names in self.after if not names or names & mine]
        sync = [e for e in steps if e.phase == Phase.SYNC]
        rest = [e for e in steps if e.phase != Phase.SYNC]
        return [Repeat(1, tuple(events)) for events in ([*sync, *calls], rest) if events]

    def _root(self, tensor: int) -> int:
        root = self.program.tensors[tensor].root
        return root if root >= 0 else tensor

    def _tied(self, rank: int, gradients: Mapping[int, int]) -> list[Collective]:
        """A parameter on several ranks: each sends its summand of the gradient to the others."""
        found = []
        for p, others in self.shared(rank).items():
            if p in gradients:
                g = gradients[p]
                nbytes, dtype, name = self.program.local_bytes(g), self.program.tensors[g].dtype, self.program.tensors[p].name
                for op in (SEND, RECEIVE):
                    found += [Collective(op, self.axis, (g,), nbytes, dtype, Phase.SYNC, name, once=True) for _ in others]
        return found

    def shared(self, rank: int) -> dict[int, list[int]]:
        """Parameter -> the other ranks that hold it, where there are any."""
        found = {}
        for name, at in self.stages.holders.items():
            ranks = sorted({self.schedule.placement[s] for s in at})
            if rank in ranks and len(ranks) > 1:
                found[self.ids[name]] = [r for r in ranks if r != rank]
        return found

    # ---- what is held
    def _held(self, program: Program, held: Sequence[int], mine: set[str]) -> Program:
        """The role with the tensors of this rank only; what comes from a neighbour is an input."""
        received = {i for s in held if s and s - 1 not in held for i in self.stages.crossings[s - 1].forward}
        touched = {i for e in program.events() for i in _touched(e)} | self.always | {self.ids[name] for name in mine}
        touched |= {i for name in mine for i in self.states.get(name, ())}
        kept = sorted(touched | {self._root(i) for i in touched})
        names = {old: new for new, old in enumerate(kept)}

        def of(i: int) -> Tensor:
            t = self.program.tensors[i]
            if i in received:
                return replace(t, id=names[i], kind=Kind.INPUT, name=f"{RECEIVED}{i}", root=names[i])
            return replace(t, id=names[i], root=names[self._root(i)])

        return replace(
            program,
            tensors=tuple(map(of, kept)),
            segments=tuple(replace(s, events=tuple(renumbered(e, names) for e in s.events)) for s in program.segments),
            gradients={names[p]: names[g] for p, g in program.gradients.items()},
            loss=names.get(program.loss, -1),
        )


def _touched(event: Event) -> tuple[int, ...]:
    return (*event.ins, *event.outs) if isinstance(event, Compute) else event.tensors
