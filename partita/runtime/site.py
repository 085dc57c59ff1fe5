"""Where strategies work: one rank's module and the verbs they may use on it.

    site = Site(module, net, subject, program, samples)
    site.apply(strategies)              innermost first: each sees the Program as the ones inside it left it
    with site.running(step, share): loss = subject.evaluate(site.module, part)

A strategy calls verbs; none of them sends anything that belongs to a step. What a step sends is sent by `runtime/step.py`, in
one normative order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from partita.mesh import Mesh
from partita.program import Program
from partita.program.buckets import cut_apart, cut_buckets
from partita.program.compressing import LowRank, Quantized, TopK
from partita.program.events import WIDTH
from partita.program.pushing import PushPull
from partita.program.reduction import stages_of
from partita.program.sharding import by_dtype, own, padded
from partita.program.split import Derivation
from partita.program.staging import Group, sent_of
from partita.runtime.batch import Share
from partita.runtime.batch_norm import GlobalStatistics, norms
from partita.runtime.cuts import Cut, slice_of, spans_of
from partita.runtime.cutting import own_stages
from partita.runtime.fully import Fully
from partita.runtime.installing import install
from partita.runtime.net import Net
from partita.runtime.offload import Offloaded
from partita.runtime.pipeline import Pipe
from partita.runtime.random import Stream, draws, rows
from partita.runtime.recompute import recomputed
from partita.runtime.relaxed.averaging import Averaging, Late, Meeting, Outer
from partita.runtime.relaxed.compressed import Largest, Rounded, Thin
from partita.runtime.relaxed.exchange import Exchange
from partita.runtime.relaxed.server import Server
from partita.runtime.replay import Replay
from partita.runtime.rows import piece_of
from partita.runtime.scatter import Gathering
from partita.runtime.stored import Stored
from partita.runtime.subject import Subject
from partita.strategy import Pipelined, Place, Strategy, inside, pipeline_of


@dataclass(frozen=True)
class Reduction:
    """Gradients summed over a data axis.

    Args:
        axis: Of the data.
        buckets: Names of parameters, in launch order.
        dtype: They are summed in; None means their own.
        scattered: "" leaves the sums on every rank; "last" leaves a rank its rows of them, sent with the last microbatch;
            "every" sends with every microbatch.
        through: "" for gloo's or NCCL's all_reduce; an op that adds up in the network.
    """

    axis: str
    buckets: list[list[str]]
    dtype: torch.dtype | None
    scattered: str = ""
    through: str = ""


def data_axes_of(strategies: Sequence[Strategy], mesh: Mesh) -> list[str]:
    """The axes strategies cut the batch over, in the order they do it."""
    return [a for s in strategies for a in s.batch_axes if mesh.size(a) > 1]


def coordinate_of(net: Net, axes: Sequence[str]) -> tuple[int, int]:
    """(number, of how many) of this rank along several axes together; the last varies fastest."""
    number, ranks = 0, 1
    for axis in axes:
        number, ranks = number * net.size(axis) + net.coordinate[axis], ranks * net.size(axis)
    return number, ranks


def keys_of(module: nn.Module) -> dict[str, str]:
    """Key of the state dict, or of a buffer outside it -> the name its tensor is known by: of a tied one, the first."""
    names = {id(p): n for n, p in module.named_parameters()}
    kept = module.state_dict(keep_vars=True)
    kept |= {name: b for name, b in module.named_buffers() if name not in kept}
    return {key: names.get(id(t), key) for key, t in kept.items() if isinstance(t, Tensor)}


def transient(module: nn.Module) -> list[str]:
    """Buffers that are not part of the state dict."""
    kept = module.state_dict(keep_vars=True)
    return [name for name, _ in module.named_buffers() if name not in kept]


def _reduction(axis: str, buckets: Sequence[Sequence[str]], dtype: str | None) -> Reduction:
    return Reduction(axis, [list(b) for b in buckets if b], getattr(torch, dtype) if dtype else None)


class Site:
    """One rank's part of a training run.

    Args:
        module: Whole when it comes in.
        net: The rank's network.
        subject: What is trained.
        program: One microbatch of the step on one device.
        samples: Of one global microbatch: what `program` was captured with.
        seed: Of the random streams.
    """

    def __init__(self, module: nn.Module, net: Net, subject: Subject, program: Program, samples: int, *, seed: int = 0) -> None:
        self.module, self.net, self.subject, self.program, self.samples = module, net, subject, program, samples
        self.shapes = {name: tuple(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}  # whole
        self.keys = keys_of(module)
        self.transient = transient(module)
        self.dtypes = {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}
        self.placements: dict[str, list[Cut]] = {}
        self.data_axes: list[str] = []
        self.reductions: list[Reduction] = []
        self.late: list[tuple[str, tuple[str, ...]]] = []  # axis, parameters whose gradients are summed over it once a step
        self.stream = Stream(seed, rows(program)) if draws(program) else None
        self.pipe: Pipe | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._replays: list[Replay] = []
        self._statistics: list[str] = []
        self._offloaded: set[str] = set()
        self._pieces: dict[str, Tensor] = {}
        self._rooms: dict[str, int] = {}  # elements of a piece on the rank with the most of them
        self._gathering: Gathering | None = None
        self.fully: Fully | None = None  # parameters held by rows
        self.stored: Stored | None = None  # the same, of a pipeline's stages
        self.exchange: Exchange | None = None  # of a relaxed data axis
        self.seed = seed
        self._gradients = {program.tensors[p].name for p in program.gradients}

    # ---- what the whole module said of itself
    @property
    def tied(self) -> dict[str, str]:
        """Other name of the state dict -> the first name of the same parameter."""
        return {key: name for key, name in self.keys.items() if key != name}

    # ---- what a strategy may read
    @property
    def mesh(self) -> Mesh:
        return self.net.mesh

    def dtype(self, tensor: Tensor) -> str:
        """The name of a tensor's dtype, as Programs write it."""
        return str(tensor.dtype).removeprefix("torch.")

    def has_gradient(self, name: str) -> bool:
        """Whether a parameter got a gradient when the step was captured."""
        return name in self._gradients

    def batch_norms(self) -> set[str]:
        """Paths of the batch norm modules."""
        return {name for name, m in self.module.named_modules() if any(c.__name__ == "_BatchNorm" for c in type(m).__mro__)}

    @property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the stages of this rank that read it; empty without a pipeline."""
        return stages_of(self.program)

    def buckets(self, limit: int, *, apart: bool = False) -> list[list[str]]:
        """The buckets of the gradients of this rank's parameters: names, in launch order; `apart`: those of its stages."""
        dtype = self.program.reduce_dtype
        entries = [
            (name, self.room(name) * WIDTH[dtype or self.dtype(p)], dtype or self.dtype(p))
            for name, p in self.module.named_parameters()
            if p.requires_grad and self.has_gradient(name)
        ]
        stages = self.stages if apart else {}
        return cut_apart(entries, stages, limit=limit) if stages else cut_buckets(entries, limit=limit)

    # ---- what a strategy may do
    def share_batch(self, axis: str) -> None:
        """A data axis: this rank takes its part of every batch."""
        if self.net.size(axis) > 1:
            self.data_axes.append(axis)

    def average_gradients(
        self, axis: str, buckets: Sequence[Sequence[str]], dtype: str | None = None, *, through: str = ""
    ) -> None:
        """Sum gradients over the axis, in buckets of named parameters, in launch order.

        Args:
            axis: A data axis.
            buckets: Names of parameters.
            dtype: What they are summed in; None means their own.
            through: "switch_reduce" or "block_reduce": sums in the network, after the backward pass.
        """
        if self.net.size(axis) > 1:
            if through:
                self.net.connect(axis, through)
            self.reductions.append(replace(_reduction(axis, buckets, dtype), through=through))

    def scatter_gradients(self, axis: str, buckets: Sequence[Sequence[str]], dtype: str | None = None, *, every: bool) -> None:
        """Sum gradients over the axis and step on this rank's rows of them; parameters are gathered after the step.

        Args:
            axis, buckets, dtype: As in `average_gradients`.
            every: They are sent with every microbatch, and whole gradients are not kept.
        """
        if self.net.size(axis) == 1:
            return
        found = replace(_reduction(axis, buckets, dtype), scattered="every" if every else "last")
        self.reductions.append(found)
        size, at = self.net.size(axis), self.net.coordinate[axis]
        named = dict(self.module.named_parameters())
        for name in (n for b in found.buckets for n in b):
            p = named[name]
            self._pieces[name] = piece_of(p.detach(), size, at)
            self._share_rows(name, axis, p.shape)
        groups = by_dtype(found.buckets, lambda n: named[n].dtype)
        self._gathering = Gathering(self.net, axis, named, self._pieces, groups)

    def shard_parameters(
        self,
        axis: str,
        units: Sequence[tuple[str, Sequence[str]]],
        dtype: str | None = None,
        *,
        reshard: bool = True,
        replicate: str | None = None,
    ) -> None:
        """Hold rows of every parameter, and gather a unit's parameters where they are used.

        Args:
            axis: Over which rows are shared out.
            units: (path of a module, names of its parameters), the root ("") last.
            dtype: Gradients are summed in; None means their own.
            reshard: Blocks let go of whole parameters after forward.
            replicate: A further data axis, whose ranks hold the same rows.
        """
        if self.net.size(axis) == 1:
            return
        copies = replicate if replicate is not None and self.net.size(replicate) > 1 else None
        for name, p in self.module.named_parameters():
            self._share_rows(name, axis, p.shape)
        kind = getattr(torch, dtype) if dtype else None
        self.fully = Fully(self.module, self.net, axis, units, kind, reshard=reshard, replicate=copies)
        self._pieces.update(self.fully.pieces)
        learned = [n for _, names in units for n in names if self.has_gradient(n)]
        self.reductions.append(replace(_reduction(axis, [learned], dtype), scattered="every"))

    def shard_stages(
        self,
        axis: str,
        groups: Sequence[Group],
        dtype: str | None = None,
        *,
        reshard: bool = True,
        replicate: str | None = None,
    ) -> None:
        """Hold rows of the parameters of this rank's stages, and gather a group where a pass uses it.

        Args:
            axis, dtype, replicate: As in `shard_parameters`.
            groups: Of `program.staging`.
            reshard: Whole parameters are let go of within and after each pass.
        """
        if self.net.size(axis) == 1:
            return
        assert self.pipe is not None, "stages have been cut"
        staged, name = self.pipe.staged, {p.id: p.name for p in self.program.parameters()}
        named = [(g.path, g.stages, [name[i] for i in g.parameters]) for g in groups]
        for n in (n for _, _, names in named for n in names):
            self._share_rows(n, axis, self.module.get_parameter(n).shape)
        self.stored = Stored(self.module, self.net, axis, named, lambda: staged.stage, reshard=reshard)
        self._pieces.update(self.stored.pieces)
        learned = [[n for i in g.parameters if self.has_gradient(n := name[i])] for g in sent_of(groups)]
        self.reductions.append(replace(_reduction(axis, learned, dtype), scattered="every"))
        if replicate is not None and self.net.size(replicate) > 1:
            self.reductions.append(_reduction(replicate, learned, dtype))
        self.pipe.store(self.stored)

    def _share_rows(self, name: str, axis: str, shape: Sequence[int]) -> None:
        """Note which rows of the whole this rank owns, of the part of this shape that it holds under the axes inside."""
        size = self.net.size(axis)
        self._rooms[name] = padded(shape, size) // size
        if shape:
            held = spans_of(self.shapes[name], self.placements.get(name, ()))[0]
            mine = slice_of(held, *own(shape[0], size, self.net.coordinate[axis]))
            self.placements.setdefault(name, []).append((axis, 0, mine))

    def push_and_pull(self, axis: str, plan: PushPull) -> None:
        """Exchange parameters or gradients over the axis with servers that its ranks are, as planned."""
        self._exchanges(Server(self.net, axis, self._learning(), self.placements, plan, self.seed))

    def meet(self, axis: str, *, period: int, rate: float, momentum: float, nesterov: bool) -> None:
        """Step alone, and take an outer step from the mean over the axis every `period` steps."""
        outer = Outer(period, rate, momentum, nesterov)
        self._exchanges(Meeting(self.net, axis, self._learning(), self.placements, outer))

    def average_late(self, axis: str, *, every: int, delay: int, keep: float) -> None:
        """Step alone, and take in averages over the axis `delay` steps after they were begun."""
        self._exchanges(Averaging(self.net, axis, self._learning(), self.placements, Late(every, delay, keep)))

    def send_largest(self, axis: str, codec: TopK) -> None:
        """Step with the mean of the largest elements of each rank's gradients."""
        self._exchanges(Largest(self.net, axis, self._learning(), self.placements, codec))

    def send_rounded(self, axis: str, codec: Quantized) -> None:
        """Step with the mean of each rank's gradients in a few bits."""
        self._exchanges(Rounded(self.net, axis, self._learning(), self.placements, codec, self.seed))

    def send_thin(self, axis: str, codec: LowRank) -> None:
        """Step with the mean of each rank's gradients as products of thin matrices."""
        self._exchanges(Thin(self.net, axis, self._learning(), self.placements, codec, self.seed))

    def _learning(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad and self.has_gradient(n)}

    def _exchanges(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._pieces.update(exchange.pieces)

    def synchronise_batch_norm(self, axis: str) -> None:
        """Batch norms use the statistics of the whole batch over the axis."""
        if self.net.size(axis) > 1:
            self._statistics.append(axis)

    def replay(self, *derivations: Derivation) -> None:
        """Cut the parameters and run the module's calls on shards, as derived along each axis."""
        derivations = tuple(d for d in derivations if d.size > 1 or d.across)
        if not derivations:
            return
        done = install(self.module, self.subject, self.samples, self.program, derivations, self.net, self.stream)
        self._replays.append(done.replay)
        self.late += done.late.items()
        for name, cuts in done.placements.items():
            self.placements.setdefault(name, []).extend(cuts)

    def sum_gradients(self, axis: str) -> None:
        """Sum the gradients of what is not cut along a data axis over it, one by one, once a step."""
        if self.net.size(axis) == 1:
            return
        whole = [
            name for name, _ in self.module.named_parameters() if axis not in {a for a, _, _ in self.placements.get(name, ())}
        ]
        self.late.append((axis, tuple(name for name in whole if self.has_gradient(name))))

    def cut_stages(self, strategy: Pipelined) -> None:
        """Keep this rank's stages of the module, and run its microbatches in turns with the other ranks of the axis."""
        self._optimizer = self.subject.optimizer(self.module)  # of the whole: a stage alone may have nothing that learns
        replay = self._replays[0] if self._replays else None
        own = own_stages(self.net, self.module, self.subject, self.program, self.samples, strategy, replay, self.stream)
        mine = {id(p) for p in self.module.parameters()}
        for group in self._optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        self.pipe, self.program = own.pipe, own.role
        self._replays[:] = [own.pipe.staged]

    def recompute(self, modules: Sequence[str], keep: Sequence[str] = ()) -> None:
        """Compute the inside of these modules once more in the backward pass, but for the results of the ops `keep` fits."""
        for path in modules:
            recomputed(self.module.get_submodule(path), keep)

    def offload(self, parameters: Sequence[str]) -> None:
        """Keep what the optimizer keeps of these parameters in host memory, and step there."""
        self._offloaded.update(parameters)

    def apply(self, strategies: Sequence[Strategy]) -> Program:
        """Apply strategies, innermost first, those that cut the model by depth before those of the data; returns Program′."""
        pipeline = pipeline_of(strategies, self.mesh)
        for strategy in inside(strategies):
            self._apply(strategy)
        if pipeline is not None:
            pipeline.apply(self)
        for strategy in (s for s in strategies if s.place >= Place.DATA and s is not pipeline):
            self._apply(strategy)
        return self.program

    def _apply(self, strategy: Strategy) -> None:
        strategy.apply(self)
        self.program = strategy.rewrite(self.program, self.mesh)

    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer of what this rank holds, as the subject makes it."""
        return self._optimizer or self.subject.optimizer(self.module)

    # ---- what the optimizer uses
    @property
    def pieces(self) -> dict[str, Tensor]:
        """What this rank's optimizer steps on, by the name of the parameter: the parameter, or its own rows of it."""
        return {name: self._pieces.get(name, p) for name, p in self.module.named_parameters()}

    @property
    def parts(self) -> dict[str, Tensor]:
        """This rank's part of every parameter: what a checkpoint stores of it."""
        return self.pieces if self.exchange is None else dict(self.module.named_parameters())

    def room(self, name: str) -> int:
        """Elements of a piece on the rank that owns the most rows of it."""
        return self._rooms[name] if name in self._rooms else self.module.get_parameter(name).numel()

    def adopt(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None) -> None:
        """Make an optimizer step on this rank's pieces, and gather the parameters after each of its steps.

        Args:
            optimizer: Made over the module's parameters.
            names: id() of the parameters it was made over -> their names; None: those the module has now.
        """
        known = names or {id(p): name for name, p in self.module.named_parameters(remove_duplicate=False)}
        first = {id(p): name for name, p in self.module.named_parameters()}
        stepped = self.pieces
        pieces = {name: stepped[first[id(p)]] for name, p in self.module.named_parameters(remove_duplicate=False)}
        for group in optimizer.param_groups:
            held = [p for p in group["params"] if id(p) not in known or known[id(p)] in pieces]  # of this rank's stages
            group["params"] = [pieces[known[id(p)]] if id(p) in known else p for p in held]
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        if self.exchange is not None:
            self.exchange.optimizer = optimizer

    def _stepped(self) -> None:
        """The optimizer has stepped."""
        self.refresh()
        if self.exchange is not None:
            self.exchange.parameters()

    def joined(self) -> AbstractContextManager[None]:
        """Within it, parameters are those of the one model, where ranks of a relaxed axis hold others."""
        return nullcontext() if self.exchange is None else self.exchange.joined()

    def refresh(self) -> None:
        """Fill the parameters from the ranks' pieces."""
        if self._gathering is not None:
            self._gathering.run()
        self.rest()

    def rest(self) -> None:
        """Let go of whole parameters that were gathered: the module then has what this rank holds."""
        if self.fully is not None:
            self.fully.rest()

    # ---- what the step uses
    def stepping(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as the strategies want it to step; made over this rank's parameters."""
        if not self._offloaded:
            return optimizer
        return Offloaded(optimizer, [p for name, p in self.pieces.items() if name in self._offloaded])

    @property
    def data_ranks(self) -> int:
        """Into how many parts the batch is cut."""
        return coordinate_of(self.net, self.data_axes)[1]

    @property
    def data_rank(self) -> int:
        """Which of them this rank runs."""
        return coordinate_of(self.net, self.data_axes)[0]

    @property
    def apart(self) -> list[str]:
        """Axes along which ranks hold other parameters."""
        served = self.exchange is not None and self.exchange.pieces
        return [self.pipe.axis] if self.pipe is not None else [self.exchange.axis] if served and self.exchange else []

    @property
    def talks(self) -> bool:
        """Whether forward and backward talk over a tensor axis."""
        return any(replay.talk.axes for replay in self._replays)

    @property
    def mixes(self) -> bool:
        """Whether forward and backward talk over a data axis (batch norm)."""
        return bool(self._statistics) and bool(norms(self.module))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Around forward and backward: global batch statistics."""
        if not self.mixes or not self.module.training:
            yield
            return
        with GlobalStatistics(self.net, self._statistics, self.module):
            yield

    @contextmanager
    def running(self, step: int, share: Share) -> Iterator[None]:
        """Around one microbatch's forward and loss: random streams outside, shards inside."""
        with ExitStack() as stack:
            if self.stream is not None and self.module.training:
                stack.enter_context(self.stream.step(step, share.first, share.samples))
            for replay in self._replays:
                stack.enter_context(replay)
            yield
