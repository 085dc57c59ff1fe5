"""How a part of a flat buffer goes from workers to servers and back: a core all share, and what each explores.

    shards        core | explorer of each shard, side by side        (ranks, b + e) both ways, keys of the explorer (ranks, e)
    everywhere    core | explorer of the whole, the same on all ranks                one sum

What is drawn depends on seed, lane, worker, shard and the number of the exchange alone: nothing of it needs to be kept.
"""

import torch
from torch import Tensor

from partita.errors import RunFailed
from partita.program.pushing import Slim
from partita.runtime.net import Net
from partita.runtime.relaxed.channel import Everywhere, Pushed, Shards, Take, mean
from partita.runtime.relaxed.draw import draw, source
from partita.runtime.relaxed.lane import Lane

TOGETHER = -1  # in place of a worker's number: what is drawn for all


def significance(weights: Tensor, update: Tensor, c: float | str, rate: float) -> Tensor:
    """|w| + c |g| of every element; `update` is g, or `rate` times as much."""
    moved = update.abs()
    if c == "gradient":
        return moved
    size = weights.abs()
    if c == "auto":
        by = float(moved.mean())
        factor = float(size.mean()) / by if by else 0.0
    else:
        factor = float(c) / rate
    return size.add_(moved, alpha=factor)


def most(score: Tensor, count: int) -> Tensor:
    """Where the `count` largest stand, ascending."""
    return torch.topk(score, count, sorted=False).indices.sort().values


def others(chosen: Tensor, size: int) -> Tensor:
    """The numbers below `size` that are not chosen, ascending."""
    left = torch.ones(size, dtype=torch.bool)
    left[chosen] = False
    return left.nonzero().view(-1)


class SlimShards(Shards):
    """Every rank serves one shard, of which it chooses the core."""

    def __init__(self, net: Net, axis: str, lane: Lane, slim: Slim, seed: int) -> None:
        super().__init__(net, axis, lane)
        assert lane.width < 1 << 31, f"{lane.width} elements of a shard are more than a 32-bit key can tell apart"
        self.slim, self.seed = slim, seed
        self.size, self.explored = slim.core(lane.width), slim.explored(lane.width)
        self.core = torch.zeros((self.ranks, self.size), dtype=torch.int32)  # keys within each shard
        self.rest = torch.zeros((self.ranks, lane.width - self.size), dtype=torch.int32)
        self.chosen = torch.zeros(0, dtype=torch.int64)  # where in the flat buffer
        self.theirs = torch.zeros(0, dtype=torch.int64)  # (ranks, e): keys each worker explores of what this rank serves

    def explorer(self, worker: int, shard: int) -> Tensor:
        """Keys within a shard that a worker explores in this exchange."""
        rest = self.rest[shard]
        return rest[draw(self.explored, len(rest), source(self.seed, self.lane.number, worker, shard, self.number))]

    # ---- an exchange
    def push(self, take: Take) -> Pushed:
        if self.full:
            return super().push(take)
        shards = range(self.ranks)
        mine = torch.stack([self.explorer(self.rank, s) for s in shards])
        offsets = torch.arange(self.ranks).view(-1, 1) * self.lane.width
        self.chosen = (torch.cat([self.core, mine], 1) + offsets).view(-1)
        rows = self.exchanged(take(self.chosen), "push")
        self.theirs = self._keys(mine).long()
        core = self.core[self.rank].long()
        keys, values = self._merged(rows[:, self.size :])
        return torch.cat([core, keys]), torch.cat([mean(rows[:, : self.size]), values])

    def _keys(self, mine: Tensor) -> Tensor:
        """(ranks, e): what the workers explore here."""
        if self.slim.explorer == "seed" or not self.explored:
            return torch.stack([self.explorer(worker, self.rank) for worker in range(self.ranks)])
        got = self.exchanged(mine.contiguous(), "keys")
        for worker, keys in enumerate(got):
            if int(keys.min()) < 0 or int(keys.max()) >= self.lane.width:
                raise RunFailed(
                    f"rank {worker} of axis {self.axis!r} pushed key {int(keys.min())} or {int(keys.max())} "
                    f"to a shard of {self.lane.width} elements on rank {self.rank}: nothing of it was taken"
                )
        return got

    def _merged(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) of what the workers explored, added up worker by worker."""
        keys = torch.unique(self.theirs)
        at = torch.searchsorted(keys, self.theirs)
        total = torch.zeros(len(keys), dtype=rows.dtype)
        pushers = torch.zeros(len(keys), dtype=rows.dtype)
        for row, where in zip(rows, at, strict=True):
            total.index_add_(0, where, row)
            pushers.index_add_(0, where, torch.ones_like(row))
        return keys, total / (pushers if self.slim.merge == "mean" else self.ranks)

    def pull(self, flat: Tensor, base: Tensor | None) -> None:
        if self.full:
            super().pull(flat, base)
            self._choose()
            return
        core = self.served[self.core[self.rank].long()].expand(self.ranks, -1)
        got = self.exchanged(torch.cat([core, self.served[self.theirs]], 1), "pull").view(-1)
        flat.index_copy_(0, self.chosen, got)
        if base is not None:
            base.index_copy_(0, self.chosen, got)

    # ---- the core
    def _choose(self) -> None:
        """Choose a new core of this shard, and tell it."""
        if self.size:
            mine = most(significance(self.served, self.update, self.slim.c, self.rate), self.size)
            self.core = self._told(mine)
        self.filled()

    def _told(self, mine: Tensor) -> Tensor:
        width = self.lane.width
        if not self.slim.bitmap(width):
            out = torch.empty(self.ranks * self.size, dtype=torch.int32)
            self.net.all_gather_into(out, mine.to(torch.int32), self.axis, label="core")
            return out.view(self.ranks, -1)
        bits = packed(mine, width)
        out = torch.empty(self.ranks * len(bits), dtype=torch.uint8)
        self.net.all_gather_into(out, bits, self.axis, label="core")
        return torch.stack([unpacked(row, width) for row in out.view(self.ranks, -1)]).to(torch.int32)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "core": self.core}

    def filled(self) -> None:
        """The core is another."""
        self.rest = torch.stack([others(keys.long(), self.lane.width) for keys in self.core]).to(torch.int32)

    def restart(self) -> None:
        super().restart()
        self.update = torch.zeros_like(self.served)
        with self.net.quiet():
            self._choose()


class SlimEverywhere(Everywhere):
    """Every rank serves everything, chooses the same core, and explores the same."""

    def __init__(self, net: Net, axis: str, lane: Lane, slim: Slim, seed: int) -> None:
        super().__init__(net, axis, lane)
        self.slim, self.seed = slim, seed
        self.size, self.explored = slim.core(lane.size), slim.explored(lane.size)
        self.core = torch.zeros(self.size, dtype=torch.int64)
        self.rest = torch.zeros(0, dtype=torch.int64)
        self.chosen = torch.zeros(0, dtype=torch.int64)

    def push(self, take: Take) -> Pushed:
        if self.full:
            return super().push(take)
        drawn = draw(self.explored, len(self.rest), source(self.seed, self.lane.number, TOGETHER, 0, self.number))
        self.chosen = torch.cat([self.core, self.rest[drawn]])
        return self.chosen, self.summed(take(self.chosen)).div_(self.ranks)

    def pull(self, flat: Tensor, base: Tensor | None) -> None:
        if self.full:
            super().pull(flat, base)
            self._choose(flat)
        elif base is not None:
            got = self.served[self.chosen]
            flat.index_copy_(0, self.chosen, got)
            base.index_copy_(0, self.chosen, got)

    def _choose(self, flat: Tensor) -> None:
        if self.size:
            weights, update = flat[: self.lane.size], self.update[: self.lane.size]
            self.core = most(significance(weights, update, self.slim.c, self.rate), self.size)
        self.filled()

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "core": self.core}

    def filled(self) -> None:
        """The core is another."""
        self.rest = others(self.core, self.lane.size)

    def restart(self) -> None:
        super().restart()
        self.update = torch.zeros_like(self.served)
        self._choose(self.lane.flat)


def packed(keys: Tensor, width: int) -> Tensor:
    """Keys below `width` as a bitmap of bytes."""
    bits = torch.zeros(-(-width // 8) * 8, dtype=torch.uint8)
    bits[keys] = 1
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, width: int) -> Tensor:
    """The keys of a bitmap, ascending."""
    rows = (bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return rows.reshape(-1)[:width].nonzero().view(-1)
