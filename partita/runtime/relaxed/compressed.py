"""Gradients that are sent smaller than they are: every rank gets the same mean, and steps with it as with the gradient."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from partita.program.compressing import WHOLE, LowRank, Quantized, TopK
from partita.runtime.cuts import Cut
from partita.runtime.net import Net
from partita.runtime.relaxed.channel import mean
from partita.runtime.relaxed.draw import source
from partita.runtime.relaxed.exchange import Exchange
from partita.runtime.relaxed.lane import Lane


class Compressed(Exchange):
    """Replaces gradients by what all ranks agree on.

    Args:
        net, axis, parameters, placements: As of `Exchange`.
        kept: Names of the buffers each lane keeps from step to step.
    """

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        kept: tuple[str, ...] = (),
    ) -> None:
        super().__init__(net, axis, parameters, placements)
        self.buffers = [{name: torch.zeros_like(lane.flat[: lane.size]) for name in kept} for lane in self.lanes]

    @abstractmethod
    def agreed(self, lane: Lane, gradient: Tensor) -> Tensor:
        """The mean over ranks, as far as it goes, of a lane's gradients; padding is left out."""

    @torch.no_grad()
    def gradients(self) -> None:
        self.own_gradients()
        for lane in self.lanes:
            whole = lane.like()
            lane.add_gradients(whole)
            whole[: lane.size] = self.agreed(lane, whole[: lane.size])
            for name, grad in lane.views(whole).items():
                lane.parameters[name].grad = grad

    def parameters(self) -> None:
        """All ranks have stepped alike."""

    @property
    def differs(self) -> bool:
        return False

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/{k}": t for k, some in enumerate(self.buffers) for name, t in some.items()}

    def filled(self) -> None:
        """Nothing follows from it."""

    def restart(self, step: int) -> None:
        """What had been kept for later is forgotten."""
        for some in self.buffers:
            for buffer in some.values():
                buffer.zero_()


class Largest(Compressed):
    """The largest elements go; the rest is added to the next gradient."""

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        codec: TopK,
    ) -> None:
        super().__init__(net, axis, parameters, placements, ("rest", "velocity") if codec.momentum else ("rest",))
        self.codec = codec

    @property
    def mark(self) -> str:
        return repr(self.codec)

    def agreed(self, lane: Lane, gradient: Tensor) -> Tensor:
        kept = self.buffers[lane.number]
        rest = kept["rest"].add_(self._moved(kept, gradient))
        keys = torch.topk(rest.abs(), self.codec.count(lane.size), sorted=False).indices.sort().values
        values = rest[keys]
        for buffer in kept.values():  # what goes has been said: momentum of it too
            buffer[keys] = 0
        all_values = values.new_empty(self.ranks * len(keys))
        all_keys = torch.empty(len(all_values), dtype=torch.int32, device=values.device)
        self.net.all_gather_into(all_values, values, self.axis, label="values")
        self.net.all_gather_into(all_keys, keys.to(torch.int32), self.axis, label="keys")
        total = torch.zeros_like(gradient)
        for where, row in zip(all_keys.view(self.ranks, -1).long(), all_values.view(self.ranks, -1), strict=True):
            total.index_add_(0, where, row)
        return total.div_(self.ranks)

    def _moved(self, kept: Mapping[str, Tensor], gradient: Tensor) -> Tensor:
        return kept["velocity"].mul_(self.codec.momentum).add_(gradient) if "velocity" in kept else gradient


class Rounded(Compressed):
    """Every element goes in a few bits, rounded up or down by lot, so that its mean is itself."""

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        codec: Quantized,
        seed: int,
    ) -> None:
        super().__init__(net, axis, parameters, placements)
        self.codec, self.seed = codec, seed

    @property
    def mark(self) -> str:
        return repr(self.codec)

    def agreed(self, lane: Lane, gradient: Tensor) -> Tensor:
        whole = torch.cat([gradient, gradient.new_zeros(len(lane.flat) - lane.size)]).view(self.ranks, -1)
        if self.codec.bits == WHOLE:
            return self._gathered(mean(self._sent(whole, "gradients")), whole)[: lane.size]
        levels, scales = quantize(whole, self.codec, source(self.seed, lane.number, self.rank, self.step))
        rows = self._sent(levels, "levels"), self._sent(scales, "scales")
        mine = mean(dequantize(*rows, self.codec, lane.width))
        if not self.codec.both:
            return self._gathered(mine, whole)[: lane.size]
        levels, scales = quantize(mine.view(1, -1), self.codec, source(self.seed, lane.number, self.rank, self.step, 1))
        all_levels = levels.new_empty((self.ranks, levels.shape[1]))
        all_scales = scales.new_empty((self.ranks, scales.shape[1]))
        self.net.all_gather_into(all_levels.view(-1), levels.view(-1), self.axis, label="levels")
        self.net.all_gather_into(all_scales.view(-1), scales.view(-1), self.axis, label="scales")
        return dequantize(all_levels, all_scales, self.codec, lane.width).reshape(-1)[: lane.size]

    def _sent(self, rows: Tensor, label: str) -> Tensor:
        got = torch.empty_like(rows)
        self.net.all_to_all_into(got, rows, self.axis, label=label)
        return got

    def _gathered(self, mine: Tensor, like: Tensor) -> Tensor:
        out = torch.empty_like(like).view(-1)
        self.net.all_gather_into(out, mine, self.axis, label="means")
        return out


def quantize(rows: Tensor, codec: Quantized, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(packed levels (rows, bytes), scales (rows, buckets)); a level is in -s..s with s = 2^(bits - 1) - 1.

    Source: Alistarh et al. 2017, "QSGD", arXiv:1610.02132, section 3.1, with the largest element of a bucket as its norm.
    """
    most, size = 2 ** (codec.bits - 1) - 1, rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -size % codec.bucket)).view(len(rows), -1, codec.bucket)
    scales = padded.abs().amax(2)
    share = padded / torch.where(scales > 0, scales, 1).unsqueeze(2) * most
    lot = torch.rand(share.shape, generator=generator, dtype=share.dtype)
    levels = (share + lot).floor_().clamp_(-most, most).add_(most).to(torch.uint8).view(len(rows), -1)[:, :size]
    return pack(levels, codec.bits), scales


def dequantize(packed: Tensor, scales: Tensor, codec: Quantized, size: int) -> Tensor:
    """The elements (rows, size) that levels and scales stand for."""
    most = 2 ** (codec.bits - 1) - 1
    levels = unpack(packed, codec.bits)[:, :size].to(scales.dtype).sub_(most).div_(most)
    padded = torch.nn.functional.pad(levels, (0, -size % codec.bucket)).view(len(packed), -1, codec.bucket)
    return (padded * scales.unsqueeze(2)).view(len(packed), -1)[:, :size]


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels of 8, 4 or 2 bits side by side in bytes, the first in the lowest bits."""
    each = 8 // bits
    padded = torch.nn.functional.pad(levels, (0, -levels.shape[1] % each)).view(len(levels), -1, each)
    return (padded << torch.arange(0, 8, bits, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The levels of `pack`, and those of the padding of its last byte."""
    rows = packed.unsqueeze(2) >> torch.arange(0, 8, bits, dtype=torch.uint8)
    return (rows & (2**bits - 1)).view(len(packed), -1)


class Thin(Compressed):
    """Matrices go as the product of two thin ones, found by one step of power iteration; what is missed goes with the next.

    Source: Vogels et al. 2019, "PowerSGD", arXiv:1905.13727, algorithm 1 and 2, with warm start.
    """

    def __init__(
        self,
        net: Net,
        axis: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, list[Cut]],
        codec: LowRank,
        seed: int,
    ) -> None:
        super().__init__(net, axis, parameters, placements, ("rest",))
        self.codec, self.seed = codec, seed
        self.right: dict[str, Tensor] = {}
        self.restart(0)

    @property
    def mark(self) -> str:
        return repr(self.codec)

    def restart(self, step: int) -> None:
        super().restart(step)
        for lane in self.lanes:
            for k, (name, p) in enumerate(lane.parameters.items()):
                if (shape := self.codec.thin(p.shape)) is not None:
                    draw = source(self.seed, lane.number, k)
                    first = torch.randn((shape[1], self.codec.rank), generator=draw, dtype=torch.float64)
                    self.right[name] = first.to(p.dtype)

    def agreed(self, lane: Lane, gradient: Tensor) -> Tensor:
        gradient = gradient + self.buffers[lane.number]["rest"]
        parts = {n: gradient[a : a + lane.parameters[n].numel()] for n, a in lane.starts.items()}
        wide = {n: parts[n].view(*shape) for n, p in lane.parameters.items() if (shape := self.codec.thin(p.shape))}
        plain = [part for n, part in parts.items() if n not in wide]
        left = self._summed([m @ self.right[n] for n, m in wide.items()] + plain, "left")
        thin = [torch.linalg.qr(p).Q for p in left[: len(wide)]]
        right = self._summed([m.T @ p for m, p in zip(wide.values(), thin, strict=True)], "right")
        found = {n: (p @ q.T).reshape(-1) for n, p, q in zip(wide, thin, right, strict=True)}
        self.right |= dict(zip(wide, right, strict=True))
        rest = iter(left[len(wide) :])
        out = torch.cat([found[n] if n in found else next(rest).reshape(-1) for n in parts])
        sent = torch.cat([found.get(n, part) for n, part in parts.items()])
        self.buffers[lane.number]["rest"].copy_(gradient - sent)
        return out

    def _summed(self, tensors: list[Tensor], label: str) -> list[Tensor]:
        """The means over ranks of tensors, sent as one."""
        if not tensors:
            return []
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self.net.all_reduce(flat, self.axis, label=label)
        flat.div_(self.ranks)
        return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"right/{name}": t for name, t in self.right.items()}
