"""A rank of a parameter server: worker and server in one.

at worker      the optimizer steps on `flat`; pushed is flat - base; the servers' shards take the mean
at server      gradients are added up in `base`; the servers' shards are stepped on by the optimizer
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from partita.program.pushing import PushPull
from partita.runtime.cuts import Cut
from partita.runtime.net import Net
from partita.runtime.relaxed.channel import Channel, Everywhere, Shards
from partita.runtime.relaxed.exchange import Exchange
from partita.runtime.relaxed.lane import Lane
from partita.runtime.relaxed.slim import SlimEverywhere, SlimShards


class Server(Exchange):
    """Pushes and pulls.

    Args:
        net, axis, parameters, placements: As of `Exchange`.
        plan: What, and when.
        seed: Of what is drawn.
    """

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        plan: PushPull,
        seed: int,
    ) -> None:
        super().__init__(net, axis, parameters, placements)
        self.plan, self.at_server = plan, plan.at == "server"
        self.channels = [self._channel(lane, seed) for lane in self.lanes]
        self.base = [lane.like() if self.at_server else lane.flat.clone() for lane in self.lanes]
        self._pieces: dict[str, Tensor] = {}
        if plan.sharded:
            for channel in self.channels:
                self._pieces |= channel.lane.pieces(channel.served, self.rank)

    def _channel(self, lane: Lane, seed: int) -> Channel:
        if self.plan.slim is None:
            kind = Shards if self.plan.form == "server" else Everywhere
            return kind(self.net, self.axis, lane)
        kind = SlimShards if self.plan.form == "server" else SlimEverywhere
        return kind(self.net, self.axis, lane, self.plan.slim, seed)

    @property
    def mark(self) -> str:
        return repr(self.plan)

    @property
    def pieces(self) -> dict[str, Tensor]:
        return self._pieces

    @property
    def differs(self) -> bool:
        return not self.at_server or (self.plan.slim is not None and self.plan.form == "server")

    @property
    def alone(self) -> bool:
        return not self.at_server

    @property
    def full(self) -> bool | None:
        """Whether everything is exchanged after this step; None: nothing is."""
        return self.plan.full(self.step)

    # ---- around a step
    def gradients(self) -> None:
        """At the server: push what the gradients have added up to."""
        self.own_gradients()
        if not self.at_server:
            return
        for lane, added in zip(self.lanes, self.base, strict=True):
            lane.add_gradients(added)
        for piece in self._pieces.values():
            piece.grad = None
        if (full := self.full) is None:
            return
        for channel, added in zip(self.channels, self.base, strict=True):
            channel.begin(self.step // self.plan.every, full=full)
            pushed = channel.push(lambda where, added=added: self._taken(added, where))
            self._hand_over(channel, pushed)

    def _taken(self, added: Tensor, where: Tensor | None) -> Tensor:
        """The mean gradient of the batches since it was last pushed; it is pushed now."""
        taken = added.clone() if where is None else added.index_select(0, where)
        if where is None:
            added.zero_()
        else:
            added.index_fill_(0, where, 0.0)
        return taken.div_(self.plan.every) if self.plan.every > 1 else taken

    def _hand_over(self, channel: Channel, pushed: tuple[Tensor | None, Tensor]) -> None:
        """Give the optimizer what was pushed; elements nobody pushed have no gradient but zero."""
        where, values = pushed
        dense = values if where is None else torch.zeros_like(channel.served).index_copy_(0, where, values)
        channel.update = dense
        if self.plan.sharded:
            for name, grad in channel.lane.pieces(dense, self.rank).items():
                self._pieces[name].grad = grad
            return
        for name, grad in channel.lane.views(dense).items():
            channel.lane.parameters[name].grad = grad

    @torch.no_grad()
    def parameters(self) -> None:
        """Pull; at the worker, push what its steps have changed before."""
        if (full := self.full) is None:
            return
        if not self.at_server:
            self._push_changes(full=full)
        for channel, base in zip(self.channels, self.base, strict=True):
            channel.pull(channel.lane.flat, None if self.at_server else base)

    def _push_changes(self, *, full: bool) -> None:
        """Push what the steps of this worker have changed since it pulled."""
        for channel, base in zip(self.channels, self.base, strict=True):
            flat = channel.lane.flat
            channel.begin(self.step // self.plan.every, full=full)
            channel.rate = self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else 1.0
            where, values = channel.push(
                lambda w, f=flat, b=base: f - b if w is None else f.index_select(0, w) - b.index_select(0, w)
            )
            if where is None:
                channel.served.add_(values)
                channel.update = values
            else:
                channel.served.index_add_(0, where, values)

    # ---- what the rest of a run needs
    def model(self, lane: Lane) -> Tensor:
        """What the servers serve."""
        return self.channels[lane.number].model()

    def state(self) -> dict[str, Tensor]:
        found = {f"base/{k}": b for k, b in enumerate(self.base)}
        return found | {f"{name}/{k}": t for k, c in enumerate(self.channels) for name, t in c.state().items()}

    def filled(self) -> None:
        for channel in self.channels:
            channel.filled()

    @torch.no_grad()
    def restart(self, step: int) -> None:
        for channel, base in zip(self.channels, self.base, strict=True):
            base.zero_() if self.at_server else base.copy_(channel.lane.flat)
            channel.restart()
