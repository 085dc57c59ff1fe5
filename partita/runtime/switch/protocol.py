"""The rules by which a switch adds up what workers send it, and every worker gets every sum exactly once. Pure: no sockets.

small form  DATA ──▶ all bits: RESULT to all     one copy a slot: it is emptied when all have said that they have the sum
            ACK  ──▶ all bits: FREE to all       a sum is handed on with RESULT: one round trip
pool form   SUM, MAX ──▶ all bits: RESULT        no ACK: a worker sends number s only when it has the sum of s - window, which
                                                 says that all had the sum of s - slots; so number s may take over its slot

Numbers have 32 bits and are compared by signed distance, at the switch and at the worker: links may lose, double and reorder.
A bit for each worker makes a copy harmless. A copy that comes too late is answered to its sender alone, never to all: while the
sum is not there, by WAIT with the bits that are. Workers send again after a time that follows the round trips they see.

Sources: Huang et al. 2023, P4SGD, arXiv:2305.05885 (small form); Sapio et al. 2021, SwitchML, NSDI (pool form); RFC 6298
(timer).
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.program.switched import BLOCK, WINDOW

Lanes = NDArray[np.int32]

DATA, ACK, SUM, MAX = range(4)  # what workers send
RESULT, FREE, WAIT = 0x10, 0x11, 0x12  # what the switch answers


@dataclass(frozen=True)
class Form:
    """One of the two ways to use slots.

    Args:
        lanes: int32 values of a packet.
        slots: Of the switch; a power of two, so that numbers may wrap around.
        window: Numbers a worker may have under way.
        acknowledged: A slot is emptied by ACKs.
    """

    lanes: int
    slots: int
    window: int
    acknowledged: bool


SMALL = Form(lanes=8, slots=128, window=128, acknowledged=True)
POOL = Form(lanes=BLOCK, slots=256, window=WINDOW, acknowledged=False)


class Packet(NamedTuple):
    """One packet, in either direction.

    Args:
        kind: DATA, ACK, SUM or MAX; RESULT, FREE or WAIT.
        seq: Number of the sum, 32 bits.
        worker: Sender or receiver; of no meaning in an answer to all.
        values: None where there are none.
        attempt: 0 for the first of its kind, then counted up.
        mask: Workers heard so far, in WAIT.
    """

    kind: int
    seq: int
    worker: int
    values: Lanes | None = None
    attempt: int = 0
    mask: int = 0


class Answer(NamedTuple):
    """A packet of the switch, for one worker or, with None, for all."""

    packet: Packet
    asker: int | None


def distance(a: int, b: int) -> int:
    """A - b of 32-bit numbers, signed."""
    return ((a - b + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


# ---- the switch


@dataclass
class Slot:
    """A number under way, who was heard, who has acknowledged, and the sum so far."""

    seq: int
    mask: int = 0
    acked: int = 0
    values: Lanes = field(default_factory=lambda: np.zeros(0, np.int32))


class Slots:
    """The switch's side of one form, for one group of workers.

    Args:
        form: Which.
        workers: how many; at most as many as a mask has bits.
        first: The number the workers begin with.
    """

    def __init__(self, form: Form, workers: int, first: int = 0) -> None:
        self.form, self.full = form, (1 << workers) - 1
        around = [(first + k) & 0xFFFFFFFF for k in range(form.slots)]
        self.slots = {seq % form.slots: Slot(seq) for seq in around}
        self.counts: Counter[str] = Counter()

    def receive(self, packet: Packet) -> Answer | None:
        """Take a packet in; what to answer, and to whom."""
        slot = self.slots[packet.seq % self.form.slots]
        age = distance(packet.seq, slot.seq)
        if age > 0 and not self.form.acknowledged:
            slot.seq, slot.mask, age = packet.seq, 0, 0
        if packet.kind == ACK:
            return self._acknowledged(slot, packet, age)
        if age:
            self.counts["stale"] += 1
            return None
        return self._added(slot, packet)

    def _added(self, slot: Slot, packet: Packet) -> Answer | None:
        bit = 1 << packet.worker
        if slot.mask & bit:
            self.counts["copies"] += 1
            if slot.mask == self.full:
                return Answer(Packet(RESULT, packet.seq, packet.worker, slot.values, packet.attempt), packet.worker)
            return Answer(Packet(WAIT, packet.seq, packet.worker, None, packet.attempt, slot.mask), packet.worker)
        assert packet.values is not None
        if not slot.mask:
            slot.values = packet.values.copy()
        elif packet.kind == MAX:
            np.maximum(slot.values, packet.values, out=slot.values)
        else:
            slot.values += packet.values
        slot.mask |= bit
        if slot.mask != self.full:
            return None
        self.counts["sums"] += 1
        return Answer(Packet(RESULT, packet.seq, packet.worker, slot.values, packet.attempt), None)

    def _acknowledged(self, slot: Slot, packet: Packet, age: int) -> Answer | None:
        if age < 0:  # that round is over: say so again
            self.counts["late"] += 1
            return Answer(Packet(FREE, packet.seq, packet.worker, None, packet.attempt), packet.worker)
        if age > 0 or slot.mask != self.full:
            self.counts["stale"] += 1
            return None
        again = slot.acked >> packet.worker & 1
        slot.acked |= 1 << packet.worker
        if slot.acked != self.full:
            return (
                Answer(Packet(WAIT, packet.seq, packet.worker, None, packet.attempt, slot.acked), packet.worker)
                if again
                else None
            )
        slot.seq, slot.mask, slot.acked = (slot.seq + self.form.slots) & 0xFFFFFFFF, 0, 0
        return Answer(Packet(FREE, packet.seq, packet.worker, None, packet.attempt), None)


# ---- a worker


class Timer:
    """How long to wait for an answer: above the round trips seen so far, and longer after each that did not come.

    Args:
        least, most: Seconds between which it stays.
    """

    DOUBLED = 3  # times at most: a peer may be late, and then the sum should not be

    def __init__(self, least: float = 0.05, most: float = 0.4) -> None:
        self.least, self.most = least, most
        self.smooth: float | None = None
        self.spread = 0.0

    def saw(self, trip: float) -> None:
        """A round trip, of a packet sent once."""
        if self.smooth is None:
            self.smooth, self.spread = trip, trip / 2
            return
        self.spread += (abs(trip - self.smooth) - self.spread) / 4
        self.smooth += (trip - self.smooth) / 8

    def wait(self, attempt: int) -> float:
        """Seconds to wait for an answer to the attempt with this number."""
        first = self.most / 4 if self.smooth is None else self.smooth + 4 * self.spread
        return min(max(first, self.least) * 2 ** min(attempt, self.DOUBLED), max(self.most, 2 * first))


@dataclass
class Sent:
    """A packet under way."""

    packet: Packet
    at: float
    due: float
    began: float  # of its first attempt
    unheard: int = 0  # attempts since the switch was last heard of it
    missing: int = 0  # bits of the workers the switch waits for, as it said


class Stuck(Exception):
    """No sum: `missing` names the workers the switch waits for; it is empty if the switch itself is not heard."""

    def __init__(self, missing: tuple[int, ...], waited: float, attempts: int) -> None:
        super().__init__(f"missing {missing} after {waited:.1f} s and {attempts} attempts")
        self.missing, self.waited, self.attempts = missing, waited, attempts


class Worker:
    """A worker's side of one form: hands over values, sends and sends again, keeps the sums until they are taken.

    Args:
        form: Which.
        worker, workers: Its bit, and how many there are.
        first: The number to begin with.
        timer: Of retransmissions.
        attempts: Without any answer, after which the switch counts as gone.
        patience: Seconds after which workers that the switch waits for count as stuck.
    """

    def __init__(
        self,
        form: Form,
        worker: int,
        workers: int,
        *,
        first: int = 0,
        timer: Timer | None = None,
        attempts: int = 30,
        patience: float = 600.0,
    ) -> None:
        self.form, self.worker, self.workers = form, worker, workers
        self.timer, self.attempts, self.patience = timer or Timer(), attempts, patience
        self.next = first
        self.queue: deque[Packet] = deque()  # handed over, not yet sent
        self.sent: dict[int, Sent] = {}
        self.sums: dict[int, Lanes] = {}
        self.due_first = float("inf")
        self.counts: Counter[str] = Counter()

    def hand_over(self, rows: Iterable[Lanes], kind: int) -> list[int]:
        """Have rows of `lanes` values added up; their numbers."""
        numbers = []
        for row in rows:
            self.queue.append(Packet(kind, self.next, self.worker, row))
            numbers.append(self.next)
            self.next = (self.next + 1) & 0xFFFFFFFF
        return numbers

    def sends(self, now: float) -> Iterator[Packet]:
        """What to put on the link now: what the window lets through, and what was not answered in time.

        Raises:
            Stuck: If there is no hope left.
        """
        while self.queue and (self.queue[0].seq - self.form.window) & 0xFFFFFFFF not in self.sent:
            packet = self.queue.popleft()
            yield self._put(packet, now, Sent(packet, now, 0.0, now))
        if now < self.due_first:
            return
        for one in [s for s in self.sent.values() if s.due <= now]:
            self._despair(one, now)
            self.counts["again"] += 1
            one.unheard += 1
            yield self._put(one.packet._replace(attempt=one.packet.attempt + 1), now, one)
        self.due_first = min((s.due for s in self.sent.values()), default=float("inf"))

    def _put(self, packet: Packet, now: float, one: Sent) -> Packet:
        one.packet, one.at, one.due = packet, now, now + self.timer.wait(packet.attempt)
        self.sent[packet.seq] = one
        self.due_first = min(self.due_first, one.due)
        self.counts["packets"] += 1
        return packet

    def _despair(self, one: Sent, now: float) -> None:
        silent = one.unheard >= self.attempts
        if silent or (one.missing and now - one.began > self.patience):
            missing = () if silent else tuple(w for w in range(self.workers) if one.missing >> w & 1)
            raise Stuck(missing, now - one.began, one.packet.attempt + 1)

    def receive(self, packet: Packet, now: float) -> Packet | None:
        """Take an answer in; what to send at once."""
        one = self.sent.get(packet.seq)
        if one is None:
            return None
        acking = one.packet.kind == ACK
        if packet.kind == WAIT:
            one.unheard, one.missing = 0, ((1 << self.workers) - 1) & ~packet.mask
        elif packet.kind == RESULT and not acking and packet.values is not None:
            self._trip(one, now)
            self.sums[packet.seq] = packet.values
            if self.form.acknowledged:
                ack = Packet(ACK, packet.seq, self.worker)
                return self._put(ack, now, Sent(ack, now, 0.0, now))
            del self.sent[packet.seq]
        elif packet.kind == FREE and acking:
            self._trip(one, now)
            del self.sent[packet.seq]
        return None

    def _trip(self, one: Sent, now: float) -> None:
        if one.packet.attempt == 0:  # of a packet sent twice nobody knows which was answered
            self.timer.saw(now - one.at)

    def take(self, numbers: Iterable[int]) -> list[Lanes] | None:
        """The sums of these numbers, once all are there."""
        numbers = list(numbers)
        if any(n not in self.sums for n in numbers):
            return None
        return [self.sums.pop(n) for n in numbers]
