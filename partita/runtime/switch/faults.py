"""A bad link on purpose: packets are lost, doubled and overtaken by what a seed and the packet itself decide.

Whether a packet is lost follows from its number, its worker and its attempt, so the same seed gives the same losses in every
run, whatever the timing, and in front of every data plane: the link of a worker is bad, not the switch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from partita.runtime.switch.protocol import Packet

MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: splitmix64's step


@dataclass(frozen=True)
class Faults:
    """Shares of packets, in each direction.

    Args:
        loss, copies, late: Lost; sent twice; held back until some others have passed.
        seed: Another seed, other packets.
    """

    loss: float = 0.0
    copies: float = 0.0
    late: float = 0.0
    seed: int = 0

    @property
    def none(self) -> bool:
        return not (self.loss or self.copies or self.late)

    def draw(self, packet: Packet, worker: int, what: int) -> float:
        """A number in [0, 1) that is this packet's own."""
        z = self.seed
        for part in (packet.seq, packet.kind, worker, packet.attempt, what):
            z = (z ^ part) + MIX & (1 << 64) - 1
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
            z = (z ^ z >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
            z ^= z >> 31
        return z / 2**64


class BadLink:
    """One direction of a worker's link.

    Args:
        faults: How bad.
        worker: Whose.
        held: Packets that pass before one that was held back.
    """

    def __init__(self, faults: Faults, worker: int, held: int = 3) -> None:
        self.faults, self.worker, self.held = faults, worker, held
        self.back: list[list] = []  # [packets to wait for, packet]

    def through(self, packet: Packet) -> Iterator[Packet]:
        """What comes out of the link when a packet goes in."""
        draw = self.faults.draw
        if draw(packet, self.worker, 0) >= self.faults.loss:
            copies = 1 + (draw(packet, self.worker, 1) < self.faults.copies)
            if draw(packet, self.worker, 2) < self.faults.late:
                self.back.append([self.held, packet])
                copies -= 1
            yield from [packet] * copies
        for one in self.back:
            one[0] -= 1
        yield from (packet for left, packet in self.back if left < 0)
        self.back = [one for one in self.back if one[0] >= 0]
