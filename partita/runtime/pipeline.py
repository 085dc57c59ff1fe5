"""Runs a rank's turns of a pipeline: torch's schedule runtime walks the list, the stages are ours.

    list    2RECV_F0  2F0  2SEND_F0 ...        the same turns that the program of this role says
    stage   receives into a leaf, runs the user's module with the calls of other stages passed over, sends what comes of it;
            backward from the gradients received to those of the leaves

Every message goes through the net, so the ledger has it. A parameter of two stages has one summand of its gradient on each.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from partita.program.program import Pipeline, Turn
from partita.program.schedules import Schedule
from partita.runtime.batch import Batch
from partita.runtime.marks import Marks
from partita.runtime.net import Net, Work
from partita.runtime.stages import Item, Key, Staged
from partita.runtime.stored import Stored

FORWARD, FULL, INPUT, WEIGHT, UNSHARD, RESHARD = (
    _ComputationType.FORWARD,
    _ComputationType.FULL_BACKWARD,
    _ComputationType.BACKWARD_INPUT,
    _ComputationType.BACKWARD_WEIGHT,
    _ComputationType.UNSHARD,
    _ComputationType.RESHARD,
)
Values = dict[Key, Tensor]


class Around(Protocol):
    """What the step does around the passes of a stage."""

    marks: Marks

    def stage_forward(self, stage: int, microbatch: int, received: Values) -> tuple[Tensor | None, Values]:
        """What to differentiate (of the last stage; None where nothing counts), and what goes on to the next."""
        ...

    def adding(self, stage: int, microbatch: int, *, last: bool, idle: bool) -> AbstractContextManager[None]:
        """Around a backward pass that makes gradients; `last`: of its stage in this step; `idle`: nothing to learn from."""
        ...

    def nothing(self, stage: int, microbatch: int) -> bool:
        """Whether the loss of a microbatch counts nothing, of the last stage."""
        ...

    def accumulated(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients of these were added to without a hook being called."""
        ...


@dataclass
class Alive:
    """One microbatch on one stage, from its forward to the end of its backward.

    Args:
        received, sent: What crossed the cuts before and after it.
        loss: Of the last stage: what to differentiate.
        back: Gradients of what was sent, handed over by the next stage where it is on the same rank.
        returned: Gradients of what was received, until they are sent.
        pending: Outputs and their gradients, between a backward of the input and that of the weights.
        groups: What the first left for the second.
    """

    received: Values = field(default_factory=dict)
    sent: Values = field(default_factory=dict)
    loss: Tensor | None = None
    back: Values = field(default_factory=dict)
    returned: Values = field(default_factory=dict)
    pending: tuple[list[Tensor], list[Tensor] | None] = field(default_factory=lambda: ([], None))
    groups: list[dict[str, Any]] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """What was received and has a gradient."""
        return [t for t in self.received.values() if t.requires_grad]


class Stage(_PipelineStageBase):
    """One stage as torch's runtime sees it: it only asks for messages, and those go through the net."""

    def __init__(self, pipe: "Pipe", index: int) -> None:
        super().__init__(pipe.module, index, pipe.role.count, pipe.net.device, pipe.net.group(pipe.axis))
        self.pipe = pipe

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self.pipe.post(self.stage_index, fwd_chunk_id, "F")
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        self.pipe.send(self.stage_index, fwd_chunk_id, "F")
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self.pipe.post(self.stage_index, bwd_chunk_id, "B")
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        self.pipe.send(self.stage_index, bwd_chunk_id, "B")
        return []

    # what torch would find out by running a stage is known already
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple[Any, ...]:
        return ()


class Pipe:
    """This rank's part of a pipeline.

    Args:
        net, module: Of the rank; the module holds the parameters of its stages only.
        staged: The mode its calls run under.
        schedule: Of one round.
        role: Of this rank, with its turns.
        stages: Parameter name -> the stages that read it.
        owners: Buffer name -> the stage whose value counts.
    """

    def __init__(
        self,
        net: Net,
        module: nn.Module,
        staged: Staged,
        schedule: Schedule,
        role: Pipeline,
        stages: Mapping[str, Sequence[int]],
        owners: Mapping[str, int],
    ) -> None:
        self.net, self.module, self.staged, self.schedule, self.role = net, module, staged, schedule, role
        self.axis, self.last, self.rank = role.axis, role.count - 1, role.rank
        self.ranks_of = {n: tuple(dict.fromkeys(self._home(s) for s in at)) for n, at in stages.items()}
        self.ranks_of |= {n: (self._home(s),) for n, s in owners.items()}
        named = dict(module.named_parameters())
        self.weights = {s: [named[n] for n, at in stages.items() if s in at and n in named] for s in role.stages}
        mine = set(role.stages)
        self.shared_here = {id(named[n]) for n, at in stages.items() if len(mine & set(at)) > 1}
        self.final = {turn.part: at for at, turn in enumerate(role.turns)}
        self.finals = {s: self._final(s) for s in role.stages}
        self.flying: list[Work] = []
        self.stored: Stored | None = None
        self.runtime = self._runtime()

    def _home(self, stage: int) -> int:
        return self.schedule.placement[stage]

    def _final(self, stage: int) -> Turn:
        """The last turn that adds to gradients of a stage."""
        return next(t for t in reversed(self.role.turns) if t.part in (f"{stage}B", f"{stage}W"))

    def _runtime(self) -> _PipelineScheduleRuntime:
        stages: list[Any] = [Stage(self, s) for s in self.role.stages]
        runtime = _PipelineScheduleRuntime(stages, self.schedule.microbatches, loss_fn=_no_loss, scale_grads=False)
        lists: dict[int, list[Any]] = {r: [_Action.from_str(str(a)) for a in o] for r, o in enumerate(self.schedule.order)}
        runtime._prepare_schedule_with_comms(lists, format="compute_comms")
        runtime.pipeline_order_with_comms[self.rank] = [_action(turn) for turn in self.role.turns]
        for kind, run in ((FORWARD, self._forward), (FULL, self._full), (INPUT, self._input), (WEIGHT, self._weight)):
            runtime.register_custom_function(kind, run)
        return runtime

    def store(self, stored: Stored) -> None:
        """Hold the parameters by rows; a round begins with all of them whole if they stay so."""
        self.stored = stored
        if not stored.reshard:
            begin, end = ([_Action(s, kind) for s in self.role.stages] for kind in (UNSHARD, RESHARD))
            turns = self.runtime.pipeline_order_with_comms
            turns[self.rank] = [*begin, *turns[self.rank], *end]
            self.runtime.register_custom_function(UNSHARD, lambda action, ctx: stored.unshard(action.stage_index))
            self.runtime.register_custom_function(RESHARD, lambda action, ctx: stored.free(action.stage_index))

    # ---- what the step asks
    @property
    def has_loss(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.last in self.role.stages

    def owns(self, name: str) -> bool:
        """Whether this rank's value of a parameter or buffer is the one that counts."""
        return self.ranks_of.get(name, (self._home(self.last),))[0] == self.rank

    def share_loss(self, *numbers: float) -> Any:
        """Numbers that only the last stage knows, on every stage: one, or a list of several."""
        mine = list(numbers) if self.has_loss else [0.0] * len(numbers)
        both = torch.tensor(mine, dtype=torch.float64, device=self.net.device)
        self.net.all_reduce(both, self.axis, label="loss")
        found = both.tolist()
        return found if len(found) > 1 else found[0]

    def tied(self) -> dict[str, list[int]]:
        """Parameters that other ranks hold as well -> those ranks, in order."""
        return {n: sorted(set(at) - {self.rank}) for n, at in self.ranks_of.items() if self.rank in at and len(at) > 1}

    def run(self, parts: Sequence[Batch], around: Around) -> None:
        """All microbatches of a step, round by round."""
        self.around, size = around, self.schedule.microbatches
        for start in range(0, len(parts), size):
            self.start, self.parts = start, parts[start : start + size]
            self.ending = start + size >= len(parts)
            self.alive: defaultdict[tuple[int, int], Alive] = defaultdict(Alive)
            self.posted: dict[tuple[int, int, str], list[tuple[Item, Tensor, Work]]] = {}
            self.runtime.fwd_recv_ops.clear()
            self.runtime.bwd_recv_ops.clear()
            with _silent():
                self.runtime._step_microbatches(return_outputs=False)
            self.land()

    def land(self) -> None:
        """Wait for what is still being sent."""
        for work in self.flying:
            work.wait()
        self.flying = []

    def evaluate(self, batch: Batch, run: Callable[[], Any]) -> Any:
        """One microbatch forward through all stages: what `run` returns, on the rank of the last stage."""
        out, here = None, {}
        for stage in self.role.stages:
            before, after = self._home(stage - 1) if stage else self.rank, self._home(min(stage + 1, self.last))
            if before != self.rank:
                here = self._taken(stage, batch, before)
            with self._passing(stage):
                out, here = self.staged.run(stage, batch, here, run)
            if after != self.rank:
                self.flying += [self.net.send(t, self.axis, after, label=f"{stage}F") for t in here.values()]
        self.land()
        return out

    def _taken(self, stage: int, batch: Batch, peer: int) -> Values:
        """What a stage reads, received at once."""
        rooms = {item.key: self._room(item) for item in self.staged.items(stage, batch)}
        for work in [self.net.receive(room, self.axis, peer, label=f"{stage}F") for room in rooms.values()]:
            work.wait()
        return rooms

    def sum_tied(self, gradients: Mapping[str, Tensor], room: Callable[[str], int]) -> None:
        """Add up, in place, the summands of the gradients that several ranks hold; in the order of the ranks.

        Args:
            gradients: By name.
            room: Elements sent for one: more than it has where another rank owns more rows of it.
        """
        for name, others in self.tied().items():
            if name not in gradients:
                continue
            flat = gradients[name].reshape(-1)
            mine = torch.zeros(room(name), dtype=flat.dtype, device=flat.device)
            mine[: flat.numel()].copy_(flat)
            rooms = {r: torch.empty_like(mine) for r in others}
            self.flying += [self.net.send(mine, self.axis, r, label=name) for r in others]
            works = [self.net.receive(one, self.axis, r, label=name) for r, one in rooms.items()]
            for work in works:
                work.wait()
            summands = [t for _, t in sorted({**rooms, self.rank: mine}.items())]
            total = summands[0]
            for one in summands[1:]:
                total = total + one
            gradients[name].copy_(total[: flat.numel()].view(gradients[name].shape))
        self.land()

    # ---- messages
    def _items(self, cut: int, microbatch: int) -> list[Item]:
        """What crosses the cut before stage `cut`."""
        return self.staged.items(cut, self.parts[microbatch])

    def _room(self, item: Item) -> Tensor:
        return torch.empty(item.form.shape, dtype=item.form.dtype, device=self.net.device)

    def post(self, stage: int, microbatch: int, way: str) -> None:
        """Begin to receive what a stage reads."""
        cut, peer = (stage, stage - 1) if way == "F" else (stage + 1, stage + 1)
        found = []
        for item in self._items(cut, microbatch):
            if way == "F" or item.graded:
                room = self._room(item)
                work = self.net.receive(room, self.axis, self._home(peer), label=f"{stage}{way}{microbatch}")
                found.append((item, room, work))
        self.posted[stage, microbatch, way] = found

    def _arrived(self, stage: int, microbatch: int, way: str) -> Values:
        found = {}
        for item, room, work in self.posted.pop((stage, microbatch, way), ()):
            work.wait()
            found[item.key] = room
        return found

    def send(self, stage: int, microbatch: int, way: str) -> None:
        """Send what a stage made."""
        self.flying = [w for w in self.flying if not w.done]
        alive = self.alive[stage, microbatch]
        cut, peer, values = (stage + 1, stage + 1, alive.sent) if way == "F" else (stage, stage - 1, alive.returned)
        for item in self._items(cut, microbatch):
            if way == "F" or item.graded:
                label = f"{stage}{way}{microbatch}"
                self.flying.append(self.net.send(values[item.key], self.axis, self._home(peer), label=label))
        if way == "B":
            alive.returned = {}

    # ---- passes
    def _forward(self, action: _Action, ctx: Any) -> None:
        stage, m = _of(action)
        alive = self.alive[stage, m]
        if stage and self._home(stage - 1) != self.rank:
            alive.received = self._arrived(stage, m, "F")
        graded = {item.key for item in self._items(stage, m) if item.graded} if stage else set()
        alive.received = {k: t.requires_grad_(k in graded) for k, t in alive.received.items()}
        with self._passing(stage), self.around.marks(str(action), "forward"):
            alive.loss, alive.sent = self.around.stage_forward(stage, self.start + m, alive.received)
        if stage < self.last and self._home(stage + 1) == self.rank:
            self.alive[stage + 1, m].received = {k: t.detach() for k, t in alive.sent.items()}

    def _outputs(self, stage: int, m: int) -> tuple[list[Tensor], list[Tensor] | None]:
        """What a backward pass starts from."""
        alive = self.alive[stage, m]
        if stage == self.last:
            return ([alive.loss] if alive.loss is not None else []), None
        back = alive.back if self._home(stage + 1) == self.rank else self._arrived(stage, m, "B")
        pairs = [(alive.sent[k], g) for k, g in back.items() if alive.sent[k].requires_grad]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _full(self, action: _Action, ctx: Any) -> None:
        stage, m = _of(action)
        outs, gradients = self._outputs(stage, m)
        with (
            self._passing(stage, backward=True),
            self._adding("B", stage, m, idle=not outs),
            self.around.marks(str(action), "backward"),
        ):
            if outs:
                torch.autograd.backward(outs, gradients)
        self._hand_back(stage, m)
        self.alive[stage, m] = Alive(returned=self.alive[stage, m].returned)

    def _input(self, action: _Action, ctx: Any) -> None:
        stage, m = _of(action)
        alive = self.alive[stage, m]
        outs, gradients = alive.pending = self._outputs(stage, m)
        if alive.leaves and outs:  # without leaves nobody waits: all of it is done with the weights
            outs = [t.clone() if t._is_view() or t.is_leaf else t for t in outs]  # torch detaches them in place
            weights = iter(self.weights[stage])
            with self._passing(stage, backward=True), self.around.marks(str(action), "backward"):
                _, alive.groups = stage_backward_input(outs, gradients, alive.leaves, weights)  # type: ignore[arg-type]
            alive.pending, alive.sent, alive.loss = ([], None), {}, None
        self._hand_back(stage, m)

    def _weight(self, action: _Action, ctx: Any) -> None:
        stage, m = _of(action)
        alive = self.alive[stage, m]
        idle = alive.groups is None and not alive.pending[0]
        with (
            self._passing(stage, backward=True, whole=True),
            self._adding("W", stage, m, idle=idle),
            self.around.marks(str(action), "backward"),
        ):
            if alive.groups is not None:
                stage_backward_weight(iter(self.weights[stage]), alive.groups)
                self.around.accumulated(self.weights[stage])
            elif alive.pending[0]:
                torch.autograd.backward(*alive.pending)
        self.alive[stage, m] = Alive(returned=alive.returned)

    def _adding(self, kind: str, stage: int, m: int, *, idle: bool) -> AbstractContextManager[None]:
        last = self.ending and self.finals[stage] == Turn(f"{stage}{kind}", m)
        return self.around.adding(stage, self.start + m, last=last, idle=idle)

    def _passing(self, stage: int, **how: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.stored is None else self.stored.passing(stage, **how)

    def _hand_back(self, stage: int, m: int) -> None:
        """The gradients of what was received, for the stage before."""
        alive, nothing = self.alive[stage, m], self.around.nothing(stage, self.start + m)
        alive.returned = {
            k: t.grad if t.grad is not None and not nothing else torch.zeros_like(t)
            for k, t in alive.received.items()
            if t.requires_grad
        }
        for t in alive.received.values():
            t.grad = None
        if stage and self._home(stage - 1) == self.rank:
            self.alive[stage - 1, m].back = alive.returned


def _of(action: _Action) -> tuple[int, int]:
    assert action.microbatch_index is not None, f"{action} has no microbatch"
    return action.stage_index, action.microbatch_index


def _action(turn: Turn) -> _Action:
    """A turn as torch spells it."""
    found = _Action.from_str(f"{turn.part}{turn.microbatch}")
    assert found is not None, f"{turn} is nothing torch knows"
    return found


def _no_loss(*_: Any) -> None:
    """The loss is the step's; torch's runtime only wants to know that there is a backward pass."""


@contextmanager
def _silent() -> Iterator[None]:
    """A failed action is told by whoever catches it; torch would print the whole schedule before."""
    log = logging.getLogger(_PipelineScheduleRuntime.__module__)
    silent, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = silent
